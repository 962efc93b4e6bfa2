"""A record knows its files and itself."""

import io
import json
from pathlib import Path

import pytest
import torch

from ropewalk.io.digests import (
    FileDigest,
    HashedFile,
    damage,
    digests,
    path_digest,
    read_sealed,
    write_sealed,
)


def test_a_record_knows_its_files_and_itself(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    # SHA-256 of "abc" as FIPS 180-2 gives it.
    sha256 = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert digests([tmp_path / "a"]) == {"a": FileDigest(3, sha256)}
    write_sealed(tmp_path / "record.json", {"step": 3}, digests([tmp_path / "a"]))
    values = {"step": 3, "files": {"a": {"bytes": 3, "sha256": sha256}}}
    written = json.loads((tmp_path / "record.json").read_text())
    assert {key: value for key, value in written.items() if key != "sha256"} == values
    assert read_sealed(written, tmp_path / "record.json") == {"a": FileDigest(3, sha256)}
    with pytest.raises(ValueError, match=r"record\.json was altered"):
        read_sealed({**written, "step": 4}, tmp_path / "record.json")
    (tmp_path / "a").write_bytes(b"abd")
    assert damage(tmp_path / "a", FileDigest(3, sha256)) == "a was altered: its SHA-256 differs"


def test_a_file_is_hashed_while_it_is_written(tmp_path):
    path = tmp_path / "tensors"
    with HashedFile(path) as file:
        torch.save(torch.arange(5000), file)
        at = file.tell()
        file.write(torch.arange(3).numpy().data)
        assert file.tell() == at + 24
        with pytest.raises(io.UnsupportedOperation):
            file.seek(0)
    assert file.digest() == FileDigest.of(path)
    assert torch.load(path).tolist() == list(range(5000))


def test_digest_of_a_path_is_of_names_and_contents(tmp_path: Path) -> None:
    file, folder = tmp_path / "a.txt", tmp_path / "folder"
    file.write_text("one")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "b.txt").write_text("one")
    first = path_digest(file), path_digest(folder)
    assert first[0] != first[1]
    file.write_text("two")
    (folder / "deep" / "b.txt").rename(folder / "deep" / "c.txt")
    assert path_digest(file) != first[0]
    assert path_digest(folder) != first[1]
