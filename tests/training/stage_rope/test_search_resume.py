"""A longrope run that is resumed has the text and the model that it began with; and what a run says of poor factors."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from ropewalk import RopewalkError
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.reporting.run.training import write_run_report
from ropewalk.search import read_factors
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.stage_rope.search import describe_search, search_summary
from tests.training.run_cases import extend


def recipe_of(values):
    return parse_recipe(yaml.safe_dump(values), "test")


@pytest.fixture
def own(tiny_checkpoint, tiny_documents, tmp_path):
    """A recipe that searches and trains nothing, with a model and documents that may be changed."""
    model, documents = tmp_path / "model", tmp_path / "documents.jsonl"
    shutil.copytree(tiny_checkpoint, model)
    shutil.copy(tiny_documents, documents)
    search = {"budget": 9, "documents": 2}
    return {
        "model": str(model),
        "output": str(tmp_path / "run"),
        "data": {"sources": [str(documents)]},
        "stages": [{"context": 64, "steps": 0, "rope": {"method": "longrope", "search": search}}],
        "evaluation": {"suites": ["perplexity"], "rows": 2},
    }


def change_weights(folder):
    weights = load_file(Path(folder) / "model.safetensors")
    changed = {name: tensor * 1.01 for name, tensor in weights.items()}
    save_file(changed, Path(folder) / "model.safetensors", {"format": "pt"})


def test_other_documents_are_refused_where_no_stage_trains(own):
    summary = extend(recipe_of(own))
    assert extend(recipe_of(own), resume=True)["after"] == summary["after"]
    (path,) = own["data"]["sources"]
    lines = Path(path).read_text().splitlines()
    Path(path).write_text("\n".join(lines[::-1]))
    with pytest.raises(
        RopewalkError, match=r"data\.sources \(\w+ in the folder, \w+ given\).*restore the values"
    ):
        extend(recipe_of(own), resume=True)


def test_other_packed_rows_are_refused_where_no_stage_trains(own):
    packing = {**own, "output": own["output"] + "-packed"}
    train = {"steps": 1, "rows_per_step": 1, "pattern": "full", "rope": "theta"}
    packing["stages"] = [{**train, "context": 64}, {**train, "context": 128}]
    packing["data"] = {**own["data"], "validation_documents": 60}
    extend(recipe_of(packing))
    first, second = json.loads((Path(packing["output"]) / "rows.json").read_text())["rows"]
    rows = Path(own["output"] + "-rows")
    shutil.copytree(Path(packing["output"]) / first, rows)
    own["data"] = {"rows": [str(rows)]}
    extend(recipe_of(own))
    shutil.rmtree(rows)
    shutil.copytree(Path(packing["output"]) / second, rows)
    with pytest.raises(RopewalkError, match=r"data\.rows \(\w+ in the folder, \w+ given\)"):
        extend(recipe_of(own), resume=True)


def test_another_model_is_refused(own):
    summary = extend(recipe_of(own))
    output = Path(own["output"])
    assert summary["source"]["sha256"] == model_digest(own["model"])
    assert extend(recipe_of(own), resume=True)["after"] == summary["after"]
    change_weights(own["model"])
    # Cut off after the search: its table is there, and what comes after it is not.
    shutil.rmtree(output / "model")
    shutil.rmtree(output / "checkpoints")
    (output / "evaluation-after.json").unlink()
    with pytest.raises(RopewalkError, match=r"model \(\w+ in the folder, \w+ given\)"):
        extend(recipe_of(own), resume=True)


def test_a_table_of_another_model_is_found_again(own):
    extend(recipe_of(own))
    path = Path(own["output"]) / "factors-stage1.json"
    table = json.loads(path.read_text())
    assert table["model"]["digest"] == model_digest(own["model"])
    path.write_text(json.dumps({**table, "model": {**table["model"], "digest": "0" * 64}}))
    extend(recipe_of(own), resume=True)
    assert json.loads(path.read_text())["model"] == table["model"]


class Told:
    """A reporter that remembers what it was told."""

    def __init__(self):
        self.lines = []

    def note(self, text):
        self.lines.append(text)

    def bar(self, label, total):
        from ropewalk.io.progress import Silent

        return Silent().bar(label, total)


def test_note_summary_and_report_say_where_a_rule_is_better(own, monkeypatch):
    """As if NTK were better than what the search found on its own rows."""
    import ropewalk.training.stage_rope.search as factor_search

    factors_found = factor_search.factors_found

    def poor(*args, **options):
        table = factors_found(*args, **options)
        return table.model_copy(update={"baselines": {**table.baselines, "ntk": table.best.objective / 2}})

    monkeypatch.setattr(factor_search, "factors_found", poor)
    said = Told()
    summary = extend(recipe_of(own), reporter=said)
    table = read_factors(Path(own["output"]) / "factors-stage1.json")
    (caution,) = table.cautions()
    assert "NTK is better than the factors found" in caution
    assert summary["stages"][0]["search"]["cautions"] == [caution]
    sentence = caution.removesuffix(".")
    assert [line for line in said.lines if line.startswith("stage 1: factors for") and sentence in line]
    assert sentence in write_run_report(Path(own["output"]))[0].read_text()


def test_a_search_is_described_with_its_cautions(own):
    extend(recipe_of(own))
    table = read_factors(Path(own["output"]) / "factors-stage1.json")
    table = table.model_copy(update={"baselines": {}})
    better = dict.fromkeys(table.held_out.baselines, table.held_out.best / 2)
    good = table.model_copy(update={"held_out": table.held_out.model_copy(update={"baselines": {}})})
    poor = table.model_copy(update={"held_out": table.held_out.model_copy(update={"baselines": better})})
    unknown = table.model_copy(update={"held_out": None})
    described = [describe_search(search_summary(each, "f.json")) for each in (good, poor, unknown)]
    assert ["Note: " in text for text in described] == [False, True, True]
    assert "Note: on held-out rows" in described[1]
    assert "Note: no text was held out" in described[2]
    assert not any(text.endswith(".") or ".." in text for text in described)
    old = search_summary(poor, "f.json")
    del old["cautions"]
    assert "Note: " not in describe_search(old)


def test_a_run_with_more_steps_searches_its_short_factors_again(own):
    """They were found on weights that are no longer the last ones."""
    factors = {"short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 2, 2]}
    train = {"context": 64, "steps": 1, "rows_per_step": 1, "pattern": "full"}
    own["stages"] = [{**train, "rope": {"method": "longrope", **factors}}]
    own["data"] = {**own["data"], "validation_documents": 60}
    own["short_context"] = {"budget": 6, "documents": 1, "largest": 1.5}
    extend(recipe_of(own))
    output = Path(own["output"])
    first = read_factors(output / "factors-short.json")
    own["stages"][0]["steps"] = 2
    extend(recipe_of(own), resume=True)
    assert first.model.name.endswith("after stage0-step000001")
    assert read_factors(output / "factors-short.json").model.name.endswith("after stage0-step000002")
    kept = output / "earlier" / "short"
    assert read_factors(kept / "factors-short.json") == first
    assert (kept / "factors-short.jsonl").is_file()


def test_a_run_with_more_steps_goes_on_although_its_table_is_damaged(own):
    own["stages"][0] |= {"steps": 1, "rows_per_step": 1, "pattern": "full"}
    own["data"] = {**own["data"], "validation_documents": 60}
    extend(recipe_of(own))
    output = Path(own["output"])
    found = read_factors(output / "factors-stage1.json").best
    (output / "factors-stage1.json").unlink()
    own["stages"][0]["steps"] = 2
    assert extend(recipe_of(own), resume=True)["stages"][0]["steps"] == 2
    assert read_factors(output / "factors-stage1.json").best == found
    assert len((output / "metrics.jsonl").read_text().splitlines()) == 2


def test_short_factors_that_a_finished_run_gets_are_in_its_next_result(own):
    factors = {"short_factor": [1, 1, 1, 1], "long_factor": [1, 1, 2, 2]}
    own["stages"][0]["rope"] = {"method": "longrope", **factors}
    own["data"] = {**own["data"], "validation_documents": 60}
    extend(recipe_of(own))
    own["short_context"] = {"budget": 6, "documents": 1, "largest": 1.5}
    extend(recipe_of(own), resume=True)
    output = Path(own["output"])
    config = json.loads((output / "model" / "config.json").read_text())
    short = read_factors(output / "factors-short.json").best.rescale_factors
    assert tuple(config["rope_parameters"]["short_factor"]) == short
    assert (output / "earlier" / "model" / "model").is_dir()
    assert (output / "earlier" / "after" / "evaluation-after.json").is_file()
