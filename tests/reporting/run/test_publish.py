"""What is uploaded to the Hub is a whole, intact model folder and nothing else; everything else is refused before."""

import json
from pathlib import Path
from unittest.mock import create_autospec

import pytest
from huggingface_hub import HfApi

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.io.progress import Silent
from ropewalk.models.checkpoint.card import signed_card
from ropewalk.reporting.run.publish import folder_to_push, push, writable_repository
from ropewalk.training.checkpoint.files import Position, write_export_record
from ropewalk.training.folder import RECIPE, SUMMARY

USER = {"name": "me", "orgs": [{"name": "lab"}], "auth": {"accessToken": {"role": "write"}}}


@pytest.fixture(scope="module")
def client():
    return create_autospec(HfApi, instance=True)


@pytest.fixture
def api(client, monkeypatch):
    fake = client
    fake.reset_mock(return_value=True, side_effect=True)
    fake.endpoint = "https://hub"
    fake.whoami.return_value = USER
    fake.repo_exists.return_value = False
    fake.file_exists.return_value = False
    monkeypatch.setattr("huggingface_hub.HfApi", lambda **_: fake)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_secret")
    return fake


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run, with more in its folder than its model."""
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    write_export_record(model, Position(0, 10, 100))
    (model / "README.md").write_text(signed_card("card"))
    (model / ".cache").write_text("secret")
    for name in (RECIPE, SUMMARY, "secret.txt"):
        (model.parent / name).write_text("secret")
    return model.parent


def uploaded(api) -> dict[str, bytes]:
    (name, added), options = api.create_commit.call_args
    assert name == "me/mine"
    assert "ropewalk" in options["commit_message"]
    return {each.path_in_repo: Path(each.path_or_fileobj).read_bytes() for each in added}


def test_the_model_and_nothing_else_is_uploaded_privately(api, run):
    (run / "model" / "LICENSE").write_text("mine")
    (run / "model" / "original").mkdir()
    found = push(folder_to_push(str(run)), writable_repository("me/mine"), Silent())
    names = ["LICENSE", "README.md", "config.json", "model.safetensors", "ropewalk-digests.json"]
    assert sorted(uploaded(api)) == names
    assert b"secret" not in b"".join(uploaded(api).values())
    api.create_repo.assert_called_once_with("me/mine", private=True, exist_ok=True)
    assert json.loads(json.dumps(found.to_json())) == {
        "folder": str(run / "model"),
        "repository": "me/mine",
        "url": "https://hub/me/mine",
        "private": True,
        "files": names,
        "bytes": sum(map(len, uploaded(api).values())),
        "notes": ["original is a folder and was not uploaded"],
    }
    # Large files go first; the commit makes all of them visible at once.
    calls = [name for name, *_ in api.method_calls if name in ("preupload_lfs_files", "create_commit")]
    assert calls == ["preupload_lfs_files"] * 5 + ["create_commit"]


def test_an_organisation_and_public_where_asked(api, run):
    assert not writable_repository("lab/mine", public=True).private
    api.repo_exists.return_value = True
    api.repo_info.return_value.private = True
    assert writable_repository("LAB/mine").exists


@pytest.mark.parametrize(
    "name",
    [
        "",
        "mine",
        "me/",
        "/mine",
        "a/b/c",
        "me/a b",
        "me/a..b",
        "me/a--b",
        "me/x.git",
        "me/" + "a" * 94,
        "-/a",
    ],
)
def test_a_wrong_name_is_refused(api, name):
    with pytest.raises(RopewalkError, match="is not the name of a repository; write OWNER/NAME"):
        writable_repository(name)
    assert api.method_calls == []


def test_without_a_token_nothing_is_asked(api, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(
        RopewalkError, match=r"me/mine needs a Hugging Face token, .* `hf auth login`, or set HF_TOKEN"
    ):
        writable_repository("me/mine")
    assert api.method_calls == []


@pytest.mark.parametrize(
    ("known", "name", "message"),
    [
        (
            USER,
            "you/mine",
            "your Hugging Face token belongs to me, who cannot upload to you; .* slash, write one of: me, lab",
        ),
        (
            {"name": "me", "auth": {"accessToken": {"role": "read"}}},
            "me/mine",
            "your Hugging Face token can only read",
        ),
    ],
)
def test_a_token_that_may_not_write_is_refused(api, known, name, message):
    api.whoami.return_value = known
    with pytest.raises(RopewalkError, match=message):
        writable_repository(name)
    assert [name for name, *_ in api.method_calls] == ["whoami"]


@pytest.mark.parametrize(("private", "public"), [(False, False), (True, True)])
def test_a_repository_seen_by_others_than_asked_is_refused(api, private, public):
    api.repo_exists.return_value = True
    api.repo_info.return_value.private = private
    with pytest.raises(RopewalkError, match=f"me/mine exists and is {'private' if private else 'public'}; "):
        writable_repository("me/mine", public)


def test_a_hub_that_fails_is_one_sentence(api, run):
    api.whoami.side_effect = ConnectionError("no route\nto the Hub")
    with pytest.raises(RunFailure, match=r"^cannot query the Hugging Face Hub about me/mine: no route$"):
        writable_repository("me/mine")
    api.whoami.side_effect = None
    api.create_commit.side_effect = ConnectionError("reset")
    with pytest.raises(RunFailure, match=r"^cannot upload to me/mine: reset$"):
        push(folder_to_push(str(run)), writable_repository("me/mine"), Silent())


@pytest.mark.parametrize(
    ("remote", "local", "kept"),
    [
        ("written on the Hub", signed_card("card"), True),
        (signed_card("earlier"), signed_card("card"), False),
        ("written on the Hub", "written here", False),
        (signed_card("earlier"), "written here", False),
    ],
)
def test_a_card_that_somebody_wrote_on_the_hub_is_kept(api, run, remote, local, kept):
    api.repo_exists.return_value = api.file_exists.return_value = True
    api.repo_info.return_value.private = True

    def download(name, file, local_dir):
        path = Path(local_dir) / file
        path.write_text(remote)
        return str(path)

    api.hf_hub_download.side_effect = download
    (run / "model" / "README.md").write_text(local)
    found = push(folder_to_push(str(run)), writable_repository("me/mine"), Silent())
    assert ("README.md" not in uploaded(api)) == kept
    assert ("the README.md in me/mine was written there and was kept" in found.notes) == kept
    api.create_repo.assert_not_called()


def test_folders_that_are_no_model_are_refused(run, tmp_path):
    assert folder_to_push(str(run)) == folder_to_push(str(run / "model")) == run / "model"
    with pytest.raises(RopewalkError, match="there is no folder meta-llama/Llama-3"):
        folder_to_push("meta-llama/Llama-3")
    with pytest.raises(
        RopewalkError, match=r"is not the folder of a model, because it lacks config\.json or"
    ):
        folder_to_push(str(tmp_path))
    (run / "model" / "model.safetensors").write_bytes(b"weightz")
    with pytest.raises(RopewalkError, match=r"is damaged \(.*model.safetensors.*\); export the model again"):
        folder_to_push(str(run))
    (run / SUMMARY).unlink()
    with pytest.raises(RopewalkError, match=r"is not finished; finish it with: ropewalk extend .* --resume"):
        folder_to_push(str(run))


def test_an_adapter_and_a_link_are_refused(run, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with pytest.raises(RopewalkError, match="contains an adapter and no model"):
        folder_to_push(str(tmp_path / "adapter"))
    (run / "model" / "passwords").symlink_to(run / "secret.txt")
    with pytest.raises(RopewalkError, match="passwords is a link; replace it with the file itself"):
        folder_to_push(str(run))
