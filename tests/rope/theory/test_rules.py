"""Rules, schedules, stages and exposure: published numbers, and what each promises by its name."""

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.rope import Default, Linear, LongRope, Ntk, Yarn, candidate, check_candidate, critical_dimension
from ropewalk.rope.theory import (
    EXTENSIONS,
    RULES,
    context_bound,
    exposure,
    feasible_bases,
    length_floor,
    recommended_theta,
    smallest_base,
    stage_contexts,
    theta_by_rule,
)
from ropewalk.rope.theory.published import LARGEST_PUBLISHED
from ropewalk.rope.theory.rules import KNOWN_FLOORS
from tests.places import ROOT
from tests.rope.theory.theory_cases import inv_freq

DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    ("target", "published"),
    # rope_theta of Gradient's 262k and 1048k checkpoints, in their config.json.
    [(262144, 283461213.0), (1048576, 3580165449.0)],
)
def test_scaling_law_gives_gradients_published_theta_to_7_digits(target: int, published: float) -> None:
    theta = theta_by_rule("critical-dimension", 128, 5e5, 8192, target)
    assert theta == pytest.approx(published, rel=5e-8)


def test_ntk_slows_the_slowest_pair_by_the_factor() -> None:
    theta = theta_by_rule("ntk", 128, 1e4, 4096, 32768)
    before, after = inv_freq(128, 1e4), inv_freq(128, theta)
    assert after[-1] == pytest.approx(before[-1] / 8, rel=1e-12)
    assert after[0] == before[0]


def test_the_recommended_base_is_the_larger_of_the_law_and_the_floor() -> None:
    for base, trained, target in ((1e4, 4096, 32768), (5e5, 8192, 262144), (1e6, 40960, 131072)):
        found = recommended_theta(base, trained, target)
        law = theta_by_rule("critical-dimension", 128, base, trained, target)
        floor = theta_by_rule("length-floor", 128, base, trained, target)
        assert (found.law, found.floor) == (law, floor)
        assert found.rope_theta == max(law, floor) == theta_by_rule("recommended", 8, base, trained, target)
        assert found.rule == ("critical-dimension" if law >= floor else "length-floor")
        assert f"{law:,.0f}" in found.reason
        assert f"{floor:,.0f}" in found.reason


@pytest.mark.parametrize(
    ("rotary_dim", "base", "trained", "target", "rule"),
    [
        # Falcon-H1 0.5B and Mistral Small were pretrained with such bases; the law would give 8e13 and 8e10.
        (64, 1e11, 16384, 131072, "current"),
        (128, 1e9, 131072, 1048576, "current"),
        # The present base covers the target, and the law gives what has been published.
        (128, 1.06e9, 524288, 1048576, "critical-dimension"),
        (128, 5e5, 8192, 16384, "critical-dimension"),
        # The law gives more than was ever published, and the present base does not cover the target.
        (128, 1e9, 131072, 2097152, "critical-dimension"),
        (8, 1e11, 16384, 131072, "critical-dimension"),
    ],
)
def test_a_base_that_covers_the_target_stays_where_the_law_leaves_what_was_published(
    rotary_dim: int, base: float, trained: int, target: int, rule: str
) -> None:
    found = recommended_theta(base, trained, target, rotary_dim)
    bound = context_bound(inv_freq(rotary_dim, base), limit=target)
    assert found.rule == rule
    assert found.rope_theta == (base if rule == "current" else found.law)
    assert (rule == "current") == (bound is None and found.law > LARGEST_PUBLISHED)
    assert theta_by_rule("recommended", rotary_dim, base, trained, target) == found.rope_theta
    if rule == "current":
        assert f"would give {found.law:,.0f}, and no published model" in found.reason


@pytest.mark.slow
def test_the_recommended_base_stays_within_what_the_spread_of_published_bases_allows() -> None:
    """Off by a factor of 2 or so on average, never 6 from any; neither rule alone nor a safe base does as well."""
    off = {"recommended": [], "critical-dimension": [], "length-floor": []}
    for each in EXTENSIONS:
        steps = (each.rotary_dim, each.rope_theta, each.trained_length, each.target_length)
        for rule, logs in off.items():
            logs.append(math.log(theta_by_rule(rule, *steps) / each.new_theta))
    typical = {rule: math.exp(math.sqrt(np.mean(np.square(logs)))) for rule, logs in off.items()}
    assert typical["recommended"] < 2.3 < 2.9 < min(typical["critical-dimension"], typical["length-floor"])
    assert max(abs(log) for log in off["recommended"]) < math.log(6)
    assert 0.67 < math.exp(np.median(off["recommended"])) < 1.5
    stored = json.loads((DOCS / "published-bases.json").read_text())["summary"]
    (said,) = (row["spread"] for name, row in stored.items() if name.startswith("recommended"))
    assert typical["recommended"] == pytest.approx(said, rel=1e-6)
    assert all(said <= row["spread"] for row in stored.values())


def test_known_floors_are_the_infima_of_the_stored_maps() -> None:
    stored = {each["length"]: each["infimum"] for each in json.loads((DOCS / "bases.json").read_text())}
    assert dict(KNOWN_FLOORS) == pytest.approx(stored, rel=1e-8)
    for length in (1024, 8192):
        assert smallest_base(length, 128) == pytest.approx(KNOWN_FLOORS[length], rel=1e-8)


@pytest.mark.parametrize("length", [300, 1500, 5000])
def test_the_floor_of_any_length_is_the_infimum(length: int) -> None:
    assert length_floor(length) == feasible_bases(length, 128, 1e6).infimum


def test_a_law_that_covers_the_next_known_length_needs_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ropewalk.rope.theory.rules.smallest_base", pytest.fail)
    found = recommended_theta(5e5, 8192, 100_000)
    assert (found.rule, found.floor) == ("critical-dimension", KNOWN_FLOORS[131072])


@pytest.mark.parametrize("rotary_dim", [64, 128])
def test_lower_bound_reaches_the_target_and_so_does_every_larger_base(rotary_dim: int) -> None:
    theta = theta_by_rule("lower-bound", rotary_dim, 1e4, 2048, 8192)
    for base in (theta, *np.geomspace(theta, 1e11, 40)):
        bound = context_bound(inv_freq(rotary_dim, base), limit=8192)
        assert bound is None, base


def test_lower_bound_never_lowers_a_base_and_needs_a_ceiling_that_is_safe() -> None:
    assert theta_by_rule("lower-bound", 128, 1e9, 2048, 4096) == 1e9
    with pytest.raises(
        RopewalkError, match=r"no base up to 10000 is large enough for 8192 tokens .* raise the ceiling"
    ):
        theta_by_rule("lower-bound", 128, 1e4, 2048, 8192, ceiling=1e4)


def test_lower_bound_leaves_a_decade_below_the_ceiling_it_chose_itself() -> None:
    """With 8 pairs the base up to 1e12 that looks safe for 128k fails 2 % higher."""
    theta = theta_by_rule("lower-bound", 16, 1e4, 2048, 131072)
    assert theta > 1.9e12
    for base in np.geomspace(theta, 10 * theta, 200):
        assert context_bound(inv_freq(16, base), limit=131072) is None


@pytest.mark.parametrize(
    ("name", "length", "base"),
    [
        ("gradient", 65536, 15.3e6),
        ("gradient", 262144, 207.1e6),
        ("gradient", 1048576, 2.8e9),
        ("lwm", 32768, 1e6),
        ("lwm", 524288, 2.5e7),
        ("lwm", 1048576, 5e7),
        ("anchorcontext", 20000, 1e6),
        ("anchorcontext", 65536, 5e6),
        ("anchorcontext", 131072, 1e7),
        ("anchorcontext", 131073, 5e7),
    ],
)
def test_schedules_as_published(name: str, length: int, base: float) -> None:
    assert theta_by_rule(f"schedule:{name}", 128, 1e4, 4096, length) == base


def test_a_schedule_that_ends_before_the_target_says_so() -> None:
    with pytest.raises(
        RopewalkError,
        match="the rule schedule:anchorcontext gives bases for up to 262144 tokens, but the target length is 262145",
    ):
        theta_by_rule("schedule:anchorcontext", 128, 1e4, 4096, 262145)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lowerbound", 128, 1e4, 4096, 8192), "unknown rule 'lowerbound'; did you mean lower-bound"),
        (("schedule:lvm", 128, 1e4, 4096, 8192), "did you mean schedule:lwm"),
        (
            ("ntk", 128, 1e4, 8192, 4096),
            "the target length must be at least the trained length of 8192 tokens, got 4096",
        ),
        (("ntk", 2, 1e4, 4096, 8192), "rotary_dim"),
        (("critical-dimension", 127, 1e4, 4096, 8192), "rotary_dim must be an even whole number"),
        (("critical-dimension", 128, 1.0, 4096, 8192), "rope_theta must be a finite number above 1"),
    ],
)
def test_rules_refuse(arguments: tuple, said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        theta_by_rule(*arguments)


@given(st.integers(7, 2**18), st.floats(1.0001, 4096))
def test_stages_grow_by_at_most_8_and_by_at_least_4_where_the_way_is_that_long(
    trained: int, times: float
) -> None:
    target = max(trained + 1, int(trained * times))
    contexts = stage_contexts(trained, target)
    factors = [after / before for before, after in pairwise([trained, *contexts])]
    assert contexts[-1] == target
    assert all(1 < factor <= 8 for factor in factors)
    assert len(contexts) == max(1, math.ceil(math.log(target / trained, 8) - 1e-9))
    # Between 8 and 16 times there are two stages, and only one of them can be 4.
    if target / trained >= 4:
        assert all(factor >= 2 for factor in factors)
    if target / trained >= 16:
        assert all(factor >= 4 for factor in factors)
    if target == trained * 2 ** round(math.log2(target / trained)) and target / trained >= 16:
        assert all(factor in (4, 8) for factor in factors)


def test_a_way_of_12_times_is_no_8_and_a_half_stage() -> None:
    assert stage_contexts(4096, 49152) == [16384, 49152]


def test_stages_of_gradient() -> None:
    assert stage_contexts(8192, 1048576) == [65536, 262144, 1048576]


def test_stages_refuse_a_target_that_is_not_longer() -> None:
    with pytest.raises(RopewalkError, match=r"must be above the trained length of 4096 tokens, got 4096$"):
        stage_contexts(4096, 4096)
    with pytest.raises(RopewalkError, match=r"got 128; did you mean 128k\?"):
        stage_contexts(8192, 128)
    with pytest.raises(RopewalkError, match=r"got 4$"):
        stage_contexts(8192, 4)


@given(st.integers(2, 64), st.floats(100, 1e8), st.integers(16, 10**5), st.integers(1, 64))
def test_exposure_counts_new_angles_as_a_dense_walk_does(
    pairs: int, base: float, trained: int, times: int
) -> None:
    theta = inv_freq(2 * pairs, base)
    found = exposure(theta, trained, theta, trained * times)
    walk = (np.arange(20_000) + 0.5) / 20_000
    for pair, slow in zip(found, theta, strict=True):
        turns = trained * slow / (2 * math.pi)
        assert pair.complete == (turns >= 1)
        angles = (walk * slow * trained * times) % (2 * math.pi)
        share = 0.0 if turns >= 1 else float((angles > slow * trained).mean())
        # The walk resolves a share to one step an arc, and there are at most 2·turns + 1 arcs.
        assert pair.new_angles == pytest.approx(share, abs=(2 * pair.target_turns + 2) / 20_000)
        assert pair.period == pytest.approx(2 * math.pi / slow)


def test_exposure_agrees_with_the_critical_dimension_and_the_law_leaves_nothing_new() -> None:
    before = inv_freq(128, 5e5)
    as_is = exposure(before, 8192, before, 262144)
    assert 2 * sum(pair.complete for pair in as_is) == critical_dimension(128, 5e5, 8192) == 70
    assert all(pair.new_angles > 0 for pair in as_is if not pair.complete)
    law = inv_freq(128, theta_by_rule("critical-dimension", 128, 5e5, 8192, 262144))
    assert all(pair.new_angles == 0 for pair in exposure(before, 8192, law, 262144))
    interpolated = exposure(before, 8192, before / 32, 262144)
    assert all(pair.new_angles == 0 for pair in interpolated)


def test_exposure_refuses_settings_of_another_size() -> None:
    with pytest.raises(RopewalkError, match="must be equally long, got 64 and 32 frequencies"):
        exposure(inv_freq(128, 1e4), 100, inv_freq(64, 1e4), 100)


@pytest.mark.parametrize("name", ["critical-dimension", "ntk", "schedule:lwm"])
def test_candidates_of_an_unscaled_checkpoint_are_bases(name: str) -> None:
    assert name in RULES
    expected = theta_by_rule(name, 128, 1e4, 4096, 16384)
    assert candidate(name, Default(128, 1e4), 4096, 16384) == Default(128, expected)


def test_candidates_by_factor_by_value_and_as_it_is() -> None:
    current = Default(128, 1e4)
    assert candidate("current", current, 4096, 16384) is current
    assert candidate("theta=5e6", current, 4096, 16384) == Default(128, 5e6)
    assert candidate("linear", current, 4096, 16384) == Linear(128, 1e4, 4.0)
    assert candidate("yarn", current, 4096, 16384) == Yarn(128, 1e4, 4.0, 4096)
    # A stated NTK method is a base of its own by now.
    as_default = Ntk(128, 1e4, 2.0).as_default()
    assert candidate("ntk", Ntk(128, 1e4, 2.0), 8192, 16384) == candidate("ntk", as_default, 8192, 16384)


def test_a_base_rule_on_a_scaled_checkpoint_is_refused_and_its_own_method_goes_on() -> None:
    scaled = Yarn(128, 1e6, 4.0, 32768)
    with pytest.raises(
        RopewalkError, match="this checkpoint has yarn RoPE; choose either yarn to extend further"
    ):
        candidate("critical-dimension", scaled, 131072, 524288)
    assert candidate("yarn", scaled, 131072, 524288) == Yarn(128, 1e6, 16.0, 32768)
    assert candidate("theta=1e7", scaled, 131072, 524288) == Yarn(128, 1e7, 4.0, 32768)
    factors = LongRope(4, 1e4, (1.0, 1.0), (1.0, 2.0), 1.0, 4096)
    with pytest.raises(RopewalkError, match="longrope"):
        candidate("ntk", factors, 8192, 16384)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "yarm",
            "also possible: current, linear, yarn, llama3, cope, none, ntk-rcd=PAIR, yarn-rcd=PAIR, theta=VALUE",
        ),
        ("theta=much", "theta=much is not a number"),
    ],
)
def test_unknown_candidates_are_refused_before_anything_else(name: str, said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        check_candidate(name)
