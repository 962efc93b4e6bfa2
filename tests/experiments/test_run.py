"""A grid as a whole: runs that resume, failures that end no other run, and a conclusion that the numbers support."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from ropewalk import RopewalkError, RunContext, compare
from ropewalk.evaluation.comparison import ScoreDifference
from ropewalk.evaluation.results import SAMPLES, TaskResult
from ropewalk.experiments import run
from ropewalk.experiments.finished_runs import Cost, FinishedRun
from ropewalk.experiments.grid import make_grid
from ropewalk.experiments.run import conclusion
from ropewalk.experiments.settings import CompareSettings
from ropewalk.io.lock import locked
from tests.places import ROOT
from tests.programs import ROPEWALK, Program

SMALL = (
    # Tokenising the embedded documents would take most of a run's time.
    f"data.sources=[{ROOT / 'tests/recorded/inputs/documents.jsonl'}]",
    "stages.0.context=384",
    "stages.0.steps=4",
    "stages.0.warmup_steps=0",
    "stages.0.rows_per_step=2",
    "checkpoints.every=1",
    "evaluation.lengths=[256]",
    "evaluation.samples=2",
    "evaluation.rows=2",
)


# A grid has a dozen runs: minutes where four workers share two slow cores.
pytestmark = pytest.mark.timeout(900)


def settings(**more):
    values = {"what": ("demo",), "vary": ("stages.*.pattern=full,anchor",), "seeds": 2, "overrides": SMALL}
    return CompareSettings.model_validate({**values, **more})


class ForkedRun(Program):
    """Stands for ``subprocess.Popen``: an interpreter of its own would import the libraries for each run."""

    def __init__(self, command, *, stdout, env, **_):
        self._stdout = stdout
        super().__init__(ROPEWALK, *command[command.index("ropewalk") + 1 :], environment=env)

    def wait(self):
        self._stdout.write("".join(self.communicate(timeout=800)).encode())
        return self.returncode


@pytest.fixture(scope="module")
def forked():
    """Runs of a grid are forks; the test that kills a grid starts them as users do, with the same results."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "subprocess", SimpleNamespace(Popen=ForkedRun, STDOUT=subprocess.STDOUT))
        yield


@pytest.fixture(scope="module")
def grid(tmp_path_factory, forked):
    """Folder and result of a grid, and what the third of its four runs alone gave."""
    out = tmp_path_factory.mktemp("grid") / "out"
    share = compare(settings(share="3/4"), RunContext(output=out))
    return out, compare(settings(), RunContext(output=out)), share


def weights(out):
    """Digest of each run's final weights and results."""
    found = {}
    for model in sorted(out.glob("cells/*/seed-*/model/model.safetensors")):
        run = model.parents[1]
        summary = json.loads((run / "summary.json").read_text())
        results = json.dumps([summary["before"], summary["after"]])
        found[str(run.relative_to(out))] = hashlib.sha256(model.read_bytes() + results.encode()).hexdigest()
    return found


@pytest.mark.slow
def test_a_grid_has_a_run_for_each_cell_and_seed_and_one_conclusion(grid):
    out, result, _ = grid
    assert [(cell.name, cell.seeds) for cell in result.cells] == [
        ("pattern full", (0, 1)),
        ("pattern anchor", (0, 1)),
    ]
    assert len(set(weights(out).values())) == 4
    assert (result.failures, result.unfinished) == ((), 0)
    assert {each.suite for each in result.differences["pattern anchor"]} == {"perplexity", "passkey"}
    assert json.loads((out / "comparison.json").read_text()) == result.to_json()
    # All runs read the same packed rows where the pattern does not matter for them.
    assert (out / "data").is_dir()


@pytest.mark.slow
def test_data_is_in_the_same_order_in_all_cells(grid):
    out, *_ = grid
    for seed in (0, 1):
        first = [
            json.loads(
                (out / f"cells/pattern={pattern}/seed-{seed}/metrics.jsonl").read_text().splitlines()[0]
            )
            for pattern in ("full", "anchor")
        ]
        assert first[0]["tokens"] == first[1]["tokens"]
        # The anchor of each of the two rows is no target; all else is the same.
        assert first[0]["trained_tokens"] == first[1]["trained_tokens"] + 2


@pytest.mark.slow
def test_finished_runs_by_name_are_the_same_comparison(grid):
    out, result, _ = grid
    folders = [str(out / "cells" / f"pattern={p}" / f"seed-{s}") for p in ("full", "anchor") for s in (0, 1)]
    again = compare(CompareSettings(what=tuple(folders)))
    assert again.differences == result.differences
    assert again.conclusion == result.conclusion


def test_a_run_that_was_killed_while_it_wrote_its_report_is_completed(tmp_path, monkeypatch):
    grid, taken_up = make_grid("demo", settings().vary, 1, SMALL, tmp_path), []
    for each in grid.runs:
        each.folder.mkdir(parents=True)
        (each.folder / "summary.json").write_text("{}")
    killed, finished = grid.runs
    (finished.folder / "report.html").write_text("")
    monkeypatch.setattr(run, "_run_one", lambda each, *_: taken_up.append(each))
    assert run._run_all(grid, settings(seeds=1), RunContext()) == []
    assert taken_up == [killed]


SIGNALS = (signal.SIGKILL, signal.SIGINT)
HEEDS = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler);"
"""A job in the background of a shell ignores interrupts, and so do the processes that it starts."""


@pytest.mark.slow
def test_killed_at_random_the_grid_ends_with_the_same_bytes(grid, forked, tmp_path):
    expected = weights(grid[0])
    out = tmp_path / "out"
    # One run of four steps; that the whole grid takes up what a share has finished is tested above.
    command = ["compare", "demo", "--vary", settings().vary[0], "--seeds", "1", "--part", "2/2"]
    command += ["--out", str(out), *(f"--set={each}" for each in SMALL)]
    draw = random.Random(0)
    # Steps rather than seconds, which would mostly fall into the imports.
    for place, step in enumerate(sorted(draw.sample(range(1, 4), len(SIGNALS)))):
        process = Program(f"{HEEDS} {ROPEWALK}", *command)
        while process.poll() is None and steps_trained(out) < step:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 0.2))
        assert process.poll() is None, "the grid ended before it was killed"
        process.send_signal(SIGNALS[place])
        process.communicate()
        # A step, its checkpoint and the end of the process take seconds where four workers share two cores.
        ends_within(30, out)
        # It was ended, and has not gone on to its own end.
        assert list(out.glob("cells/*/*/summary.json")) == []
    compare(settings(seeds=1, share="2/2"), RunContext(output=out))
    assert weights(out) == {run: each for run, each in expected.items() if run.endswith("anchor/seed-0")}


def steps_trained(out):
    """Lines of the metrics of all runs of a grid; a step that is trained again replaces its line."""
    return sum(len(metrics.read_bytes().splitlines()) for metrics in out.glob("cells/*/*/metrics.jsonl"))


def ends_within(seconds, out):
    """Wait until no run of the grid holds its folder's lock any more."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        listed = subprocess.run(["pgrep", "-f", str(out)], capture_output=True, text=True, check=False).stdout
        if not [pid for pid in listed.split() if int(pid) != os.getpid()]:
            return
        time.sleep(0.1)
    raise AssertionError("a run goes on after the command ended")


@pytest.mark.slow
def test_a_run_that_fails_ends_no_other(grid, forked, tmp_path):
    # A learning rate that diverges fails in the run and not before it. The other run is finished already.
    vary, out = ("stages.0.learning_rate=1.0e+30,1.0e-4",), tmp_path / "out"
    failing, other = make_grid("demo", vary, 1, SMALL, out).runs
    run._started(settings(vary=vary, seeds=1), out)
    shutil.copytree(grid[0] / "cells/pattern=full/seed-0", other.folder)
    result = compare(settings(vary=vary, seeds=1), RunContext(output=out))
    (failure,) = result.failures
    assert failure.cell == failing.cell == "lr 1e30"
    assert "not finite" in failure.reason
    assert [cell.name for cell in result.cells] == ["lr 0.0001"]
    # The cell that is left is no reference.
    assert (result.reference, result.differences) == (failing.cell, {})
    assert result.conclusion == f"Nothing is compared: the reference {failing.cell} has no finished run."


@pytest.mark.slow
def test_a_share_is_run_apart_and_gathered_by_a_later_call(grid):
    share = grid[2]
    assert [(cell.name, cell.seeds) for cell in share.cells] == [("pattern anchor", (0,))]
    assert (share.reference, share.unfinished) == ("pattern full", 3)
    assert "pattern full has no finished run" in share.conclusion


@pytest.mark.parametrize("missing", ["full", "anchor", "reset"])
def test_no_other_cell_takes_the_place_of_a_reference_without_runs(missing):
    samples = tuple({"index": i, "score": 100.0 * (i % 2)} for i in range(8))
    scores = (TaskResult("passkey", "passkey", 256, 8, 50.0, (0, 100), samples=samples),)
    cells = {
        name: {0: FinishedRun(Path(name), scores, None, 0, None)}
        for name in ("full", "anchor", "reset")
        if name != missing
    }
    result = run._compared(None, "full", cells, [], 1)
    assert [cell.folders for cell in result.cells] == [(Path(name),) for name in cells]
    assert [cell.name for cell in result.cells] == list(cells)
    assert list(result.differences) == ([] if missing == "full" else [n for n in cells if n != "full"])
    assert result.conclusion.startswith("Nothing is compared") == (missing == "full")


def test_the_speed_of_a_cell_is_its_tokens_over_its_time():
    # The mean of both rates, 30 tokens per second, would contradict the mean time.
    costs = (Cost(1.0, 40.0, tokens=144_000), Cost(2.0, 20.0, tokens=144_000))
    cell = run._cell("c", {n: FinishedRun(Path("x"), (), None, n, cost) for n, cost in enumerate(costs)})
    assert (cell.hours, cell.fewest_hours, cell.most_hours, cell.tokens) == (1.5, 1.0, 2.0, 144_000)
    assert cell.tokens_per_second == pytest.approx(cell.tokens / (3600 * cell.hours))


def test_a_cell_with_the_recommended_base_names_it():
    trained = FinishedRun(Path("x"), (), None, 0, None, 42_345.6)
    assert run._with_base("base auto, steps 8", {3: trained}) == "base 4.23e4 (recommended), steps 8"
    assert run._with_base("base 1e4", {3: trained}) == "base 1e4"
    assert run._with_base("base auto", {}) == "base auto"


def test_a_bad_cell_is_refused_before_anything_runs(tmp_path):
    bad = settings(vary=("lift=[],[windows]",))
    with pytest.raises(RopewalkError, match=r"the runs with lift windows cannot start: lift\.0 is 'windows'"):
        compare(bad, RunContext(output=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_grid_needs_a_folder_of_its_own(tmp_path):
    with pytest.raises(RopewalkError, match="give --out"):
        compare(settings())
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(RopewalkError, match="is not empty and contains no comparison; give another --out"):
        compare(settings(), RunContext(output=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_shares_that_start_at_once_wait_for_the_one_that_writes_the_recipes(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    with ExitStack() as others:
        others.enter_context(locked(tmp_path / "out"))
        release = threading.Timer(0.5, others.close)
        # The last work before the lock is asked for.
        monkeypatch.setattr(
            "ropewalk.training.preflight.resolve", lambda recipe: release.ident or release.start()
        )
        grid = run._started(settings(share="2/2"), tmp_path / "out")
        release.join()
    assert all(each.file.is_file() for each in grid.runs)


def test_a_second_command_on_the_same_folder_is_refused_before_any_run(tmp_path, monkeypatch):
    monkeypatch.setattr("ropewalk.training.preflight.resolve", lambda recipe: None)
    monkeypatch.setattr(run, "_run_all", lambda grid, settings, context: [])
    out = RunContext(output=tmp_path / "out")
    for share in (None, "1/2"):
        run._started(settings(share=share), out.output)
        part = "runs" if share is None else "runs 1 of 2"
        with locked(out.output, file=part):
            with pytest.raises(RopewalkError, match=rf"is writing to .*/{part}; wait until it is done, or"):
                compare(settings(share=share), out)
            # The other half of the runs has its own lock, and nothing is finished.
            with pytest.raises(RopewalkError, match="is finished"):
                compare(settings(share="2/2"), out)


def test_values_and_seeds_may_be_added_and_what_is_lost_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr("ropewalk.training.preflight.resolve", lambda recipe: None)
    for more in ({}, {"vary": ("stages.*.pattern=full,anchor,intra_document",), "seeds": 3}):
        grid = run._started(settings(**more), tmp_path / "out")
        assert json.loads((tmp_path / "out/grid.json").read_text()) == json.loads(json.dumps(grid.record()))
    assert len(list(tmp_path.glob("out/cells/*/*.yaml"))) == 9
    (tmp_path / "out/grid.json").unlink()
    grid.runs[3].file.unlink()
    run._started(settings(**more), tmp_path / "out")
    assert (tmp_path / "out/grid.json").is_file()
    assert grid.runs[3].file.is_file()


@pytest.mark.parametrize(
    ("now", "differs"),
    [
        (
            {"overrides": (*SMALL, "stages.0.steps=7")},
            r"recipe\.stages\.0\.steps \(4 in the folder, 7 given\)",
        ),
        ({"seeds": 1}, r"--seeds \(\[0, 1\] in the folder, \[0\] given\)"),
        (
            {"vary": ("stages.*.pattern=anchor,full",)},
            r'--vary stages\.\*\.pattern \(\["full", "anchor"\] in the folder, \["anchor", "full"\] given\)',
        ),
        ({"vary": ("stages.0.pattern=full,anchor",)}, r'--vary \(\["stages\.\*\.pattern"\] in the folder, '),
    ],
)
def test_another_grid_is_refused(tmp_path, monkeypatch, now, differs):
    monkeypatch.setattr("ropewalk.training.preflight.resolve", lambda recipe: None)
    run._started(settings(), tmp_path / "out")
    before = (tmp_path / "out/grid.json").read_text()
    with pytest.raises(
        RopewalkError,
        match=rf"contains a different comparison, which differs in {differs}.*; keep the recipe, and all",
    ):
        run._started(settings(**now), tmp_path / "out")
    assert (tmp_path / "out/grid.json").read_text() == before


def test_a_run_that_just_ended_does_not_keep_the_others_from_being_interrupted():
    ended, going = (
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
        for code in ("", f"{HEEDS} print(flush=True); time.sleep(600)")
    )
    with ended, going:
        ended.wait()
        # While an interpreter starts, an interrupt may fall into a place that ignores it.
        going.stdout.readline()
        processes = run._Processes()
        # A list, so that the one that ended comes first.
        processes._running = [ended, going]
        try:
            processes.end()
            assert going.wait() != 0
        finally:
            going.kill()


def difference(value, p, unit="percent", name="passkey"):
    return ScoreDifference(
        name, name, 1024, unit, 10, 1.0, 2.0, value, (value - 9, value + 9), p / 2, p, p < 0.05, None
    )


def test_frames_name_the_cell_and_have_the_differences():
    samples = tuple({"index": i, "score": 100.0 * (i % 2)} for i in range(8))
    scores = (
        TaskResult("passkey", "passkey", 256, 8, 50.0, (20, 80), details={SAMPLES: "a"}, samples=samples),
    )
    cells = {name: {0: FinishedRun(Path(name), scores, None, 0, None)} for name in ("full", "anchor")}
    result = run._compared(None, "full", cells, [], 0)
    assert list(result.to_frame()["cell"]) == ["full", "anchor"]
    assert not {"when"} & set(result.to_frame().columns)
    frame = result.differences_frame()
    (row,) = frame.to_dict("records")
    (expected,) = result.differences["anchor"]
    assert (row["cell"], row["reference"], row["score_a"], row["score_b"]) == ("anchor", "full", 50.0, 50.0)
    assert (row["low"], row["high"]) == expected.ci95
    assert (row["p_value"], row["p_adjusted"], row["freedom"]) == (expected.p_value, expected.p_adjusted, 7)


@pytest.mark.parametrize(
    ("found", "seeds", "sentence"),
    [
        (
            {"anchor": [difference(12.0, 0.01), difference(1.0, 0.9)]},
            {3},
            "anchor is better than full by 12.0 points (3.0 to 21.0) at 1,024 tokens on passkey; nothing else is more "
            "than chance.",
        ),
        (
            {"anchor": [difference(-12.0, 0.01)], "reset": [difference(20.0, 0.001)]},
            {3},
            "reset is better than full by 20.0 points (11.0 to 29.0) at 1,024 tokens on passkey; 1 other difference is "
            "more than chance.",
        ),
        (
            {"anchor": [difference(12.0, 0.01, "perplexity", "perplexity")]},
            {1},
            "anchor is worse than full: its perplexity is 12.0 % higher (3.0 to 21.0 %) at 1,024 tokens; "
            "nothing else is more than chance; each cell has one seed, so the variation between training runs is not "
            "counted.",
        ),
        ({"anchor": [difference(2.0, 0.5)]}, {3}, "No difference from full is more than chance (1 tested)."),
        ({}, {3}, "No difference from full could be tested."),
    ],
)
def test_the_conclusion_is_one_sentence_that_the_numbers_support(found, seeds, sentence):
    assert conclusion("full", found, seeds) == sentence
