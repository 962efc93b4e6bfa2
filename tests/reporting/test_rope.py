"""What is shown of RoPE by itself, and of a probe."""

from __future__ import annotations

from dataclasses import replace

from ropewalk.evaluation.rope_probe import ProbedSetting, ProbeResult
from ropewalk.evaluation.statistics import NO_INTERVAL
from ropewalk.planning.bases import bases_for, bases_for_halves
from ropewalk.planning.settings import BasesSettings
from ropewalk.reporting.rope import describe_probe, losses_figure

ONE = ProbedSetting("current", None, 2.0, NO_INTERVAL, 2.0, None, None, 0.0, NO_INTERVAL)


def probed(*found: ProbedSetting, refused: tuple[ProbedSetting, ...] = ()) -> ProbeResult:
    return ProbeResult("embedded", 256, 512, "text", 1, "float32", "cpu", found, refused, {})


def test_picture_of_one_row_says_that_it_has_no_interval() -> None:
    for ci95, said in ((NO_INTERVAL, True), ((1.5, 2.5), False)):
        figure = losses_figure(probed(replace(ONE, ci95=ci95)))
        assert ("one sequence, which gives no interval" in figure.caption) == said


def test_a_probe_says_why_a_setting_was_not_run_and_which_starts_best() -> None:
    refused = ProbedSetting.not_run("yarn", "it is scaled already")
    second = replace(ONE, name="ntk", difference=0.5, difference_ci95=(0.1, 0.9))
    parts = list(describe_probe(probed(ONE, second, refused=(refused,))))
    assert "yarn did not run: it is scaled already" in parts
    assert str(parts[-1]).startswith(
        "current has the lowest loss, 0.500 nats per token below ntk; the difference is significant across sequences. "
        "A low loss"
    )


def test_halves_of_a_length_are_mapped_down_to_the_shortest_that_is_drawn() -> None:
    whole = bases_for(BasesSettings(length=4096, rotary_dim=32, ceiling=1e6))
    halves = bases_for_halves(whole)
    assert [each.length for each in halves] == [1024, 2048]
    assert halves[0] == bases_for(BasesSettings(length=1024, rotary_dim=32, ceiling=1e6)).found
