"""What is seen of documents, and the machine that a recipe is for."""

from pathlib import Path

import pytest

from ropewalk.data.settings import SourceSpec
from ropewalk.dry_run.facts import DocumentFacts, named_machine, parts_of, remark_on_parts
from ropewalk.dry_run.init import propose
from ropewalk.dry_run.settings import InitSettings
from ropewalk.errors import RopewalkError
from ropewalk.training.recipe.file import parse_recipe
from tests.dry_run.cases import model_folder
from tests.dry_run.proposal_cases import LONG, PLANS, asked, records


def test_a_named_machine_has_the_defaults_of_a_plan() -> None:
    machine = named_machine(asked(PLANS["qwen3-8b"], memory_gb=40).hardware)
    assert (machine.named, machine.gpus, machine.gpu_bytes) == ("h100", 8, 40 * 10**9)
    assert asked(PLANS["qwen3-8b"]).hardware is None


@pytest.mark.parametrize(
    ("row", "field"),
    [
        ({"text": LONG, "content": "no"}, "text"),
        ({"content": LONG, "url": "x"}, "content"),
        ({"raw_content": LONG}, "raw_content"),
    ],
)
def test_the_usual_field_of_the_text_is_found(row: dict[str, str], field: str, tmp_path: Path) -> None:
    documents = (records(tmp_path / "a.jsonl", row, row), records(tmp_path / "b.jsonl", {"text": LONG}))
    out = tmp_path / "a.yaml"
    propose(InitSettings(model="embedded", documents=documents, target=1024, out=out))
    sources = parse_recipe(out.read_text(), "x").data.sources
    assert [each.text_field for each in sources] == [field, "text"]


@pytest.mark.parametrize(
    ("row", "given", "words"),
    [
        (
            {"page": LONG},
            None,
            "no text field 'text'; the fields are 'page'; set text_field .--text-field. to the field",
        ),
        (
            {"content": LONG, "body": "x"},
            None,
            "set text_field .--text-field. to the field that holds the text .probably 'content' or 'body'",
        ),
        (
            {"text": LONG},
            "page",
            "no text field 'page'; the fields are 'text'; set text_field .--text-field. to the field",
        ),
    ],
)
def test_a_field_that_is_not_clear_is_asked_for(
    row: dict[str, str], given: str | None, words: str, tmp_path: Path
) -> None:
    out, source = tmp_path / "a.yaml", records(tmp_path / "a.jsonl", row)
    with pytest.raises(RopewalkError, match=words):
        propose(InitSettings(model="embedded", documents=(source,), target=1024, out=out, text_field=given))
    assert not out.exists()


def test_tokens_are_counted_by_characters_without_a_tokenizer(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model")
    source = records(tmp_path / "a.jsonl", {"text": "abcd" * 5000})
    settings = InitSettings(
        model=str(model), documents=(source,), target=1024, out=tmp_path / "r.yaml", dry_run=False
    )
    found = propose(settings)
    assert found.documents == DocumentFacts(1, True, 5000, 5000)
    assert "about 5,000 tokens (by characters, without a tokenizer)" in found.text


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["books.jsonl", "code.jsonl.gz"], ("file", ("books", "code"))),
        (["part-0.jsonl", "part-1.jsonl"], None),
        (["books.jsonl"], None),
        (["a.txt", "b.txt"], None),
        (["books/0.jsonl", "code/0.jsonl"], ("folder", ("books", "code"))),
        (["books/0.jsonl", "code.jsonl"], None),
        ([f"{'x' * number}.jsonl" for number in range(1, 22)], None),
    ],
)
def test_named_parts_of_a_folder_could_be_sources(tmp_path: Path, names: list[str], found: object) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert parts_of(SourceSpec(path=str(tmp_path))) == found


def test_named_sources_have_no_parts() -> None:
    assert parts_of(SourceSpec(path="embedded")) is None


def test_a_recipe_says_which_files_could_be_sources(tmp_path: Path) -> None:
    folder = tmp_path / "shelves"
    folder.mkdir()
    for name in ("books", "code"):
        records(folder / f"{name}.jsonl", *({"text": LONG} for _ in range(20)))
    model = model_folder(tmp_path)
    out = tmp_path / "recipe.yaml"
    found = propose(
        InitSettings(model=str(model), documents=(str(folder),), target=1024, out=out, dry_run=False)
    )
    assert found.remarks == (remark_on_parts(SourceSpec(path=str(folder))),)
    assert f"  # {folder} has the files books, code; with source_per: file, each is" in out.read_text()
