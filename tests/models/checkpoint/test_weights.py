"""Which files hold a checkpoint's weights, and which are refused before anything is read from them."""

import json
import shutil

import huggingface_hub.constants
import pytest
from safetensors.torch import load_file, save_file

from ropewalk import RopewalkError, load_model
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.models.checkpoint.weights import weight_files, weight_tensors
from tests.models.families import tiny_model

INDEX = "model.safetensors.index.json"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


@pytest.fixture
def folder(tmp_path):
    """A checkpoint in two parts."""
    place = tmp_path / "checkpoint"
    tiny_model("llama").save_pretrained(place, max_shard_size="30kB")
    return place


def named(folder):
    return [path.relative_to(folder).as_posix() for path in weight_files(folder)]


def change_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {key: change(name) for key, name in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


def test_an_index_and_its_files_are_found_wherever_they_lie(folder):
    files = named(folder)
    assert files[0] == INDEX
    assert len(files) > 2
    # What the index does not name is not loaded either.
    (folder / "more.safetensors").write_bytes(b"")
    assert named(folder) == files
    (folder / "parts").mkdir()
    for name in files[1:]:
        (folder / name).rename(folder / "parts" / name)
    change_index(folder, lambda name: f"parts/{name}")
    assert named(folder) == [INDEX, *(f"parts/{name}" for name in files[1:])]
    assert len(list(weight_tensors(folder))) == len(load_model(folder).state_dict())


def test_a_single_file_comes_before_an_index_as_in_transformers(folder):
    tensors = {}
    for path in weight_files(folder)[1:]:
        tensors |= load_file(path)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    assert named(folder) == ["model.safetensors"]
    # And a file that the config names before both.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    (folder / "model.safetensors").rename(folder / "other.safetensors")
    assert named(folder) == ["other.safetensors"]
    load_model(folder)


@pytest.mark.parametrize(
    "outside",
    [
        "../elsewhere/{}",
        "/tmp/{}",
        "a/../../{}",
        "..\\elsewhere\\{}",
        "C:\\{}",
        "C:{}",
        "",
        "{}.bin",
        "a\0{}",
    ],
)
def test_files_outside_the_folder_are_refused(folder, outside):
    shutil.copytree(folder, folder.parent / "elsewhere")
    change_index(folder, lambda name: outside.format(name))
    for read in (load_model, lambda path: model_digest(str(path))):
        with pytest.raises(RopewalkError, match=r"may name only \.safetensors files in its own folder"):
            read(folder)


@pytest.mark.parametrize(
    "content", ["[]", "3", "null", "{}", '{"weight_map": []}', '{"metadata": {}, "weight_map": {}}']
)
def test_an_index_that_is_none_is_refused(folder, content):
    (folder / INDEX).write_text(content)
    with pytest.raises(RopewalkError, match=rf"{INDEX} is not an index of weights"):
        load_model(folder)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff"])
def test_an_index_that_cannot_be_read_is_refused(folder, content):
    (folder / INDEX).write_bytes(content)
    with pytest.raises(RopewalkError, match=rf"{INDEX} is not valid JSON"):
        load_model(folder)


def test_an_index_with_values_that_are_no_names_is_refused(folder):
    for value in (3, None, ["a"], {}):
        change_index(folder, lambda name, value=value: value)
        with pytest.raises(RopewalkError, match="names the file of weights"):
            load_model(folder)


def test_parts_that_are_missing_or_have_no_index_are_named(folder):
    part = weight_files(folder)[2]
    content = part.read_bytes()
    part.unlink()
    with pytest.raises(RopewalkError, match=rf"names {part.name}, which is missing"):
        load_model(folder)
    part.write_bytes(content)
    (folder / INDEX).unlink()
    with pytest.raises(RopewalkError, match=rf"model-00001-of-.* but no {INDEX}"):
        load_model(folder)


@pytest.mark.parametrize("place", [1, 0])
def test_a_pointer_of_git_lfs_is_refused(folder, place):
    path = weight_files(folder)[place]
    path.write_text(POINTER)
    with pytest.raises(RopewalkError, match=rf"{path.name} is a Git LFS pointer .*`git lfs pull`"):
        load_model(folder)


def test_a_hub_model_that_is_not_complete_in_the_cache_has_no_files_yet(folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder.parent / "hub"))
    cached = folder.parent / "hub" / "models--some--model"
    shutil.copytree(folder, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    found = weight_files("some/model")
    assert [path.name for path in found] == named(folder)
    found[-1].unlink()
    assert weight_files("some/model") == ()
    assert weight_files("some/other") == ()


def test_a_distributed_checkpoint_of_transformers_is_refused(folder):
    """transformers reads it in place of the index that lies beside it."""
    (folder / "shard-00001-model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(RopewalkError, match=r"shard-00001-model.*distributed_checkpoint=False"):
        load_model(folder)
