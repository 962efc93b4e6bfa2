"""What a run began with is kept, and rows of a stage become runs of text without targets of another chunk."""

import json
from pathlib import Path

import pytest
import torch

from ropewalk.attention.layout import IGNORED, PackedLayout, Row, next_token_labels
from ropewalk.data import open_rows
from ropewalk.errors import RopewalkError
from ropewalk.training.documents import (
    ROWS,
    noted_rows,
    training_rows,
)
from tests.training.resume_cases import recipe_of, refused, with_stage
from tests.training.run_cases import extend


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": 3}', '{"rows": [null]}', "[" * 5000])
def test_a_damaged_note_of_where_rows_are_says_nothing(tmp_path, text):
    (tmp_path / ROWS).write_text(text)
    assert noted_rows(tmp_path) == {}
    assert noted_rows(tmp_path / "nowhere") == {}


def test_a_row_is_measured_as_one_run_of_text_and_a_target_of_another_chunk_is_none():
    """Interleaved, document 0 goes on after document 1: its last token there has a target that is not the next one."""
    layout = PackedLayout.from_lengths([4, 4], "anchor", 1)
    ids = torch.arange(10, 10 + layout.total_length)
    labels = next_token_labels(ids, layout)
    moved = labels.clone()
    moved[3] = ids[6]
    rows = [Row(ids, moved, layout), Row(ids, labels, layout)]
    first, second = training_rows(rows, layout.total_length, limit=5, seed=0)
    expected = labels.clone()
    # What ends a document has no target in its layout, and keeps none.
    expected[3] = IGNORED
    assert first.labels.tolist() == expected.tolist()
    assert second.labels.tolist() == labels.tolist()
    for row in (first, second):
        assert row.layout.pattern == "full"
        assert list(row.layout.document_lengths) == [layout.total_length]
        assert torch.equal(row.input_ids, ids)
        targets = row.labels != IGNORED
        assert torch.equal(row.labels[targets], torch.roll(ids, -1)[targets])
    assert len(training_rows(rows, layout.total_length, limit=1, seed=0)) == 1


def documents_in(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def own_documents(recipe_values, tmp_path):
    """A run whose second stage reads all documents of the first and others that only it has."""
    lines = Path(recipe_values["data"]["sources"][0]).read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    others = [" ".join(["fid", "fid", *reversed(text.split())]) for text in texts[:60]]
    second = documents_in(tmp_path / "second.jsonl", [*others, *texts])
    stage = {"rows_per_step": 2, "steps": 2, "learning_rate": 1e-2}
    stages = [{**stage, "context": 64}, {**stage, "context": 128, "data": {"sources": [second]}}]
    return {**recipe_values, "stages": stages}


def rows_of(values):
    """The packed rows of each stage, and the held-out documents of each as tuples of ids."""
    output = Path(values["output"])
    rows = [open_rows(output / folder) for folder in noted_rows(output).values()]
    held = [{tuple(r.validation[i].input_ids.tolist()) for i in range(len(r.validation))} for r in rows]
    return rows, held


def ids_in(rows):
    """All tokens of packed rows as one text."""
    ids = (str(i) for number in range(len(rows)) for i in rows[number].input_ids.tolist())
    return f" {' '.join(ids)} "


def test_a_stage_trains_on_its_own_documents_but_never_on_those_that_the_run_holds_out(own_documents):
    extend(recipe_of(own_documents))
    (first, second), (held, none) = rows_of(own_documents)
    assert len(held) == 20
    assert none == set()
    reading = second.manifest["counts"]["reading"]
    assert reading["documents"] == 180
    # Each of the 20 is in the second file as well.
    assert second.manifest["counts"]["split"]["training_documents"] == 160
    assert second.manifest["counts"]["split"]["withheld_duplicates"] == 20
    # A document that is not cut stands between two EOS, whose id is 1.
    whole = [f" 1 {' '.join(map(str, ids))} 1 " for ids in held]
    assert not any(each in ids_in(second) for each in whole)
    assert first.manifest["counts"]["split"]["training_documents"] == 100


def test_a_stage_with_its_own_mixture_holds_out_the_same_documents(recipe_values, tmp_path):
    stage = {"rows_per_step": 2, "steps": 1, "context": 64}
    mixture = {"long_from": 30, "long_factor": 3.0}
    values = {**recipe_values, "stages": [stage, {**stage, "data": {"mixture": mixture}}]}
    extend(recipe_of(values))
    (first, second), (held, same) = rows_of(values)
    assert held == same
    assert first.manifest["mixture"] is None
    assert second.manifest["mixture"] is not None
    alone = {**values, "output": str(tmp_path / "alone"), "stages": [stage]}
    alone["data"] = {**values["data"], "mixture": mixture}
    extend(recipe_of(alone))
    assert rows_of(alone)[0][0].manifest["digest"] == second.manifest["digest"]


def test_a_finished_run_gets_one_more_stage_with_its_own_documents(own_documents):
    values = {**own_documents, "stages": own_documents["stages"][:1]}
    before = extend(recipe_of(values))["before"]
    summary = extend(recipe_of(own_documents), resume=True)
    assert [stage["context"] for stage in summary["stages"]] == [64, 128]
    (_, second), (held, none) = rows_of(own_documents)
    assert (len(held), len(none)) == (20, 0)
    assert second.manifest["counts"]["split"]["withheld_duplicates"] == 20
    # The same documents as before, now at the longer context.
    assert [result["length"] for result in (*before, *summary["before"])] == [64, 128]


def test_documents_that_changed_since_the_run_began_are_refused_for_a_new_stage(
    own_documents, capsys, tmp_path
):
    values = {**own_documents, "stages": own_documents["stages"][:1]}
    source = documents_in(
        tmp_path / "first.jsonl", ["tar hemp yarn " * 20, *(f"{w} lay" * 9 for w in "abcdefgh")]
    )
    with open(own_documents["data"]["sources"][0]) as file:
        Path(source).write_text(Path(source).read_text() + file.read())
    values["data"] = {**values["data"], "sources": [source]}
    extend(recipe_of(values))
    Path(source).write_text(Path(source).read_text() + json.dumps({"text": "hook post"}) + "\n")
    longer = {**values, "stages": own_documents["stages"]}
    assert "the documents have changed since the run in" in refused(capsys, tmp_path, longer)


def test_a_missing_source_of_a_stage_is_refused_before_anything_is_written(own_documents, tmp_path):
    values = with_stage(own_documents, 1, data={"sources": [str(tmp_path / "missing.jsonl")]})
    with pytest.raises(RopewalkError, match=r"missing\.jsonl"):
        extend(recipe_of(values))
    assert not (Path(values["output"]) / "recipe.yaml").exists()


def test_packed_rows_of_a_stage_must_not_contain_what_the_run_holds_out(own_documents, tmp_path):
    extend(recipe_of(own_documents))
    (first, second), _ = rows_of(own_documents)
    values = {**own_documents, "output": str(tmp_path / "packed"), "data": {"rows": [str(first.folder)]}}
    values = with_stage(values, 1, data={"rows": [str(second.folder)]})
    with pytest.raises(
        RopewalkError, match=r"stages\.1\.data\.rows and data\.rows either have different documents"
    ):
        extend(recipe_of(values))
    values["data"]["validation_sources"] = own_documents["data"]["sources"]
    summary = extend(recipe_of(values))
    assert [stage["rows"] for stage in summary["stages"]] == [len(first), len(second)]
