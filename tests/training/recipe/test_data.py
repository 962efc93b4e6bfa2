"""A recipe's documents: mixed, tagged and interleaved by the run itself, or rows that were packed before."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.attention.layout import IGNORED, PackedLayout
from ropewalk.data import (
    InterleaveSettings,
    PackingSettings,
    SourceSpec,
    ValidationSettings,
    load_tokenizer,
    open_rows,
    pack_rows,
)
from ropewalk.data.settings import PackConfig
from ropewalk.errors import RopewalkError
from ropewalk.reporting.run.training import write_run_report
from ropewalk.training.documents import _in_storage_order
from ropewalk.training.recipe.recipe import Recipe
from tests.training.run_cases import extend
from tests.training.test_run import losses, recipe_of

STAGE = {"context": 64, "steps": 6, "rows_per_step": 2, "learning_rate": 1e-2, "pattern": "anchor"}


@pytest.fixture
def values(tiny_checkpoint: Path, tiny_documents: Path, tmp_path: Path) -> dict[str, Any]:
    return {
        "model": str(tiny_checkpoint),
        "output": str(tmp_path / "run"),
        "data": {"sources": [str(tiny_documents)], "validation_documents": 20},
        "stages": [STAGE],
        "evaluation": {"suites": ["perplexity"], "rows": 2},
    }


def pack(values: dict[str, Any], folder: Path, **settings: Any) -> None:
    config = PackConfig(
        sources=[SourceSpec(path=values["data"]["sources"][0])],
        tokenizer=values["model"],
        rows=PackingSettings(**{"context": 64, **settings}),
        validation=ValidationSettings(documents=20),
    )
    pack_rows(config, folder)


def test_rows_packed_before_train_like_those_of_the_run(values: dict[str, Any], tmp_path: Path) -> None:
    extend(recipe_of(values))
    pack(values, tmp_path / "rows")
    there = {**values, "output": str(tmp_path / "there"), "data": {"rows": [str(tmp_path / "rows")]}}
    summary = extend(recipe_of(there))
    assert losses(tmp_path / "there") == losses(tmp_path / "run")
    assert summary["before"][0]["score"] > 1
    assert not (tmp_path / "there" / "data").exists()


def test_each_stage_takes_the_rows_of_its_own_context_and_pattern(
    values: dict[str, Any], tmp_path: Path
) -> None:
    pack(values, tmp_path / "anchor")
    pack(values, tmp_path / "full", pattern="full", context=128)
    stages = [STAGE, {**STAGE, "context": 128, "pattern": "full"}]
    rows = [str(tmp_path / "full"), str(tmp_path / "anchor")]
    extend(recipe_of({**values, "stages": stages, "data": {"rows": rows}}))
    assert len(losses(tmp_path / "run")) == 12
    with pytest.raises(
        RopewalkError,
        match=r"stage 1 needs one folder of rows with context 64, pattern anchor .* data.rows names no such folder",
    ):
        extend(recipe_of({**values, "output": str(tmp_path / "a"), "data": {"rows": rows[:1]}}))
    twice = [rows[1], rows[1]]
    with pytest.raises(RopewalkError, match=r"data\.rows names 2 such folders; keep only one of "):
        extend(recipe_of({**values, "output": str(tmp_path / "b"), "data": {"rows": twice}}))


def test_rows_of_another_tokenizer_are_refused_and_damaged_ones_too(
    values: dict[str, Any], tmp_path: Path
) -> None:
    tokenizer = load_tokenizer(values["model"])
    tokenizer.add_tokens(["another"])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    pack({**values, "model": str(tmp_path / "tokenizer")}, tmp_path / "rows")
    recipe = recipe_of({**values, "data": {"rows": [str(tmp_path / "rows")]}})
    with pytest.raises(RopewalkError, match=r"packed with another tokenizer"):
        extend(recipe)
    pack(values, tmp_path / "own")
    path = tmp_path / "own" / "rows-00000.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RopewalkError, match=r"rows-00000\.arrow is damaged"):
        extend(recipe_of({**values, "output": str(tmp_path / "c"), "data": {"rows": [str(path.parent)]}}))


def test_rows_without_held_out_documents_say_how_to_get_some(values: dict[str, Any], tmp_path: Path) -> None:
    config = PackConfig(
        sources=values["data"]["sources"], tokenizer=values["model"], rows=PackingSettings(context=64)
    )
    pack_rows(config, tmp_path / "rows")
    with pytest.raises(RopewalkError, match=r"pack the rows with --validation-documents, or set"):
        extend(recipe_of({**values, "data": {"rows": [str(tmp_path / "rows")]}}))


def test_changed_rows_of_a_run_are_noticed_when_it_goes_on(values: dict[str, Any], tmp_path: Path) -> None:
    recipe = recipe_of(values)
    extend(recipe)
    # What is complete is not verified; a run that trains on reads its rows.
    for name in ("model", "checkpoints"):
        shutil.rmtree(tmp_path / "run" / name)
    (path,) = (tmp_path / "run" / "data").glob("*/rows-00000.arrow")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RopewalkError, match=r"rows-00000\.arrow is damaged"):
        extend(recipe, resume=True)


def test_a_resumed_run_must_see_the_same_rows(values: dict[str, Any], tmp_path: Path) -> None:
    pack(values, tmp_path / "rows")
    recipe = recipe_of({**values, "data": {"rows": [str(tmp_path / "rows")]}})
    extend(recipe)
    assert extend(recipe, resume=True)["stages"][0]["rows"] == len(open_rows(tmp_path / "rows"))
    (tmp_path / "rows").rename(tmp_path / "other")
    pack(values, tmp_path / "rows", eos=False)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(RopewalkError, match=r"data\.rows \(\w+ in the folder, \w+ given\)"):
        extend(recipe, resume=True)


def test_a_recipe_mixes_tags_and_interleaves(values: dict[str, Any], tmp_path: Path) -> None:
    values["data"] |= {
        "mixture": {"long_from": 40, "long_factor": 2, "seed": 1},
        "interleave": {"min_length": 4, "max_length": 64},
        "tag": "1 2",
        "packing": "best_fit",
        "remainder": "pad",
    }
    summary = extend(recipe_of(values))
    assert summary["stages"][0]["mixture"]["total"]["long_asked"] > 0
    write_run_report(tmp_path / "run")
    assert "Documents of stage 1" in (tmp_path / "run" / "report.html").read_text()
    rows = open_rows(tmp_path / "run" / "data")
    assert (
        rows.manifest["mixture"]["total"]["long_achieved"] > rows.manifest["mixture"]["total"]["long_before"]
    )
    assert rows.manifest["counts"]["packing"]["tag_tokens"] > 0
    assert rows.settings.packing == "best_fit"
    assert any(rows[index].layout.is_interleaved for index in range(len(rows)))
    assert any(rows.packed(index).sources[-1] == "" for index in range(len(rows)))


def test_a_base_is_probed_on_interleaved_rows_without_targets_of_another_chunk(
    values: dict[str, Any], tmp_path: Path
) -> None:
    pack(values, tmp_path / "rows", interleave=InterleaveSettings(min_length=4, max_length=64))
    rows = open_rows(tmp_path / "rows")
    layout = PackedLayout.from_lengths([64], "full", 0)
    changed = 0
    for index in range(len(rows)):
        row = _in_storage_order(rows[index], layout)
        there = row.labels != IGNORED
        assert torch.equal(row.labels[:-1][there[:-1]], row.input_ids[1:][there[:-1]])
        assert torch.equal(row.labels[there], rows[index].labels[there])
        changed += int((rows[index].labels != row.labels).sum())
    assert changed > 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, r"set either 'sources'"),
        ({"sources": ["a"], "rows": ["b"]}, r"set either 'sources'"),
        (
            {"rows": ["a"], "validation_documents": 3},
            r"'validation_documents' has no effect on rows that are packed already",
        ),
        ({"rows": ["a"], "tag": "x"}, r"'tag' has no effect on rows"),
        ({"rows": ["a"], "mixture": {"shuffle": True}}, r"'mixture' has no effect on rows"),
        ({"sources": ["a"], "mixture": {"long_factor": 2}}, r"long_from"),
        ({"sources": ["a"], "mixture": {"factor": 2}}, r"unknown key data\.mixture\.factor"),
        (
            {"sources": ["a"], "interleave": {"parts": [1]}},
            r"data\.interleave\.parts\.0 must be 2 or more, got 1$",
        ),
        ({"sources": ["a"], "tag": "{title}"}, r"may contain only the placeholder \{source\}"),
    ],
)
def test_contradictions_are_refused_where_the_recipe_is_read(
    values: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    with pytest.raises(RopewalkError, match=message):
        recipe_of({**values, "data": data})


def test_interleaving_takes_defaults(values: dict[str, Any]) -> None:
    def interleaved(value: Any) -> Any:
        recipe: Recipe = recipe_of({**values, "data": {"sources": ["a"], "interleave": value}})
        return recipe.data.interleave

    assert interleaved(True).parts == (2, 3)
    assert interleaved(False) is None


def test_tokens_that_are_chosen_are_in_the_rows_of_the_stages_that_have_them(values: dict[str, Any]) -> None:
    chosen = {**values["data"], "anchor_token": "</s>", "eos_token": "<s>"}
    stages = [{**STAGE, "steps": 1}, {**STAGE, "steps": 1, "pattern": "full"}]
    extend(recipe_of({**values, "data": chosen, "stages": stages, "evaluation": {"suites": []}}))
    tokenizer = load_tokenizer(values["model"])
    anchored, full = sorted(
        (open_rows(each.parent) for each in (Path(values["output"]) / "data").glob("*/manifest.json")),
        key=lambda rows: rows.settings.pattern,
    )
    assert {int(row.input_ids[0]) for row in anchored} == {tokenizer.eos_token_id}
    assert all(tokenizer.eos_token_id not in row.input_ids[1:] for row in anchored)
    # The other pattern has no anchor: each document begins and ends with what was chosen for its end.
    assert all(tokenizer.eos_token_id not in row.input_ids for row in full)
    assert full.settings.eos_token == "<s>"


def test_an_anchor_without_its_pattern_is_refused(values: dict[str, Any]) -> None:
    stages = [{**STAGE, "pattern": "full"}]
    with pytest.raises(
        RopewalkError, match=r"data\.anchor_token is </s>, but no stage has the pattern anchor"
    ):
        recipe_of({**values, "data": {**values["data"], "anchor_token": "</s>"}, "stages": stages})


def test_the_disk_that_checkpoints_take_is_that_of_their_files(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr("ropewalk.training.run.room_for", lambda *arguments: asked.append(arguments))
    stages = [{**STAGE, "steps": 1}]
    checkpoints = {"every": 1, "keep": 3}
    extend(recipe_of({**values, "stages": stages, "checkpoints": checkpoints, "evaluation": {"suites": []}}))
    ((folder, needed, what),) = asked
    assert (str(folder), what.split(" of ")[0]) == (values["output"], "4 checkpoints")
    (written,) = (folder / "checkpoints").iterdir()
    tensors = sum(path.stat().st_size for path in written.glob("*.safetensors"))
    # Beside the numbers, the two files have headers of a few thousand bytes.
    assert 0 <= tensors - needed / 4 < 2**16
