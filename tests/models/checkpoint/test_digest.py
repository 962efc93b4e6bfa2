"""A checkpoint is known by its weights and its config, and by nothing else."""

import hashlib
import json
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest
from ropewalk.models.checkpoint.digest import model_digest

FILES = {"config.json": b"{}", "model.safetensors": b"weights"}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return filled(tmp_path / "checkpoint")


def filled(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"rope_theta": 10000.0}')
    (folder / "model-00001-of-00002.safetensors").write_bytes(bytes(range(200)))
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"\x00" * 100)
    (folder / "generation_config.json").write_text('{"eos_token_id": 2}')
    (folder / "README.md").write_text("about")
    index(folder, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    return folder


def index(folder: Path, *files: str) -> None:
    """Write the index of weights, each in a file of its own."""
    placed = {f"weight.{number}": name for number, name in enumerate(files)}
    text = json.dumps({"metadata": {}, "weight_map": placed})
    (folder / "model.safetensors.index.json").write_text(text)


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
    # With another last byte, and without it.
    for name in ("generation_config.json", *(f"model-0000{n}-of-00002.safetensors" for n in (1, 2))):
        file = checkpoint / name
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        seen.add(model_digest(str(checkpoint)))
        file.write_bytes(content[:-1])
        seen.add(model_digest(str(checkpoint)))
        file.write_bytes(content)
    (checkpoint / "config.json").write_text('{"rope_theta": 20000.0}')
    seen.add(model_digest(str(checkpoint)))
    assert len(seen) == 8


def test_shards_that_change_names_or_go_make_another_model(checkpoint: Path) -> None:
    before = model_digest(str(checkpoint))
    first, second = sorted(checkpoint.glob("*.safetensors"))
    swapped = first.read_bytes(), second.read_bytes()
    first.write_bytes(swapped[1])
    second.write_bytes(swapped[0])
    moved = model_digest(str(checkpoint))
    second.unlink()
    index(checkpoint, first.name)
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


def test_weights_that_the_index_places_in_a_folder_below_are_the_model_s(checkpoint: Path) -> None:
    before = model_digest(str(checkpoint))
    (checkpoint / "parts").mkdir()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        (checkpoint / name).rename(checkpoint / "parts" / name)
    places = [f"parts/model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index(checkpoint, *places)
    below = model_digest(str(checkpoint))
    (checkpoint / places[1]).write_bytes(b"\x01" * 100)
    assert None not in (before, below)
    assert len({before, below, model_digest(str(checkpoint))}) == 3


def test_an_index_that_names_other_files_makes_another_model(checkpoint: Path) -> None:
    """Both sets of weights lie in the folder before and after."""
    (checkpoint / "other.safetensors").write_bytes(b"\x02" * 100)
    before = model_digest(str(checkpoint))
    index(checkpoint, "model-00001-of-00002.safetensors", "other.safetensors")
    assert model_digest(str(checkpoint)) not in (before, None)


def test_a_single_file_has_the_digest_of_earlier_versions(checkpoint: Path) -> None:
    for file in checkpoint.iterdir():
        file.unlink()
    (checkpoint / "config.json").write_text("{}")
    (checkpoint / "model.safetensors").write_bytes(b"weights")
    files = [(name, hashlib.sha256(content).hexdigest()) for name, content in FILES.items()]
    assert model_digest(str(checkpoint)) == digest(files)


def test_weights_that_are_gone_are_named(checkpoint: Path) -> None:
    for name in ("more.safetensors", "lost.safetensors"):
        index(checkpoint, "model-00001-of-00002.safetensors", name)
        (checkpoint / "more.safetensors").mkdir(exist_ok=True)
        (checkpoint / "lost.safetensors").unlink(missing_ok=True)
        (checkpoint / "lost.safetensors").symlink_to(checkpoint / "gone")
        with pytest.raises(RopewalkError, match=rf"index.json names {name}, which is missing"):
            model_digest(str(checkpoint))
