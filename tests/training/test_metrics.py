"""The log of a run's steps: nothing in it is lost without a word."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args
from unittest.mock import MagicMock

import accelerate
import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import TaskResult
from ropewalk.training.measurement import tracked
from ropewalk.training.metrics import LOST, MetricsLog, tracking
from ropewalk.training.recipe.recipe import Tracker
from tests.disk_cases import files_no_larger_than

STEPS = [(0, 1), (0, 2), (0, 3), (2, 1), (2, 2)]
"""The second stage changes only RoPE."""


def values(stage: int, step: int, **more: Any) -> dict[str, Any]:
    return {"stage": stage, "step": step, "loss": None, "tokens": 8, **more}


@pytest.fixture
def log(tmp_path: Path) -> MetricsLog:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for place in STEPS:
        log.append(values(*place), 1)
    return log


def test_trackers_get_numbers_and_the_file_gets_all(tmp_path: Path) -> None:
    drawn: list[dict[str, Any]] = []
    log = MetricsLog(tmp_path / "metrics.jsonl", lambda line, step: drawn.append(line))
    line = values(0, 1, max_violation=0.5, routers={"max_violation": [0.5, 0.25]})
    log.append(line, 1)
    assert log.read() == [line]
    assert drawn == [{"stage": 0, "step": 1, "tokens": 8, "max_violation": 0.5}]


@pytest.mark.parametrize(
    ("done", "left"),
    [([], 0), ([0], 0), ([1], 1), ([3], 3), ([3, 0], 3), ([3, 0, 0], 3), ([3, 0, 1], 4), ([3, 0, 2], 5)],
)
def test_a_resumed_run_drops_what_its_checkpoint_does_not_know(
    log: MetricsLog, done: list[int], left: int
) -> None:
    with log.path.open("ab") as file:
        file.write(b'{"stage": 2, "st')
    dropped = log.path.parent / "earlier" / "metrics.jsonl"
    assert log.check(done) is None
    told = log.rewind(done, dropped)
    assert log.read() == [values(*place) for place in STEPS[:left]]
    # Nothing is lost, and that is said.
    assert MetricsLog(dropped).read() == [values(*place) for place in STEPS[left:]]
    assert (told is None) == (left == 5)
    assert told is None or told.endswith(f"were moved to {dropped}")
    log.append(values(3, 1), 1)
    assert log.read() == [*(values(*place) for place in STEPS[:left]), values(3, 1)]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"\xff" * 8, "'utf-8' codec"),
        (b"\x00\x00", "Expecting value"),
        (b'{"step": 2, "loss": 1.0, "tokens": 8}', "the field 'stage' is missing"),
        (b'{"stage": 0, "loss": 1.0, "tokens": 8}', "the field 'step' is missing"),
        (b'{"stage": 0, "step": 2, "loss": 1.0}', "the field 'tokens' is missing"),
        (
            b'{"stage": 0, "step": "2", "loss": 1.0, "tokens": 8}',
            "step must be a whole number of at least 1, got '2'",
        ),
        (
            b'{"stage": 0, "step": 0, "loss": 1.0, "tokens": 8}',
            "step must be a whole number of at least 1, got 0",
        ),
        (
            b'{"stage": true, "step": 2, "loss": 1.0, "tokens": 8}',
            "stage must be a whole number of at least 0, got True",
        ),
        (
            b'{"stage": 0, "step": 1, "loss": 1.0, "tokens": 8}',
            "step 1 of stage 1 comes after step 1 of stage 1",
        ),
        (b'{"stage": 0, "step": 2, "loss": "x", "tokens": 8}', "loss has the wrong type: 'x'"),
        (b'{"stage": 0, "step": 2, "loss": true, "tokens": 8}', "loss has the wrong type: True"),
        (b'{"stage": 0, "step": 2, "loss": 1e999, "tokens": 8}', "1e999 is beyond the largest float64"),
        (
            b'{"stage": 0, "step": 2, "loss": 1' + b"0" * 400 + b', "tokens": 8}',
            "loss has the wrong type: 1000",
        ),
        (
            b'{"stage": 0, "step": 2, "loss": 1.0, "tokens": 8.0}',
            "tokens must be a whole number of at least 0, got 8.0",
        ),
        (
            b'{"stage": 0, "step": 2, "loss": 1.0, "tokens": 1' + b"0" * 400 + b"}",
            "tokens must be a whole number of at least 0, got 1000",
        ),
    ],
)
def test_a_damaged_line_is_refused_by_number_and_every_line_stays(
    log: MetricsLog, line: bytes, reason: str
) -> None:
    lines = log.path.read_bytes().splitlines(keepends=True)
    content = b"".join([lines[0], line + b"\n", *lines[2:]])
    log.path.write_bytes(content)
    aside = log.path.with_name("dropped")
    for use in (log.read, lambda: log.check([3, 0, 2]), lambda: log.rewind([], aside)):
        with pytest.raises(RopewalkError) as refused:
            use()
        assert str(refused.value).startswith(f"line 2 of {log.path} is damaged: {reason}")
        assert str(refused.value).endswith(
            f"or rename it to {log.path.with_name(LOST)} to resume without its steps"
        )
    assert log.path.read_bytes() == content


def test_missing_steps_are_refused_until_the_user_says_that_they_are_lost(log: MetricsLog) -> None:
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[:2] + lines[3:]))
    told = f"{log.path} lacks 1 of the 5 completed steps (the first is step 3 of stage 1)"
    lost = log.path.with_name(LOST)
    with pytest.raises(RopewalkError) as refused:
        log.check([3, 0, 2])
    assert (
        str(refused.value)
        == f"{told}; either restore the file, or, to resume without these steps, first run: touch {lost}"
    )
    lost.touch()
    assert log.check([3, 0, 2]) == f"{told}, which {LOST} allows"
    assert len(log.read()) == 4


def test_a_log_that_is_gone_is_refused_and_a_renamed_one_is_not(log: MetricsLog) -> None:
    assert MetricsLog(log.path.with_name("none.jsonl")).check([]) is None
    lost = log.path.with_name(LOST)
    aside = log.path.rename(log.path.with_name("aside"))
    with pytest.raises(
        RopewalkError, match=r"lacks 5 of the 5 completed steps \(the first is step 1 of stage 1\); either"
    ):
        log.check([3, 0, 2])
    aside.rename(lost)
    assert "lacks 5 of the 5 completed steps" in str(log.check([3, 0, 2]))
    assert len(lost.read_bytes().splitlines()) == 5


def test_a_last_line_without_its_end_is_named_where_its_step_is_missing(log: MetricsLog) -> None:
    log.path.write_bytes(log.path.read_bytes().removesuffix(b"\n"))
    with pytest.raises(
        RopewalkError,
        match=r"lacks 1 of the 5 completed steps.* ropewalk ignores the last line, which does not end with a newline",
    ):
        log.check([3, 0, 2])
    assert log.check([3, 0, 1]) is None


def test_steps_that_are_dropped_again_and_again_all_stay_in_order(log: MetricsLog) -> None:
    dropped = log.path.with_name("dropped")
    log.rewind([3], dropped)
    log.append(values(2, 1, loss=2.5), 1)
    log.rewind([3], dropped)
    lines = [json.loads(line) for line in dropped.read_text().splitlines()]
    assert lines == [values(2, 1), values(2, 2), values(2, 1, loss=2.5)]


def test_a_full_disk_while_it_is_rewound_is_one_sentence_and_loses_nothing(log: MetricsLog) -> None:
    content = log.path.read_bytes()
    with (
        files_no_larger_than(20),
        pytest.raises(RopewalkError, match=r"cannot write .*metrics\.jsonl: File too large"),
    ):
        log.rewind([3], log.path.parent / "earlier" / "metrics.jsonl")
    assert log.path.read_bytes() == content
    assert [path for path in log.path.parent.rglob("*") if path.is_file()] == [log.path]


def test_a_tracker_that_logs_through_accelerate_starts_in_a_process_that_has_no_accelerator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """accelerate's own tracker for wandb, with a module in wandb's place that takes every call."""
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["wandb"])
    monkeypatch.setattr(accelerate.PartialState, "_shared_state", {})
    with tracking(["wandb"], tmp_path, {"steps": 3}) as log:
        assert log is not None
        log({"loss": 0.5}, 1)
    wandb.init.assert_called_once_with(project="ropewalk")
    wandb.init().log.assert_called_once_with({"loss": 0.5}, step=1)
    wandb.init().finish.assert_called_once_with()


def package() -> MagicMock:
    """A tracker's package that takes every call, with what accelerate compares numbers with."""
    module = MagicMock(__version__="100.0")
    module.utils.validation.MAX_PARAM_VAL_LENGTH = 500
    module.utils.validation.MAX_PARAMS_TAGS_PER_BATCH = 100
    return module


def test_a_recipe_knows_the_trackers_that_accelerate_knows() -> None:
    assert sorted(get_args(Tracker)) == sorted(accelerate.tracking.LOGGER_TYPE_TO_CLASS)


@pytest.mark.parametrize("name", sorted(set(get_args(Tracker)) - {"tensorboard"}))
def test_every_tracker_starts_logs_and_ends(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = package()
    monkeypatch.setitem(sys.modules, name, module)
    # dvclive's metrics are in a module of the package.
    monkeypatch.setitem(sys.modules, f"{name}.plots", module.plots)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [name])
    with tracking([name], tmp_path, {"stages": [{"steps": 3}], "seed": None}) as log:
        assert log is not None
        log({"loss": 0.5}, 7)
    calls = str(module.mock_calls)
    assert "stages.0.steps" in calls
    assert "0.5" in calls
    assert "7" in calls or module.Live().step == 7


def test_mlflow_gets_the_recipe_as_parameters_and_each_step_as_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = package()
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["mlflow"])
    with tracking(["mlflow"], tmp_path, {"stages": [{"steps": 3}]}) as log:
        assert log is not None
        log({"loss": 0.5}, 7)
    mlflow.log_params.assert_called_once_with({"stages.0.steps": 3})
    mlflow.log_metrics.assert_called_once_with({"loss": 0.5}, step=7)
    mlflow.end_run.assert_called_once_with()


def test_a_tracker_that_does_not_start_is_named_and_the_others_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb, trackio = package(), package()
    trackio.init.side_effect = KeyError("no server\nat all")
    for name, module in (("wandb", wandb), ("trackio", trackio)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", ["wandb", "trackio"])
    with (
        pytest.raises(RopewalkError, match=r"^tracker trackio could not start: .*no server"),
        tracking(["wandb", "trackio"], tmp_path, {}),
    ):
        raise AssertionError
    wandb.init().finish.assert_called_once_with()


def test_scores_of_an_evaluation_go_to_the_trackers_alone(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl", lambda values, step: told.append((step, values)))
    told: list[tuple[int, dict[str, float]]] = []
    passkey = TaskResult("passkey", "passkey", 1024, 4, 50.0, (20.0, 80.0))
    hops = TaskResult("ruler", "vt", 512, 4, 25.0, (10.0, 40.0))
    skipped = TaskResult.not_run("passkey", "passkey", 2048, "no prompt fits")
    log.track(tracked([passkey, hops, skipped]), 7)
    assert told == [(7, {"evaluation/passkey/1024": 50.0, "evaluation/ruler/vt/512": 25.0})]
    assert not log.path.exists()
