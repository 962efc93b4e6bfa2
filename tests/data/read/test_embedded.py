"""The embedded corpus: real documents of two sources, split by name, with no path of this machine in them."""

import sysconfig
from pathlib import Path

import pytest

from ropewalk.data.read import embedded
from ropewalk.data.read.embedded import demo_model_path, embedded_documents, embedded_split
from ropewalk.errors import RopewalkError


@pytest.fixture(scope="module")
def documents():
    return list(embedded_documents("all"))


def test_splits_are_disjoint_and_together_are_everything(documents):
    train = [document.origin for document in embedded_documents("train")]
    validation = [document.origin for document in embedded_documents("validation")]
    everything = [document.origin for document in documents]
    assert len(set(everything)) == len(everything)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(everything)


def test_default_split_is_train():
    assert list(embedded_documents()) == list(embedded_documents("train"))


def test_validation_is_about_five_percent_of_the_names():
    names = [f"stdlib/module_{index}.py" for index in range(20_000)]
    share = sum(embedded_split(name) == "validation" for name in names) / len(names)
    assert share == pytest.approx(0.05, abs=0.008)  # five standard errors


@pytest.mark.parametrize(
    ("origin", "split"),
    [
        ("stdlib/json/decoder.py", "validation"),
        ("stdlib/shutil.py", "validation"),
        ("stdlib/json/encoder.py", "train"),
        ("pydoc_data/topics/class", "validation"),
        ("pydoc_data/topics/lambda", "train"),
    ],
)
def test_side_of_a_name_never_changes(origin, split):
    assert embedded_split(origin) == split


def test_both_sources_have_documents_in_both_splits():
    for split in ("train", "validation"):
        sources = {document.source for document in embedded_documents(split)}
        assert sources == {"python-source", "python-docs"}


def test_source_documents_are_the_files_themselves(documents):
    text = {document.origin: document.text for document in documents}
    root = Path(sysconfig.get_paths()["stdlib"])
    assert text["stdlib/json/decoder.py"] == (root / "json" / "decoder.py").read_text(encoding="utf-8")


def test_origins_are_relative_and_in_order(documents):
    root = sysconfig.get_paths()["stdlib"]
    for source, prefix in (("python-source", "stdlib/"), ("python-docs", "pydoc_data/topics/")):
        origins = [document.origin for document in documents if document.source == source]
        assert origins == sorted(origins)
        assert all(origin.startswith(prefix) and root not in origin for origin in origins)


def test_tests_tables_and_build_output_are_left_out(documents):
    skipped = {"test", "tests", "idle_test", "encodings", "lib2to3", "site-packages", "__pycache__"}
    for document in documents:
        folders = set(document.origin.split("/")[1:-1])
        assert not folders & skipped, document.origin
        assert "_sysconfigdata" not in document.origin


def test_corpus_is_large_enough_to_train_on_and_has_long_documents(documents):
    lengths = [len(document.text) for document in documents]
    assert min(lengths) > 0
    assert sum(lengths) > 5_000_000
    assert max(lengths) > 100_000


def test_files_that_are_empty_or_not_utf8_are_left_out(tmp_path, monkeypatch):
    (tmp_path / "good.py").write_text("x = 1\n")
    (tmp_path / "blank.py").write_text("\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "notes.txt").write_text("no source")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "inner.py").write_text("y = 2\n")
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    origins = [d.origin for d in embedded_documents("all") if d.source == "python-source"]
    assert origins == ["stdlib/good.py"]


def test_python_without_sources_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(RopewalkError, match="source files of Python's standard library"):
        next(embedded_documents("all"))


def test_unknown_split_is_refused_at_the_call():
    with pytest.raises(RopewalkError, match="'test'"):
        embedded_documents("test")  # type: ignore[arg-type]


def test_demo_model_path_is_a_checkpoint_folder():
    assert (demo_model_path() / "config.json").is_file()


def test_missing_demo_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "embedded.py"))
    with pytest.raises(RopewalkError, match="train_demo_model"):
        demo_model_path()
