"""Whole runs under torchrun: the numbers of one process, a killed process, and a run that starts again by itself."""

import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch
import yaml

import ropewalk
from ropewalk.training.recipe.file import parse_recipe
from tests.programs import ROPEWALK, run_program, run_together
from tests.training.run_cases import extend, extended

PROGRAM = """
import os, signal, sys
import ropewalk.training.stage as stage
step_of, done = stage.train_step, [0]
mark = sys.argv[1]
def steps(*arguments):
    # The fourth step of rank 1 is its last, once.
    if os.environ["RANK"] == "1" and done[0] == 3 and not os.path.exists(mark):
        open(mark, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    done[0] += 1
    return step_of(*arguments)
stage.train_step = steps
from ropewalk.cli.app import run
sys.argv[1:] = sys.argv[2:]
run()
"""


IN_THE_THIRD_STEP = """
import os, signal, time
import ropewalk.training.stage as stage
step_of, done = stage.train_step, [0]
def steps(*arguments):
    done[0] += 1
    # Of rank 1 alone.
    if os.environ["RANK"] == "1" and done[0] == 3:
        ACTION
    return step_of(*arguments)
stage.train_step = steps
from ropewalk.cli.app import run
run()
"""
SIGNALLED = IN_THE_THIRD_STEP.replace("ACTION", "os.kill(os.getpid(), signal.SIGUSR1)")
STUCK = IN_THE_THIRD_STEP.replace("ACTION", "time.sleep(60)")


REFUSED = """
import ropewalk.parallel.world as world
# No agent is there that would end rank 0 before it has said why.
world.LAST_WORDS = 0.0
from ropewalk.cli.app import run; run()
"""


AGENT = """
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
# For each line of its log torch reads the source of all its callers, which takes longer than all else that it does.
dynamic_rendezvous.get_method_name = lambda depth=2: "?"
from torch.distributed.run import main
main()
"""


def torchrun(program, *arguments, restarts=0):
    """torchrun's agent, whose processes are forks of it: interpreters of their own would import the libraries anew."""
    options = ["--standalone", "--nproc-per-node", "2", "--max-restarts", restarts]
    forks = ["--run-path", "--start-method", "fork"]
    return run_program(AGENT, *options, *forks, program, *arguments)


def losses(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [(line["stage"], line["step"], line["loss"], line["grad_norm"]) for line in map(json.loads, lines)]


@pytest.fixture(scope="module")
def values(tiny_checkpoint, tiny_documents):
    """Two stages of an odd length each, evaluated between; the data lie beside the first run."""
    stage = {"rows_per_step": 2, "learning_rate": 1e-2}
    return {
        "model": str(tiny_checkpoint),
        "data": {"sources": [str(tiny_documents)], "validation_documents": 20},
        "stages": [{**stage, "context": 65, "steps": 3}, {**stage, "context": 129, "steps": 4}],
        "checkpoints": {"every": 2, "keep": 2},
        "evaluation": {"suites": ["perplexity"], "rows": 2},
        "parallel": {"sequence": 2},
    }


@pytest.fixture(scope="module")
def undisturbed(values, two_ranks, tmp_path_factory):
    """The folder of a run of two processes, which live already, and of one of one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    two_ranks.run(extended, {**values, "output": str(folder / "two")})
    extend(
        parse_recipe(yaml.safe_dump({**values, "output": str(folder / "one"), "parallel": "auto"}), "test")
    )
    return folder / "two", folder / "one"


@pytest.mark.slow
def test_two_processes_report_what_one_does(undisturbed):
    two, one = undisturbed
    for (*where_2, loss_2, norm_2), (*where_1, loss_1, norm_1) in zip(losses(two), losses(one), strict=True):
        assert where_2 == where_1
        # Each step starts from weights that differ by the rounding of those before it.
        assert loss_2 == pytest.approx(loss_1, rel=1e-4)
        assert norm_2 == pytest.approx(norm_1, rel=1e-3)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (two, one)]
    assert [each["processes"]["number"] for each in summaries] == [2, 1]
    for when in ("before", "after"):
        (of_two,), (of_one,) = (each[when] for each in summaries)
        assert of_two["score"] == pytest.approx(of_one["score"], rel=1e-4)
    assert (two / "model" / "config.json").read_text() == (one / "model" / "config.json").read_text()


def prepared(values, tmp_path):
    """Recipe and program of a run whose second process dies in the fourth step, and the mark that it has."""
    recipe, program = tmp_path / "recipe.yaml", tmp_path / "program.py"
    recipe.write_text(yaml.safe_dump({**values, "output": str(tmp_path / "run")}))
    program.write_text(PROGRAM)
    return recipe, program, tmp_path / "killed"


@pytest.mark.slow
def test_where_a_process_dies_the_others_say_so_and_the_run_goes_on(values, undisturbed, two_ranks, tmp_path):
    recipe, _, mark = prepared(values, tmp_path)
    first, second = run_together(2, mark, "extend", recipe, code=PROGRAM)
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 1
    assert "rank 0 lost contact with the other processes" in first.stderr
    assert "--resume" in first.stderr
    two_ranks.run(extended, {**values, "output": str(tmp_path / "run")}, True)
    assert losses(tmp_path / "run") == losses(undisturbed[0])


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all_after_the_same_step(values, undisturbed, two_ranks, tmp_path):
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump({**values, "output": str(output), "checkpoints": {"every": 100}}))
    results = run_together(2, "extend", recipe, code=SIGNALLED)
    assert [result.returncode for result in results] == [75, 75]
    said = [line for each in results for line in each.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "stopped by SIGUSR1: the last checkpoint is" in said[0]
    assert "stage0-step000003" in said[0]
    assert len(losses(output)) == 3
    two_ranks.run(extended, {**values, "output": str(output)}, True)
    assert losses(output) == losses(undisturbed[0])


@pytest.mark.slow
def test_a_run_that_hangs_says_where_each_rank_is(values, tmp_path):
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "run"
    recipe.write_text(yaml.safe_dump({**values, "output": str(output), "step_timeout": 4}))
    results = run_together(2, "extend", recipe, code=STUCK)
    assert [result.returncode for result in results] == [1, 1]
    said = [line for each in results for line in each.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert re.search(
        r"no step was completed for 4 s: rank 1 \(process \d+ on \S+\) is in step 3 at "
        r"training/stage.py:\d+ \(steps\); "
        r"rank 0 \(process \d+ on \S+\) is in step 3 at training/update/step.py:\d+ \(all_reduce\); "
        "the same command with",
        said[0],
    )


@pytest.mark.slow
def test_torchrun_starts_a_run_again_by_itself(values, undisturbed, tmp_path):
    recipe, program, mark = prepared(values, tmp_path)
    result = torchrun(program, mark, "extend", recipe, restarts=1)
    assert result.returncode == 0, result.stderr
    assert mark.exists()
    # Rank 0 found out by itself, or was told by the agent first.
    assert re.search("rank 0 (lost contact with the other processes|was terminated)", result.stderr)
    assert losses(tmp_path / "run") == losses(undisturbed[0])


def test_what_is_refused_is_said_once_and_nothing_is_written(values, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump({**values, "output": str(tmp_path / "run"), "parallel": {"sequence": 4}})
    )
    results = run_together(2, "extend", recipe, code=REFUSED)
    assert all(result.returncode != 0 for result in results)
    said = [line for each in results for line in each.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "4 ranks, but 2 were started" in said[0]
    assert not Path(tmp_path / "run").exists()


@pytest.mark.slow
def test_a_restart_does_not_take_up_a_run_that_was_refused(values, undisturbed, tmp_path):
    """The output holds a finished run of someone else: the refusal must outlive torchrun's second attempt."""
    shutil.copytree(undisturbed[1], tmp_path / "run")
    recipe, program = tmp_path / "recipe.yaml", tmp_path / "program.py"
    recipe.write_text(yaml.safe_dump({**values, "output": str(tmp_path / "run")}))
    program.write_text(ROPEWALK)
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    result = torchrun(program, "extend", recipe, restarts=1)
    assert result.returncode != 0
    said = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 2
    assert all("is not empty; either add --resume" in line for line in said)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_torchrun_starts_the_package_in_interpreters_of_their_own():
    """As the guides write it; what the processes do from there on does not depend on how they were started."""
    result = run_program(AGENT, "--standalone", "--nproc-per-node", 2, "-m", "ropewalk", "--version")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [f"ropewalk {ropewalk.__version__}"] * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_once():
    results = run_together(2, "eval", "embedded", "--lengths", "128", "--device", "cuda", code=REFUSED)
    said = [line for each in results for line in each.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "device cuda was asked for" in said[0]
