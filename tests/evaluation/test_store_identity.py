"""A checkpoint is known by its weights and its config, and by nothing else."""

import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.store import model_digest


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return filled(tmp_path / "checkpoint")


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"rope_theta": 10000.0}')
    (folder / "model-00001-of-00002.safetensors").write_bytes(bytes(range(200)))
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\x00" * 100)
    (folder / "README.md").write_text("about")
    return folder


def test_copies_have_one_digest_wherever_they_lie(checkpoint: Path, tmp_path: Path) -> None:
    found = model_digest(str(checkpoint))
    assert found is not None
    assert len(found) == 64
    assert found == model_digest(str(checkpoint)) == model_digest(f"{checkpoint}/")
    assert found == model_digest(str(shutil.copytree(checkpoint, tmp_path / "elsewhere")))


@pytest.mark.parametrize("name", ["README.md", "trainer_state.json", "optimizer.pt"])
def test_what_does_not_make_the_model_does_not_matter(name: str, checkpoint: Path) -> None:
    before = model_digest(str(checkpoint))
    (checkpoint / name).write_text("changed")
    assert model_digest(str(checkpoint)) == before


def test_one_byte_of_weights_or_config_makes_another_model(checkpoint: Path) -> None:
    seen = {model_digest(str(checkpoint))}
    for name in ("config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        file = checkpoint / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        seen.add(model_digest(str(checkpoint)))
        file.write_bytes(content[:-1])
        seen.add(model_digest(str(checkpoint)))
        file.write_bytes(content)
    assert len(seen) == 7


def test_shards_that_change_names_or_go_make_another_model(checkpoint: Path) -> None:
    before = model_digest(str(checkpoint))
    first, second = sorted(checkpoint.glob("*.safetensors"))
    swapped = first.read_bytes(), second.read_bytes()
    first.write_bytes(swapped[1])
    second.write_bytes(swapped[0])
    moved = model_digest(str(checkpoint))
    second.unlink()
    assert len({before, moved, model_digest(str(checkpoint))}) == 3


@pytest.mark.parametrize("place", ["no/such", "/no/such/folder", "no such name!", "a/b/c/d"])
def test_what_is_not_at_hand_has_no_digest(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert model_digest(place) is None


def test_hub_id_is_looked_up_in_the_local_cache(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = tmp_path / "hub" / "models--some--model"
    filled(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert model_digest("some/model") == model_digest(str(checkpoint))


@pytest.mark.parametrize("kept", [(), ("config.json",)])
def test_folder_without_weights_has_no_digest(kept: tuple[str, ...], checkpoint: Path) -> None:
    """As where a tokenizer and a config alone were downloaded: two models may have the same."""
    for file in list(checkpoint.iterdir()):
        if file.name not in kept:
            file.unlink()
    assert model_digest(str(checkpoint)) is None


def test_weights_that_cannot_be_read_are_named(checkpoint: Path) -> None:
    (checkpoint / "more.safetensors").mkdir()
    with pytest.raises(RopewalkError, match=r"cannot read .*checkpoint: Is a directory"):
        model_digest(str(checkpoint))
    (checkpoint / "more.safetensors").rmdir()
    (checkpoint / "lost.safetensors").symlink_to(checkpoint / "gone")
    with pytest.raises(RopewalkError, match=r"cannot read .*checkpoint: No such file"):
        model_digest(str(checkpoint))
