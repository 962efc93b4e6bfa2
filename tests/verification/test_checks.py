"""Single checks: which there are, what they say, and faults that need no planting."""

import math
import uuid
from dataclasses import replace

import pytest
import torch

from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.errors import RunFailure
from ropewalk.parallel import MeshShape
from ropewalk.parallel.rank_pool import RankFailure
from ropewalk.verification import (
    Check,
    Outcome,
    Planned,
    VerifyResult,
    planned_checks,
    run_checks,
    run_planned,
)
from ropewalk.verification.checks import claims
from ropewalk.verification.checks.documents import packed_equals_separate
from ropewalk.verification.checks.effective_rope import rope_as_loaded
from ropewalk.verification.checks.labels import labels_of_rows
from ropewalk.verification.checks.meshes import uneven_rows
from ropewalk.verification.computing import (
    largest_difference,
    load_whole,
    packed_losses,
    rounding_budget,
    row_losses,
)
from ropewalk.verification.run import reason_of
from tests.verification.verification_cases import OTHER_FAULTS


def with_layouts(case, layouts):
    rows = [
        Row(r.input_ids, next_token_labels(r.input_ids, at), at)
        for r, at in zip(case.rows, layouts, strict=True)
    ]
    return replace(case, rows=tuple(rows), key=uuid.uuid4().hex)


@pytest.mark.parametrize("pattern", ["anchor", "intra_document"])
@pytest.mark.parametrize("positions", ["continuous", "reset"])
def test_interleaved_rows_are_their_documents(case, pattern, positions):
    layout = PackedLayout.from_segments([9, 14, 3, 10, 11], [1, 0, 2, 1, 0], pattern, 1, positions)
    interleaved = with_layouts(case, [layout] * len(case.rows))
    assert packed_equals_separate(interleaved).passed
    assert labels_of_rows(interleaved).passed


def test_pattern_full_has_nothing_apart(case):
    layout = PackedLayout.from_lengths([case.length], "full", anchor_length=0)
    outcome = packed_equals_separate(with_layouts(case, [layout] * len(case.rows)))
    assert outcome.passed is None
    assert "pattern full" in outcome.note


def test_a_target_that_is_missing_is_found(case):
    labels = case.rows[1].labels.clone()
    labels[3] = -100
    rows = (case.rows[0], replace(case.rows[1], labels=labels), *case.rows[2:])
    outcome = labels_of_rows(replace(case, rows=rows))
    assert (outcome.error, outcome.passed) == (1.0, False)
    assert "token 3 of row 1 (document 0) has no target" in outcome.note


def test_an_anchor_of_several_tokens_has_no_target(case):
    layout = PackedLayout.from_lengths([20, 25], "anchor", anchor_length=3)
    anchored = with_layouts(case, [layout] * len(case.rows))
    assert labels_of_rows(anchored).passed
    assert packed_equals_separate(anchored).passed


def test_a_token_that_must_not_be_a_target_is_none(case):
    trained = case.trained[0].clone()
    trained[5] = False
    row = case.rows[0]
    masked = replace(row, labels=next_token_labels(row.input_ids, row.layout, trained))
    right = replace(case, rows=(masked, *case.rows[1:]), trained=(trained, *case.trained[1:]))
    assert labels_of_rows(right).passed
    assert not labels_of_rows(replace(right, rows=case.rows)).passed


def test_the_precision_casts_parameters_alone(case, monkeypatch):
    """ropewalk's own module has no buffer to round; that of transformers keeps its frequencies, as in a run."""
    stock = replace(case, setup=replace(case.setup, exact_rope=False), precision="bfloat16")
    assert rope_as_loaded(stock).passed
    assert rope_as_loaded(replace(case, precision="bfloat16")).passed
    OTHER_FAULTS["whole model cast"](monkeypatch)
    rounded = rope_as_loaded(stock)
    assert rounded.passed is False
    assert "inv_freq is rounded to bfloat16" in rounded.note


def test_uneven_rows_have_all_one_few_and_no_targets(case):
    counts = [int((row.labels >= 0).sum()) for row in uneven_rows(case.rows)]
    assert counts == [44, 1, 5, 0]


def test_meshes_follow_the_heads(case):
    def meshes(ranks, own=None):
        return {str(p.shape): p.reason for p in planned_checks(case, ranks, own) if p.kind == "ranks"}

    assert meshes(2) == {"2 shard": None, "2 sequence": None, "2 ring": None}
    assert meshes(3)["3 sequence"].startswith(
        "not applicable: 3 ranks do not divide the model's 4 attention heads"
    )
    assert "2 ring x 2 sequence" in meshes(4)
    assert "2 replicate x 2 sequence" in meshes(4, MeshShape(replicate=2, sequence=2))


@pytest.mark.parametrize("kind", ["ranks", "shards", "loss"])
@pytest.mark.parametrize("shape", [MeshShape(ring=2, sequence=2), MeshShape(shard=2, sequence=2)], ids=str)
def test_four_ranks_pass(four_ranks, shallow_case, kind, shape):
    check = four_ranks.run(run_planned, Planned(kind, "", "", shape), shallow_case)[0]
    assert check.passed, check


def test_a_check_that_raises_has_failed_and_the_others_still_run():
    planned = [Planned("labels", name, "") for name in ("first", "second", "third")]

    def call(each):
        if each.name == "first":
            raise RankFailure("rank 1: Traceback:\n  line\nropewalk.errors.EngineError: no engine for this")
        if each.name == "second":
            raise RankFailure(
                "rank 0: Traceback:\n  line\nropewalk.errors.RopewalkError: the disk is full\nrank 1: late"
            )
        return Check(0.0, 0.0, True, name=each.name, compared="", seconds=0.0)

    checks = run_checks(planned, call)
    assert [check.passed for check in checks] == [False, False, True]
    assert [check.note for check in checks] == [
        "stopped: no engine for this",
        "stopped: the disk is full",
        "",
    ]
    result = VerifyResult("", None, 2, 32, 64, "full", "float32", "cpu", {}, "", None, 0.0, tuple(checks))
    assert result.failed == ["first", "second"]
    counts = {name: result.to_json()[name] for name in ("passed", "failed", "not_run")}
    assert counts == {"passed": 1, "failed": 2, "not_run": 0}


def test_every_check_has_a_kind_and_a_place_of_its_own(case):
    found = claims()
    assert len({claim.place for claim in found.values() if not claim.kind.startswith("engine")}) == len(
        [kind for kind in found if not kind.startswith("engine")]
    )
    assert [each.kind for each in planned_checks(case, 2)][:2] == ["labels", "documents"]
    assert {each.kind for each in planned_checks(case, 2)} == set(found)


def test_reasons_are_one_line():
    assert reason_of(RunFailure("it broke")) == "it broke"
    assert reason_of(RuntimeError("first\nsecond")) == "RuntimeError: first"


def test_no_number_is_within_a_budget():
    for error in (math.nan, math.inf, 1.1):
        assert Outcome.within(error, 1.0, "good", "bad") == Outcome(error, 1.0, False, "bad") or math.isnan(
            error
        )
        assert not Outcome.within(error, 1.0, "good", "bad").passed
    assert Outcome.within(1.0, 1.0, "good", "bad").passed
    assert Check(math.inf, 0.0, False, name="", compared="", seconds=0.0).to_json()["error"] is None


def test_a_difference_is_relative_and_sees_what_is_no_number():
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1e-6])}
    other = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([1e-6])}
    assert largest_difference(other, one).error == pytest.approx(0.1)
    assert largest_difference(other, one).name == "a"
    assert largest_difference({**one, "b": torch.tensor([math.nan])}, one).error == math.inf
    assert largest_difference({"a": one["a"]}, one).error == math.inf
    assert largest_difference({**one, "a": torch.zeros(3)}, one).error == math.inf


def test_a_budget_shrinks_with_the_unit_of_the_arithmetic():
    wide = {"a": torch.rand(1000, dtype=torch.float64)}
    narrow = {"a": wide["a"].float()}
    own = largest_difference(narrow, wide).error
    assert rounding_budget(narrow, wide, torch.float32) == pytest.approx(4 * own + 2**-23)
    assert rounding_budget(narrow, wide, torch.float64) == pytest.approx(
        rounding_budget(narrow, wide, torch.float32) * 2**-29
    )


def test_float64_is_not_rounded_inside_the_model(case):
    model = load_whole(case, torch.float64)
    seen = []
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(lambda norm, args, output: seen.append((args[0], output, norm)))
    result = row_losses(model, case.rows[:1], packed_losses)
    for hidden, output, norm in seen:
        exact = (
            hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon) * norm.weight
        )
        assert torch.allclose(output, exact, rtol=1e-14, atol=0)
    assert not torch.equal(result.losses, result.losses.float().double())
