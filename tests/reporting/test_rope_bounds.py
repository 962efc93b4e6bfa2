"""How bounds, bases and frequencies are shown: with the numbers that they were given, and what is missing said."""

import io
import math
from dataclasses import replace

from rich.console import Console

from ropewalk.planning.bases import BoundResult, bases_for, bound_of, frequencies_for, theta_for
from ropewalk.planning.settings import BasesSettings, BoundSettings, FrequenciesSettings, ThetaSettings
from ropewalk.reporting.rope import (
    LISTED,
    bound_figures,
    describe_bases,
    describe_bound,
    describe_frequencies,
    describe_theta,
    frequencies_figure,
)
from tests.reporting.axes_cases import lines, only, panels


def shown(parts):
    """What a wide terminal shows of them."""
    out = io.StringIO()
    console = Console(file=out, width=200)
    for part in parts:
        console.print(part)
    return out.getvalue()


def test_each_base_has_its_bound_and_the_first_violation_its_depth():
    result = BoundResult(128, (1e4, 5e5), {1e4: 1234, 5e5: None}, -0.25)
    said = shown(describe_bound(result))
    assert "base 10,000, rotary_dim 128: context bound 1,234 tokens" in said
    assert "base 500,000, rotary_dim 128: context bound more than" in said
    assert "for the first time at a distance of 1,235 tokens" in said
    assert "B(1235) = -0.25" in said
    nowhere = BoundResult(128, (5e5,), {5e5: None}, None)
    assert "for the first time" not in shown(describe_bound(nowhere))


def test_figures_of_a_bound_have_a_panel_or_a_curve_for_each_base():
    result = bound_of(BoundSettings(rope_theta=1e4, rotary_dim=8, compare=(2e4,)))
    margin, decay = bound_figures(result)
    assert len(panels(margin)) == 2
    assert {name.strip() for name in lines(only(decay))} == {"base 10,000", "base 20,000"}


def test_the_widest_intervals_of_bases_are_listed_and_counted():
    result = bases_for(BasesSettings(length=4096, rotary_dim=128, ceiling=1e6))
    found = result.found
    said = shown(describe_bases(result))
    assert f"{found.infimum:,.9g}" in said
    assert f"{found.safe_base:,.9g}: every base from here to 1e+06 is feasible" in said
    many = tuple((float(10 * n), 10.0 * n + 1 + n / 100) for n in range(1, LISTED + 4))
    crowded = replace(result, found=replace(found, feasible=many))
    assert f"the {LISTED} widest of {LISTED + 3}" in " ".join(shown(describe_bases(crowded)).split())


def test_a_length_that_no_base_reaches_says_what_would_help():
    none = bases_for(BasesSettings(length=4096, rotary_dim=128, ceiling=50))
    assert none.found.infimum is None
    assert "No base up to 50 reaches 4,096 tokens with rotary_dim 128; raise --ceiling" in shown(
        describe_bases(none)
    )


def test_a_base_is_shown_with_all_its_digits():
    settings = {"rope_theta": 1e4, "rotary_dim": 128, "from_length": 4096, "to_length": 32768}
    result = theta_for(ThetaSettings(**settings, rule="ntk"))
    # NTK: the base times the extension to the power d / (d - 2).
    expected = 1e4 * 8 ** (128 / 126)
    assert f"{expected:,.10g}" in shown(describe_theta(result))


def test_frequencies_are_shown_pair_by_pair_with_their_periods():
    settings = {"rope_theta": 1e4, "rotary_dim": 8, "from_length": 4096, "to_length": 8192}
    result = frequencies_for(FrequenciesSettings(**settings, method="linear"))
    said = shown(describe_frequencies(result))
    for pair in range(4):
        # Twice the length, half the angle.
        theta = 1e4 ** (-pair / 4) / 2
        assert f"{theta:.9g}" in said
        assert f"{2 * math.pi / theta:,.6g}" in said
    assert "as trained" in lines(only(frequencies_figure(result)))
