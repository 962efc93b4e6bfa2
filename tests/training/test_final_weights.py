"""The weights that a run exports: those of the last step, of the best score, or the mean of checkpoints."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from ropewalk import RopewalkError
from ropewalk.evaluation import TaskResult
from ropewalk.reporting.run.training import write_run_report
from ropewalk.training.checkpoint.files import Position, checkpoint_name, read_exported_weights
from ropewalk.training.final_weights import best_checkpoint, describe_weights, final_weights
from ropewalk.training.measurement import _write_results, during
from tests.marks import slow_after
from tests.training.resume_cases import Notes, recipe_of, refused, weights_of
from tests.training.run_cases import extend, extended


@pytest.fixture
def values(recipe_values):
    """Six steps, a checkpoint every two, of which two are kept."""
    return {**recipe_values, "evaluation": {"suites": ["perplexity"], "rows": 2}}


def tensors_of(folder):
    return {name: tensor.numpy() for name, tensor in load_file(Path(folder) / "model.safetensors").items()}


def checkpoint(values, name):
    return Path(values["output"]) / "checkpoints" / name


def test_the_average_of_a_run_is_numpys_mean_of_its_checkpoints(values):
    summary = extend(recipe_of(values, export={"weights": "average", "average_of": 2}))
    names = ["stage0-step000004", "stage0-step000006"]
    parts = [tensors_of(checkpoint(values, name)) for name in names]
    found = tensors_of(Path(values["output"]) / "model")
    for name, tensor in found.items():
        mean = np.mean([each[name].astype(np.float64) for each in parts], axis=0).astype(np.float32)
        assert np.array_equal(tensor, mean), name
    assert summary["exported"]["checkpoints"] == names
    assert read_exported_weights(Path(values["output"]) / "model") == summary["exported"]
    assert describe_weights(summary["exported"]) == "mean of 2 checkpoints: steps 4, 6 of stage 1"
    write_run_report(Path(values["output"]))
    assert (
        "mean of 2 checkpoints: steps 4, 6 of stage 1" in (Path(values["output"]) / "report.html").read_text()
    )


def test_a_finished_run_exports_other_weights_when_it_is_asked_to(values, tmp_path):
    first = extend(recipe_of(values))
    assert "exported" not in first
    last = weights_of(values["output"])
    average = {"weights": "average", "average_of": 2}
    notes = Notes()
    again = extend(recipe_of(values, export=average), resume=True, reporter=notes)
    assert weights_of(values["output"]) != last
    assert again["after"][0]["score"] != first["after"][0]["score"]
    assert any(
        "export changes from last to average; it will be exported again" in line for line in notes.told
    )
    # Asked for the same again, nothing happens.
    shutil.rmtree(Path(values["output"]) / "checkpoints")
    assert extend(recipe_of(values, export=average), resume=True)["after"] == again["after"]
    with pytest.raises(
        RopewalkError,
        match=r"sets export to 'last', but .* exported with 'average', .* no checkpoint .*; set export to 'average'",
    ):
        extend(recipe_of(values), resume=True)


@pytest.mark.slow
def test_two_processes_export_the_average(values, two_ranks, tmp_path):
    average = {"weights": "average", "average_of": 2}
    extend(recipe_of(values, export=average))
    together = {**values, "output": str(tmp_path / "two"), "parallel": {"shard": 2}, "export": average}
    two_ranks.run(extended, together)
    one, two = (tensors_of(Path(each["output"]) / "model") for each in (values, together))
    for name, tensor in one.items():
        np.testing.assert_allclose(two[name], tensor, atol=2e-4)
    summary = json.loads((Path(together["output"]) / "summary.json").read_text())
    assert summary["exported"]["checkpoints"] == ["stage0-step000004", "stage0-step000006"]


@pytest.mark.parametrize("parallel", slow_after(1, ["auto", {"shard": 2}]), ids=str)
def test_the_best_is_exported_and_never_deleted(values, two_ranks, parallel):
    # A rate that grows far beyond what any model bears: on every CPU the loss rises by orders of magnitude.
    stage = {**values["stages"][0], "steps": 8, "learning_rate": 10.0, "warmup_steps": 8}
    changed = {
        **values,
        "stages": [stage],
        "checkpoints": {"every": 8, "keep": 1},
        "evaluation": {**values["evaluation"], "every": 1},
        "export": "best",
        "parallel": parallel,
    }
    if parallel == "auto":
        extend(recipe_of(changed))
    else:
        two_ranks.run(extended, changed)
    summary = json.loads((Path(values["output"]) / "summary.json").read_text())
    scores = {each["step"]: each["scores"][0]["score"] for each in summary["during"]}
    best = min(scores, key=scores.__getitem__)
    assert best < 8, "the case does not tell the best from the last"
    name = checkpoint_name(Position(0, best, 0))
    assert summary["exported"] == {
        "weights": "best",
        "average_of": 5,
        "by": None,
        "checkpoints": [name],
        "score": scores[best],
    }
    kept = sorted(path.name for path in checkpoint(values, name).parent.iterdir())
    assert kept == [name, "stage0-step000008"]
    assert summary["after"][0]["score"] == pytest.approx(scores[best], rel=1e-5)
    if parallel == "auto":
        found, there = tensors_of(Path(values["output"]) / "model"), tensors_of(checkpoint(values, name))
        assert all(np.array_equal(found[each], there[each]) for each in found)


def measured(output, *steps):
    """Evaluations of stage 1 with these scores of passkey at 64 and 128 tokens, a step each."""
    for step, scores in enumerate(steps, start=1):
        results = [
            TaskResult("passkey", "passkey", length, 4, score, (0.0, 100.0))
            for length, score in zip((64, 128), scores, strict=True)
        ]
        _write_results(output, during(Position(0, step, 0)), results)


@pytest.mark.parametrize(
    ("by", "best"),
    [("passkey", 3), ("passkey/64", 3), ("passkey/128", 2)],
)
def test_ties_go_to_the_latest_and_a_missing_score_is_never_the_best(values, tmp_path, by, best):
    recipe = recipe_of(
        values,
        export={"weights": "best", "by": by},
        evaluation={"suites": ["passkey"], "every": 1},
    )
    measured(tmp_path, (50.0, 50.0), (25.0, 75.0), (75.0, 25.0), (float("nan"), float("nan")))
    found = best_checkpoint(tmp_path, recipe, Position(0, 6, 0))
    assert found is not None
    assert found.name == checkpoint_name(Position(0, best, 0))
    # Those after the position of a resumed run do not count.
    assert best_checkpoint(tmp_path, recipe, Position(0, 1, 0)).name == "stage0-step000001"
    assert best_checkpoint(tmp_path, recipe, None) is None


def test_of_equal_perplexities_the_latest_is_the_best(values, tmp_path):
    recipe = recipe_of(values, export="best", evaluation={"suites": ["perplexity"], "every": 1})
    for step, score in enumerate((9.0, 7.0, 7.0, 8.0), start=1):
        found = TaskResult("perplexity", "perplexity", 128, 2, score, (5.0, 10.0), unit="perplexity")
        _write_results(tmp_path, during(Position(0, step, 0)), [found])
    assert best_checkpoint(tmp_path, recipe, Position(0, 4, 0)).name == "stage0-step000003"


def test_a_deleted_or_damaged_checkpoint_is_refused_by_name(values, tmp_path, capsys):
    best = {**values, "evaluation": {**values["evaluation"], "every": 2}, "export": "best"}
    extend(recipe_of(best))
    (name,) = json.loads((Path(values["output"]) / "summary.json").read_text())["exported"]["checkpoints"]
    # The last checkpoint is verified by resume itself.
    assert name == "stage0-step000006"
    shutil.rmtree(checkpoint(values, "stage0-step000004"))
    average = {**best, "export": {"weights": "average", "average_of": 2}}
    said = refused(capsys, tmp_path, average)
    assert "export averages the last 2 checkpoints of stage 1, but" in said
    assert said.endswith("set export to 'last'")
    with pytest.raises(RopewalkError, match="contains only 1 checkpoint of this stage"):
        final_weights(Path(values["output"]), recipe_of(average), checkpoint(values, name))


def test_a_damaged_part_of_an_average_is_refused_by_name(values, tmp_path, capsys):
    extend(recipe_of(values))
    path = checkpoint(values, "stage0-step000004") / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    said = refused(capsys, tmp_path, {**values, "export": {"weights": "average", "average_of": 2}})
    assert (
        "checkpoint stage0-step000004, which export needs, is damaged (model.safetensors was altered" in said
    )


def test_a_score_that_is_not_measured_is_refused_before_anything_is_written(values, tmp_path):
    changed = {
        **values,
        "evaluation": {**values["evaluation"], "every": 2},
        "export": {"weights": "best", "by": "perplexity/64"},
    }
    with pytest.raises(
        RopewalkError, match=r"export\.by is perplexity/64, but .* last stage measures perplexity/128; set"
    ):
        extend(recipe_of(changed))
    assert not (Path(values["output"]) / "recipe.yaml").exists()
