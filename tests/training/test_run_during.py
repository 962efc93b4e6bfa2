"""A run that evaluates its model while it trains: the training does not notice, and the results outlive a kill."""

import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from ropewalk import RopewalkError
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import AS_IT_IS, load_model
from ropewalk.reporting.run.training import write_run_report
from ropewalk.training.measurement import _undisturbed
from tests.programs import run_program
from tests.training.resume_cases import Notes, recipe_of, refused, weights_of, with_stage
from tests.training.run_cases import cut_off_after, extend, extended


def steps_of(output) -> list[tuple]:
    """What a run's log says of its steps, without durations."""
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [(each["stage"], each["step"], each["loss"], each["grad_norm"]) for each in lines]


def measured_in(output) -> dict[str, bytes]:
    """The files of the evaluations during training."""
    return {path.name: path.read_bytes() for path in (Path(output) / "evaluation-during").iterdir()}


@pytest.fixture
def two_stages(recipe_values):
    stage = {"rows_per_step": 2, "learning_rate": 1e-2}
    return {
        **recipe_values,
        "stages": [{**stage, "context": 64, "steps": 3}, {**stage, "context": 128, "steps": 4}],
        "evaluation": {"suites": ["perplexity"], "rows": 2},
    }


def beside(values, tmp_path, name, **evaluation):
    """The recipe in another folder, with other keys of its evaluation."""
    return {**values, "output": str(tmp_path / name), "evaluation": {**values["evaluation"], **evaluation}}


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "bfloat16-autocast"])
def test_training_is_the_same_to_the_last_bit(two_stages, tmp_path, precision):
    values = with_stage({**two_stages, "precision": precision}, 1, gradient_checkpointing=True)
    plain = beside(values, tmp_path, "plain")
    often = beside(values, tmp_path, "often", every=2, during={"rows": 1})
    extend(recipe_of(plain))
    summary = extend(recipe_of(often))
    assert steps_of(plain["output"]) == steps_of(often["output"])
    assert weights_of(plain["output"]) == weights_of(often["output"])
    assert [(each["stage"], each["step"]) for each in summary["during"]] == [(0, 2), (0, 3), (1, 2), (1, 4)]
    lengths = [[(s["suite"], s["length"]) for s in each["scores"]] for each in summary["during"]]
    assert lengths == [[("perplexity", 64)]] * 2 + [[("perplexity", 128)]] * 2
    assert all(score["n"] == 1 for each in summary["during"] for score in each["scores"])
    figures = [path.name for path in summary_files(often["output"])]
    assert figures == ["during-perplexity.png"]


def summary_files(output) -> list[Path]:
    write_run_report(Path(output))
    return sorted(Path(output).glob("during-*.png"))


@pytest.mark.slow
def test_the_training_of_two_processes_is_the_same_to_the_last_bit(two_stages, tmp_path, two_ranks):
    """Each with a part of every row; with rows of their own, they are those of the adapter below."""
    values = {**two_stages, "parallel": {"sequence": 2}}
    plain = beside(values, tmp_path, "plain")
    often = beside(values, tmp_path, "often", every=2)
    two_ranks.run(extended, plain)
    two_ranks.run(extended, often)
    assert steps_of(plain["output"]) == steps_of(often["output"])
    assert weights_of(plain["output"]) == weights_of(often["output"])
    alone = beside({**values, "parallel": "auto"}, tmp_path, "alone", every=2)
    expected = extend(recipe_of(alone))["during"]
    found = json.loads((Path(often["output"]) / "summary.json").read_text())["during"]
    for two, one in zip(found, expected, strict=True):
        assert (two["stage"], two["step"]) == (one["stage"], one["step"])
        assert two["scores"][0]["score"] == pytest.approx(one["scores"][0]["score"], rel=1e-4)


@pytest.mark.slow
def test_the_training_of_an_adapter_is_the_same_to_the_last_bit(recipe_values, tmp_path, two_ranks):
    """On two processes; one process is tested with the checkpoints of adapters."""
    values = {**recipe_values, "adapter": {"rank": 2}, "parallel": {"shard": 2}}
    plain = beside(values, tmp_path, "plain")
    often = beside({**values, "export": "best"}, tmp_path, "often", every=1)
    for each in (plain, often):
        two_ranks.run(extended, each)
    assert steps_of(plain["output"]) == steps_of(often["output"])
    (best,) = json.loads((Path(often["output"]) / "summary.json").read_text())["exported"]["checkpoints"]
    last = best == "stage0-step000006"
    assert (weights_of(plain["output"]) == weights_of(often["output"])) == last


def test_random_numbers_and_modes_are_those_from_before(tiny_checkpoint):
    model = load_model(str(tiny_checkpoint), AS_IT_IS, torch.float32, torch.device("cpu"))
    whole = LossModel(model, OutputHead.of(model)).train()
    frozen = whole.model.model.layers[0].eval()
    state, numbers = torch.get_rng_state(), random.getstate()
    expected = np.random.get_state()[1].tolist()
    with _undisturbed(whole):
        assert not any(module.training for module in whole.modules())
        torch.rand(3), random.random(), np.random.rand(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == numbers
    assert np.random.get_state()[1].tolist() == expected
    assert [each.training for each in (whole, frozen, whole.model.model.layers[1])] == [True, False, True]


@pytest.mark.slow
def test_a_resumed_run_measures_again_what_its_checkpoint_does_not_have(two_stages, tmp_path):
    values = beside(two_stages, tmp_path, "whole", every=1)
    extend(recipe_of(values))
    cut = beside(two_stages, tmp_path, "cut", every=1)
    with cut_off_after(6):
        extend(recipe_of(cut))
    before = measured_in(cut["output"])
    assert "stage1-step000003.json" in before
    # A result that depends on what comes after the checkpoint is not trusted, even when it looks as it should.
    notes = Notes()
    extend(recipe_of(cut), resume=True, reporter=notes)
    assert measured_in(cut["output"]) == measured_in(values["output"])
    aside = Path(cut["output"]) / "earlier" / "stage1-step000002" / "evaluation-during"
    assert sorted(path.name for path in aside.iterdir()) == [
        "stage1-step000003.digest.json",
        "stage1-step000003.json",
    ]
    assert weights_of(cut["output"]) == weights_of(values["output"])
    assert any("the earlier results were moved" in line for line in notes.told)
    assert any(line.startswith("evaluation during training: 7 times, every step and") for line in notes.told)


@pytest.mark.slow
def test_measurements_begin_and_end_at_any_step_and_stay_comparable(two_stages, tmp_path):
    plain = beside(two_stages, tmp_path, "run")
    with cut_off_after(5):
        extend(recipe_of(plain))
    often = beside(two_stages, tmp_path, "run", every=1)
    with cut_off_after(1):
        extend(recipe_of(often), resume=True)
    assert measured_in(plain["output"])
    extend(recipe_of(plain), resume=True)
    whole = beside(two_stages, tmp_path, "whole", every=1)
    with cut_off_after(5):
        extend(recipe_of(whole))
    with pytest.raises(RopewalkError, match=r"evaluation\.rows \(2 in the folder, 1 given\)"):
        extend(recipe_of(beside(whole, tmp_path, "whole", during={"rows": 1})), resume=True)
    extend(recipe_of(beside(two_stages, tmp_path, "whole")), resume=True)
    assert steps_of(whole["output"]) == steps_of(plain["output"])


def test_a_damaged_measurement_is_refused_by_name(two_stages, tmp_path, capsys):
    values = beside(two_stages, tmp_path, "run", every=5)
    extend(recipe_of(values))
    path = Path(values["output"]) / "evaluation-during" / "stage0-step000003.json"
    path.write_text(path.read_text().replace("perplexity", "perplexitx", 1))
    said = refused(capsys, tmp_path, values)
    assert f"{path} is damaged (stage0-step000003.json was altered" in said
    assert said.endswith("delete it, and --resume will go on without it")
    path.unlink()
    assert [each["step"] for each in extend(recipe_of(values), resume=True)["during"]] == [4]


KILLED = """
import os, signal, sys
output, left = sys.argv[1], [int(sys.argv[2])]
def count(event, arguments):
    # The run dies in the middle of whatever it does to its folder, at a random such event.
    if event in EVENTS and str(arguments[0]).startswith(output):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
EVENTS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}
sys.addaudithook(count)
sys.argv[1:] = sys.argv[3:]
from ropewalk.cli.app import main
status = main(sys.argv[1:])
print("events", -left[0], file=sys.stderr)
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_at_random_points_ends_with_the_same_bytes(two_stages, tmp_path):
    def killed(values, at, *options):
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
        return run_program(
            KILLED, values["output"], at, "extend", tmp_path / "recipe.yaml", "--json", *options
        )

    # With the best exported, results decide which checkpoints are kept too.
    two_stages = {**two_stages, "export": "best", "checkpoints": {"every": 2, "keep": 1}}
    whole = beside(two_stages, tmp_path, "whole", every=1)
    events = int(killed(whole, 0).stderr.split("events")[-1])
    expected = measured_in(whole["output"]), steps_of(whole["output"]), weights_of(whole["output"])
    points = random.Random(0).sample(range(events // 4, events), 2)
    for number, point in enumerate(points):
        values = beside(two_stages, tmp_path, f"run{number}", every=1)
        assert killed(values, point).returncode == -signal.SIGKILL
        assert killed(values, 0, "--resume").returncode == 0
        found = measured_in(values["output"]), steps_of(values["output"]), weights_of(values["output"])
        assert found == expected, point
