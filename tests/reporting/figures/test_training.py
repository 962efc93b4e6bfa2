"""The figure of a training run's loss."""

import math
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.reporting import training_figure
from ropewalk.reporting.figures.training import curve_figure
from tests.reporting.axes_cases import areas, every_line, gaps, lines, names, only, panels, rules, words

METRICS: list[dict[str, Any]] = [
    {"loss": None if n == 7 else 3 - n / 100, "stage": n // 40, "seen": n * 2048} for n in range(80)
]


def test_many_steps_are_smoothed_and_stages_marked() -> None:
    figure = training_figure(METRICS, "Training", x_key="seen")
    panel = only(figure)
    assert names(panel) == ["each step", "mean of 5"]
    each, mean = lines(panel).values()
    assert [n for n, y in enumerate(each.y) if math.isnan(y)] == [7]
    # The mean leaves out the step without a loss.
    known = [METRICS[n]["loss"] for n in (4, 5, 6, 8)]
    assert mean.y[8] == pytest.approx(sum(known) / 4)
    assert mean.y[0] == each.y[0]
    assert list(rules(panel).values()) == [39.5 * 2048]
    assert (words(panel.xaxis), words(panel.yaxis)) == ("seen", "loss (nats per token)")


def test_few_steps_are_points_by_step() -> None:
    panel = only(training_figure(METRICS[:5]))
    (line,) = every_line(panel)
    assert line.x == (1, 2, 3, 4, 5)
    assert line.marker
    assert (names(panel), words(panel.xaxis)) == ([], "optimizer step")


def test_the_load_of_experts_has_a_panel_of_its_own() -> None:
    metrics = [{"loss": 2.0, "seen": n, "max_violation": n / 4} for n in range(3)]
    figure = training_figure(metrics, x_key="seen")
    assert [words(panel.yaxis) for panel in panels(figure)] == ["loss (nats per token)", "max violation"]
    (line,) = every_line(panels(figure)[1])
    assert (line.x, line.y) == ((0, 1, 2), (0, 0.25, 0.5))


def test_a_run_without_a_loss_is_refused() -> None:
    with pytest.raises(RopewalkError, match="no finite training loss"):
        training_figure([{"loss": None}])


def score(length, value, task="passkey", ends=(None, None)):
    return {
        "suite": "passkey",
        "task": task,
        "length": length,
        "n": 4,
        "score": value,
        "unit": "percent",
        "ci95": list(ends),
    }


def test_curves_have_a_line_and_a_band_a_length():
    scores = [
        (2, score(512, 50.0, ends=(20, 80))),
        (2, score(1024, 0.0)),
        (4, score(512, 75.0, ends=(40, 90))),
    ]
    panel = only(curve_figure(scores, "passkey during training"))
    assert {name: (line.x, line.y) for name, line in lines(panel).items()} == {
        "512 tokens": ((2, 4), (50, 75)),
        "1k tokens": ((2,), (0,)),
    }
    assert areas(panel) == [{2: (20, 80), 4: (40, 90)}, {}]
    with pytest.raises(RopewalkError, match="no score from an evaluation during training"):
        curve_figure([])


def test_many_tasks_are_drawn_as_their_mean():
    scores = [(2, score(512, 10.0 * n, f"task{n}")) for n in range(9)]
    figure = curve_figure(scores)
    (line,) = every_line(only(figure))
    assert (line.name, line.y) == ("512 tokens", (40.0,))
    assert "Mean over all tasks" in figure.caption


def test_a_perplexity_that_is_infinite_is_a_gap():
    scores = [
        (step, {**score(512, value), "unit": "perplexity"})
        for step, value in ((2, 9.0), (4, math.inf), (6, 8.0))
    ]
    (line,) = every_line(only(curve_figure(scores)))
    assert gaps(line) == [False, True, False]
    with pytest.raises(RopewalkError, match="no score from an evaluation during training"):
        curve_figure(scores[1:2])
