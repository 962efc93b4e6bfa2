"""The sentences an audit ends in: they have its own figures, and recommend what was measured."""

from dataclasses import replace

import pytest

from ropewalk.audit import AuditSettings, audit_model, finding
from ropewalk.audit.results import best_mitigation
from tests.audit.audit_cases import changed, sharp_llama, token_rows

SETTINGS = AuditSettings(shifts=(0, 16, 1000), ablation_samples=2)


@pytest.fixture(scope="module")
def rows():
    return token_rows(3, 48)


@pytest.fixture(scope="module")
def found(rows):
    return audit_model(sharp_llama(), rows, SETTINGS)


@pytest.mark.slow
def test_the_finding_is_three_sentences_with_the_audits_own_figures(found):
    size, cause, mitigation = finding(found)
    near = next(d for d in found.drift if d.dtype == "bfloat16" and d.delta1 == 0)
    share = f"{near.moved:.1%}" if near.moved >= 0.001 else f"{100 * near.moved:.1g}%"
    assert f"{share} of all attention moves to other tokens (D = {near.D:.3g})" in size
    assert "with random weights D =" in size
    first = next(e for e in found.first_token if e.shifted == "first")
    assert f"causes {first.share_of_D:.1%} of D" in cause or "causes none of D" in cause
    assert "on 2 rows" in cause
    best = best_mitigation(found)
    assert best is not None
    assert mitigation.startswith(best.name.capitalize())
    for sentence in (size, cause, mitigation):
        assert sentence.endswith(".")


def test_the_finding_of_an_overflow_names_what_overflows_and_what_does_not(found):
    nan = float("nan")
    drift = tuple(replace(d, D=nan) if d.dtype == "bfloat16" else d for d in found.drift)
    ablation = tuple(replace(r, D=nan) if r.step in ("product", "all") else r for r in found.ablation)
    mitigations = tuple(
        replace(m, D=nan, far_D=nan) if m.name == "eager attention" else m for m in found.mitigations
    )
    size, cause, mitigation = finding(replace(found, drift=drift, ablation=ablation, mitigations=mitigations))
    assert "overflows" in size
    assert cause == "The overflow comes from rounding rotated queries and keys for q·k alone."
    assert mitigation.startswith("Fused attention, which keeps scores in float32, does not overflow")
    every = tuple(replace(m, D=nan, far_D=nan) for m in found.mitigations)
    assert best_mitigation(replace(found, mitigations=every)) is None
    assert finding(replace(found, mitigations=every))[2].startswith("Fused attention overflows as well")


def test_another_dtype_that_overflows_is_named(found):
    drift = tuple(replace(d, D=float("nan")) if d.dtype == "float16" else d for d in found.drift)
    assert finding(replace(found, drift=drift))[0].endswith("float16 overflows.")


@pytest.mark.parametrize(
    ("near", "far", "best"),
    [
        # The worse of both shifts counts, and what is about as good and simpler comes first.
        ([1.0, 0.5, 0.1], [1.0, 0.5, 0.1], "float32 attention"),
        ([1.0, 0.12, 0.1], [1.0, 0.12, 0.1], "float32 rotation"),
        ([1.0, 0.2, 0.0001], [1.0, 0.2, 5.0], "float32 rotation"),
        ([0.9, 0.9, 0.9], [0.9, 0.9, 0.9], None),
    ],
)
def test_the_mend_to_recommend(found, near, far, best):
    base = replace(found.mitigations[1], D=1.0, far_D=1.0)
    names = ("exact angles", "float32 rotation", "float32 attention")
    mitigations = [replace(base, name=n, D=a, far_D=b) for n, a, b in zip(names, near, far, strict=True)]
    chosen = best_mitigation(replace(found, mitigations=(base, *mitigations)))
    assert (chosen and chosen.name) == best


def test_weights_that_nobody_trained_are_not_said_to_be(found):
    random = next(d for d in found.drift if (d.dtype, d.parameters, d.delta1) == ("bfloat16", "random", 0))
    drift = tuple(
        replace(random, parameters="pretrained")
        if (d.dtype, d.parameters, d.delta1) == ("bfloat16", "pretrained", 0)
        else d
        for d in found.drift
    )
    assert "training" not in finding(replace(found, drift=drift))[0]
    assert "about the same" in finding(replace(found, drift=drift))[0]


@pytest.mark.slow
def test_the_finding_of_float32_alone():
    found = audit_model(
        sharp_llama(),
        token_rows(2, 48),
        changed(SETTINGS, dtypes=("float32",), random_control=False),
    )
    size, cause, mitigation = finding(found)
    assert size.startswith("In float32")
    assert "random" not in size
    assert (
        "No operation alone explains it" in cause
        or "the angles" in cause
        or "cos and sin" in cause
        or "q·k" in cause
        or "products" in cause
    )
    assert "with angles in float64" in mitigation


def test_the_finding_compares_the_control_on_the_same_rows(found):
    near = [d for d in found.drift if (d.dtype, d.delta1) == ("bfloat16", 0)]
    pretrained, random = (next(d for d in near if d.parameters == p) for p in ("pretrained", "random"))
    assert len(random.per_sample) == 2
    drift = tuple(
        replace(d, per_sample=(50 * random.D, 50 * random.D, 9e9)) if d is pretrained else d
        for d in found.drift
    )
    assert "training makes it 50 times as large" in finding(replace(found, drift=drift))[0]
