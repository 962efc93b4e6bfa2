"""Datasets of the hub: their names, and reading as a stream."""

import gzip
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from tests.data.read.read_cases import jsonl, read, texts
from tests.data.tiny_tokenizer import TEXTS


def test_hugging_face_dataset_streams_a_local_folder(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes(jsonl(TEXTS))
    documents = read(f"hf:{folder}")
    assert texts(documents) == TEXTS
    assert {document.source for document in documents} == {"corpus"}
    with pytest.raises(RopewalkError, match="no text field 'body'; the fields are 'id', 'text'"):
        read(f"hf:{folder}@train", text_field="body")
    with pytest.raises(RopewalkError, match=r"cannot load hf:.*@dev"):
        read(f"hf:{folder}@dev")
    # datasets ends with a StopIteration without words.
    (folder / "train.jsonl").rename(tmp_path / "away")
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(b""))
    with pytest.raises(RopewalkError, match="a compressed file ends before its first record"):
        read(f"hf:{folder}")


def test_hugging_face_name_carries_configuration_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls = []

    def load_dataset(*arguments: object, **options: object) -> list[dict[str, str]]:
        calls.append((arguments, options))
        return [{"text": "one"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (document,) = read("hf:owner/name:20231101.en@validation")
    assert document.source == "name"
    ((arguments, options),) = calls
    assert arguments == ("owner/name", "20231101.en")
    assert options["split"] == "validation"
    assert options["streaming"] is True
    assert not options.get("trust_remote_code")


@pytest.mark.parametrize("path", ["hf:", "hf:owner/name@", "hf:owner/name:"])
def test_incomplete_dataset_names_are_refused(path: str) -> None:
    with pytest.raises(RopewalkError, match="is not a dataset name"):
        read(path)
