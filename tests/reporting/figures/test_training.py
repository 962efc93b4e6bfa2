"""The figure of a training run's loss."""

import math
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.reporting import training_figure
from tests.reporting.axes_cases import every_line, lines, names, only, panels, rules, words

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
