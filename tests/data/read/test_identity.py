"""The identity of inputs: machines that share a folder agree, and whatever changes the records changes it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropewalk.data.read.documents import Document
from ropewalk.data.read.embedded import embedded_documents
from ropewalk.data.read.identity import inputs_identity
from ropewalk.data.read.input_splits import plan_input_splits
from ropewalk.data.settings import SourceSpec
from tests.data.read.split_cases import lines


def identities(spec: SourceSpec) -> list[str]:
    return [
        json.dumps(split.identity, sort_keys=True, allow_nan=False) for split in plan_input_splits([spec])
    ]


def test_machines_that_share_a_folder_agree(
    mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small: None
) -> None:
    monkeypatch.setattr("ropewalk.data.read.identity.HASHED_BYTES", 20)
    found = []
    for name in ("one", "two"):
        there = tmp_path / name / "mixed"
        for path in sorted(mixed.rglob("*.*")):
            copy = there / path.relative_to(mixed)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
            os.utime(copy, ns=(1, 10**18))
        monkeypatch.chdir(there.parent)
        found.append((identities(SourceSpec(path="mixed")), inputs_identity([SourceSpec(path="mixed")])))
    assert found[0] == found[1]
    splits, _ = found[0]
    assert len(set(splits)) == len(splits)
    assert not any(str(tmp_path) in each for each in splits)


def test_an_identity_is_of_all_that_the_records_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines(["one", "two"]))
    spec = SourceSpec(path=str(path))
    changes = [
        SourceSpec(path=str(path), name="x"),
        SourceSpec(path=str(path), text_field="n"),
        SourceSpec(path=str(path), source_field="n"),
        SourceSpec(path=str(path), source_field=None),
        SourceSpec(path=str(path), max_documents=1),
        SourceSpec(path=str(tmp_path)),
    ]
    seen = [identities(each)[0] for each in (spec, *changes)]
    assert len(set(seen)) == len(seen)
    assert identities(spec) == seen[:1]
    before, status = inputs_identity([spec]), path.stat()
    path.write_bytes(lines(["one", "owt"]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert identities(spec) != seen[:1]
    assert inputs_identity([spec]) != before
    monkeypatch.setattr("ropewalk.data.read.identity.HASHED_BYTES", 1)
    large = identities(spec), inputs_identity([spec])
    path.write_bytes(lines(["one", "two"]))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (identities(spec), inputs_identity([spec])) == large
    os.utime(path, ns=(1, 1))
    assert identities(spec) != large[0]
    assert inputs_identity([spec]) != large[1]


def test_the_embedded_corpus_is_known_by_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (identities(SourceSpec(path=f"embedded:{split}")) for split in ("train", "validation"))
    assert one != two
    assert one == identities(SourceSpec(path="embedded:train"))

    def changed(split: str) -> Iterator[Document]:
        for document in embedded_documents("train"):
            yield Document(document.text + " ", document.source, document.origin)

    monkeypatch.setattr("ropewalk.data.read.embedded.embedded_documents", changed)
    assert identities(SourceSpec(path="embedded:train")) != one
