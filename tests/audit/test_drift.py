"""Drift: its definition, what it must find and what it must not."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from ropewalk import RopewalkError
from ropewalk.audit import AuditedModel, Runner, Series
from ropewalk.audit.drift import SHIFTS_AT_ONCE, cut_lengths
from tests.audit.audit_cases import (
    FAR,
    FLOAT64_FLOOR,
    LENGTH,
    LOW,
    STORIES,
    dense_attention,
    dense_received,
    drift_of_model,
    sharp_llama,
    stories,
    token_rows,
)


def drift_of(found, dtype, delta1, angles="model"):
    (one,) = [d for d in found.drift if (d.dtype, d.delta1, d.angles) == (dtype, delta1, angles)]
    return one


# The definition


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_D_is_that_of_transformers_own_attention_weights(dtype):
    """Equation 4, written out over output_attentions of eager attention, which rounds at the same places."""
    model = sharp_llama()
    rows = token_rows(2, LENGTH)
    found = drift_of_model(AuditedModel.of(model), rows, [Series(dtype)], [0, 1000])
    # from_pretrained keeps inv_freq in float32 whatever the dtype is, and .to() does not.
    inv_freq = model.model.rotary_emb.inv_freq.clone()
    model.to(getattr(torch, dtype))
    model.model.rotary_emb.inv_freq = inv_freq
    for delta1 in (0, 1000):
        samples, moved = [], []
        for row in rows:
            change = (dense_attention(model, row, delta1) - dense_attention(model, row, 16)).numpy()
            layers, heads, length, _ = change.shape
            samples.append(
                sum(
                    abs(change[layer, head, j:, j]).sum() / (length - j)
                    for layer in range(layers)
                    for head in range(heads)
                    for j in range(length)
                )
            )
            moved.append(abs(change).sum(-1).mean() / 2)
        measured = drift_of(found, dtype, delta1)
        # Matrix products may add in another order: one value in many is rounded the other way.
        assert pytest.approx(np.mean(samples), rel=0.05) == measured.D
        assert list(measured.per_sample) == pytest.approx(samples, rel=0.08)
        assert measured.moved == pytest.approx(np.mean(moved), rel=0.08)


def test_no_shift_is_no_difference_to_the_last_bit(audited_model, rows):
    found = drift_of_model(
        audited_model, rows, [Series("bfloat16"), Series("float16"), Series("float32")], [16, 0]
    )
    for dtype in ("bfloat16", "float16", "float32"):
        assert drift_of(found, dtype, 16).D == 0.0
        assert drift_of(found, dtype, 0).D > 0
    # Nor because one pass stands for both: another run of the same pass is the same.
    runner = Runner(audited_model, LENGTH)
    first, second = (runner.run(rows[0], LOW, torch.arange(LENGTH)) for _ in range(2))
    assert torch.equal(first.received, second.received)
    assert torch.equal(first.hidden, second.hidden)


def test_float64_does_not_drift(audited_model, rows):
    found = drift_of_model(audited_model, rows, [Series("float64")], [0, 1000, FAR])
    assert all(0 < drift.D < FLOAT64_FLOOR for drift in found.drift)


def test_exact_angles_keep_float32_from_drifting_further_with_distance(audited_model, rows):
    found = drift_of_model(audited_model, rows, [Series("float32"), Series("float32", "exact")], [0, FAR])
    near, far = (drift_of(found, "float32", shift, "exact").D for shift in (0, FAR))
    assert near / 2 < far < 2 * near
    # The mutation: transformers' own angles, in float32.
    assert drift_of(found, "float32", FAR).D > 100 * drift_of(found, "float32", 0).D


def test_shares_and_parts_add_up(audited_model, rows):
    found = drift_of_model(audited_model, rows, [Series("bfloat16")], [0])
    (one,) = found.drift
    assert sum(found.per_token) == pytest.approx(one.D, rel=1e-12)
    assert 0 < one.first_token_share < 1
    assert np.mean(one.per_sample) == pytest.approx(one.D)
    assert one.ci95[0] <= one.D <= one.ci95[1]
    heads = np.array(found.heads)
    assert heads.shape == (2, 4)
    assert heads.sum() == pytest.approx(one.D, rel=1e-12)


def test_differences_by_length_are_those_of_shorter_rows(audited_model, rows):
    whole = drift_of_model(audited_model, rows, [Series("float32")], [0])
    assert [point.length for point in whole.lengths] == [32, 64]
    short = drift_of_model(audited_model, [row[:32] for row in rows], [Series("float32")], [0])
    cut, alone = whole.lengths[0], short.lengths[-1]
    # The same sums in blocks of other sizes: float32 scores of ten, rounded by 6e-8, 32 queries.
    assert pytest.approx(alone.D, rel=0.2, abs=1e-4) == cut.D
    assert cut.D_logit == pytest.approx(alone.D_logit, rel=0.2, abs=1e-4)


def first_token_scores(model, row, shift):
    """float64 ``[layers, heads, length]``: each query's score of the first token, from the projections' outputs."""
    config, seen = model.config, []

    def keep(attention, arguments, named):
        hidden = named.get("hidden_states", arguments[0] if arguments else None)
        heads = (len(row), -1, config.hidden_size // config.num_attention_heads)
        q, k = (of(hidden)[0].view(heads).double() for of in (attention.q_proj, attention.k_proj))
        cos, sin = (each[0, :, None].double() for each in named["position_embeddings"])
        half = q.shape[-1] // 2
        q, k = (x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin for x in (q, k))
        first = k[0].repeat_interleave(config.num_attention_heads // config.num_key_value_heads, dim=0)
        seen.append((q * first).sum(-1).T / q.shape[-1] ** 0.5)

    hooks = [
        layer.self_attn.register_forward_pre_hook(keep, with_kwargs=True) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(row[None], position_ids=torch.arange(shift, shift + len(row))[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen)


def test_D_logit_is_equation_5_summed_over_layers_and_heads_and_divided_by_the_length(rows):
    """At a million the angles' error in float32 is hundreds of times the rest of the rounding (see above)."""
    model = sharp_llama(num_hidden_layers=3)
    found = drift_of_model(AuditedModel.of(model), rows, [Series("float32")], [FAR], delta2=16)
    changes = [
        (first_token_scores(model, row, FAR) - first_token_scores(model, row, 16)).abs() for row in rows
    ]
    for point in found.lengths:
        expected = np.mean([float(change[..., : point.length].sum()) / point.length for change in changes])
        assert point.D_logit == pytest.approx(expected, rel=0.01)
        assert point.mean_logit_difference == pytest.approx(expected / (3 * 4), rel=0.01)


def test_sweep_is_symmetric_and_agrees_with_the_drift(audited_model, rows):
    found = drift_of_model(audited_model, rows, [Series("bfloat16")], [0, 100, 1000], delta2=16)
    sweep = {(point.delta1, point.delta2): point.D for point in found.sweep}
    assert set(sweep) == {(a, b) for a in (0, 16, 100, 1000) for b in (0, 16, 100, 1000) if a != b}
    for (a, b), D in sweep.items():
        assert sweep[b, a] == pytest.approx(D, rel=1e-12)
        assert D > 0
    assert sweep[100, 16] == pytest.approx(drift_of(found, "bfloat16", 100).D, rel=1e-12)
    against_1000 = drift_of_model(audited_model, rows, [Series("bfloat16")], [0, 100], delta2=1000)
    for shift in (0, 100):
        assert sweep[shift, 1000] == pytest.approx(drift_of(against_1000, "bfloat16", shift).D, rel=1e-12)


def test_shifts_measured_together_drift_as_each_alone(audited_model, rows):
    """With delta2 among them, the sweep's rows and others, and more shifts than are held at once."""
    shifts = [0, 3, 16, 50, 100, 1000]
    assert len(shifts) > SHIFTS_AT_ONCE
    series = [Series("bfloat16"), Series("float32")]
    together = drift_of_model(audited_model, rows, series, shifts)
    for shift in shifts:
        alone = drift_of_model(audited_model, rows, series, [shift])
        for one in series:
            a, b = drift_of(together, one.dtype, shift), drift_of(alone, one.dtype, shift)
            assert a.per_sample == pytest.approx(b.per_sample, rel=1e-12)
            assert a.moved == pytest.approx(b.moved, rel=1e-12)
            assert a.first_token_share == pytest.approx(b.first_token_share, rel=1e-9, nan_ok=True)
        if shift == shifts[0]:
            assert together.per_token == pytest.approx(alone.per_token, rel=1e-12)
            for a, b in zip(together.lengths, alone.lengths, strict=True):
                assert a == replace(b, D=pytest.approx(b.D, rel=1e-12))


@pytest.mark.parametrize(
    ("length", "expected"), [(2, (2,)), (32, (32,)), (33, (32, 33)), (512, (32, 64, 128, 256, 512))]
)
def test_lengths_are_powers_of_two_and_the_whole(length, expected):
    assert cut_lengths(length) == expected


def test_the_sink_is_found_where_it_is():
    model = sharp_llama()
    rows = token_rows(2, LENGTH)
    # A key that every query likes: the bias of one token's embedding along a direction that all queries share.
    found = drift_of_model(AuditedModel.of(model), rows, [Series("float32", "exact")], [0])
    by_hand = []
    for row in rows:
        received = dense_received(model, row, 16).mean((0, 1)) / (LENGTH - torch.arange(LENGTH))
        by_hand.append(int(received[: LENGTH // 2].argmax()))
    assert found.sink.index in by_hand
    assert found.sink.attention >= found.sink.first_attention > 0
    assert found.sink.even_attention == pytest.approx(sum(1 / n for n in range(1, LENGTH + 1)) / LENGTH)


def test_overflow_is_not_a_number_and_no_zero():
    model = sharp_llama()
    model.model.layers[0].mlp.down_proj.weight.data *= 1e7
    rows = token_rows(1, LENGTH)
    found = drift_of_model(AuditedModel.of(model), rows, [Series("float16"), Series("float32")], [0])
    assert math.isnan(drift_of(found, "float16", 0).D)
    assert math.isfinite(drift_of(found, "float32", 0).D)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (([], [Series("float32")], [0]), "at least one row"),
        (
            ([torch.zeros(8, dtype=torch.long), torch.zeros(9, dtype=torch.long)], [Series("float32")], [0]),
            "8 to 9",
        ),
        (([torch.zeros(8, dtype=torch.long)], [], [0]), "an audit needs at least one dtype"),
        (([torch.zeros(8, dtype=torch.long)], [Series("float32")], []), "at least one shift"),
        (([torch.zeros(8, dtype=torch.long)], [Series("float32")], [-1]), "got -1"),
        (([torch.zeros(8, dtype=torch.long)], [Series("float32")], [2**40 + 1]), "0 to 1099511627776 tokens"),
        (([torch.zeros(8, dtype=torch.long)], [Series("float32")], [3, 3]), "only once"),
    ],
)
def test_what_cannot_be_measured_is_refused(audited_model, arguments, said):
    with pytest.raises(RopewalkError, match=said):
        drift_of_model(audited_model, *arguments)


def test_rows_that_are_not_the_same_elsewhere_are_refused():
    """LongRoPE's start tokens keep their angles: the first tokens of a row that is moved are no longer those."""
    from ropewalk.models.rope.rotary import rotary_module
    from ropewalk.rope import LongRope, RotaryEmbedding

    model = sharp_llama()
    parent, attribute, _ = rotary_module(model)
    method = LongRope(8, 1e4, (1.0,) * 4, (2.0,) * 4, 1.0, 64, start_tokens=4)
    setattr(parent, attribute, RotaryEmbedding(method))
    with pytest.raises(RopewalkError, match="LlamaForCausalLM runs with start tokens"):
        AuditedModel.of(model)


@pytest.fixture
def matmul_settings():
    """Both of torch's ways to allow coarser float32 products, as they were afterwards."""
    before = torch.get_float32_matmul_precision()
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    held = [backend.fp32_precision for backend in backends]
    yield backends
    for backend, precision in zip(backends, held, strict=True):
        backend.fp32_precision = precision
    torch.set_float32_matmul_precision(before)


def test_an_allowed_bfloat16_product_changes_nothing(audited_model, rows, matmul_settings):
    before = drift_of_model(audited_model, rows[:1], [Series("float32", "exact")], [0]).drift
    torch.set_float32_matmul_precision("medium")
    after = drift_of_model(audited_model, rows[:1], [Series("float32", "exact")], [0]).drift
    assert before[0].D == after[0].D
    assert torch.get_float32_matmul_precision() == "medium"


def test_one_allowed_for_a_backend_alone_changes_nothing(audited_model, rows, matmul_settings):
    before = drift_of_model(audited_model, rows[:1], [Series("float32", "exact")], [0]).drift[0].D
    for backend, coarse in zip(matmul_settings, ("tf32", "bf16"), strict=True):
        backend.fp32_precision = coarse
    after = drift_of_model(audited_model, rows[:1], [Series("float32", "exact")], [0]).drift[0].D
    assert before == after
    assert [backend.fp32_precision for backend in matmul_settings] == ["tf32", "bf16"]


def test_an_unknown_dtype_is_refused():
    with pytest.raises(RopewalkError, match="'int8'"):
        Series("int8")


# A real checkpoint

TABLE = {
    # D of stored stories against a shift of 16, measured with transformers' output_attentions on 8 rows of 512.
    ("bfloat16", 0, "model"): 10.2,
    ("bfloat16", 1000, "model"): 9.5,
    ("bfloat16", 100_000, "model"): 9.5,
    ("bfloat16", FAR, "model"): 9.7,
    ("float32", 0, "model"): 0.00067,
    ("float32", 1000, "model"): 0.0015,
    ("float32", 100_000, "model"): 0.101,
    ("float32", FAR, "model"): 0.719,
    ("float32", 0, "exact"): 0.00026,
    ("float32", 1000, "exact"): 0.00024,
    ("float32", FAR, "exact"): 0.00024,
}


@pytest.fixture(scope="module")
def trained():
    model, rows = stories()
    series = [Series("bfloat16"), Series("float32"), Series("float32", "exact")]
    return drift_of_model(AuditedModel.of(model), rows, series, [0, 1000, 100_000, FAR])


@pytest.mark.slow
def test_a_trained_checkpoint_drifts_as_published_for_it(trained):
    found = trained
    for (dtype, shift, angles), D in TABLE.items():
        measured = drift_of(found, dtype, shift, angles)
        # Two standard errors of these rows and of the table's, and its last digit.
        sampling = 2 * 2**0.5 * np.std(measured.per_sample) / len(measured.per_sample) ** 0.5
        assert pytest.approx(D, abs=sampling + 0.5 * 10 ** (np.floor(np.log10(D)) - 1)) == measured.D, (
            dtype,
            shift,
            angles,
        )
    near, far = (drift_of(found, "float32", shift, "exact").D for shift in (0, FAR))
    assert far < 2 * near
    assert drift_of(found, "float32", FAR).D > 500 * drift_of(found, "float32", 0).D
    # It has hardly a sink: the first token gets no more than it would of even attention, and carries no drift.
    assert found.sink.first_attention < found.sink.even_attention
    assert drift_of(found, "bfloat16", 0).first_token_share < 0.01


@pytest.mark.slow
def test_a_random_control_of_it_drifts_a_thousand_times_less(trained):
    model, rows = stories()
    torch.manual_seed(0)
    control = transformers.AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").eval()
    assert STORIES.is_dir()
    random = drift_of_model(AuditedModel.of(control), rows[:4], [Series("bfloat16")], [0]).drift[0].D
    # The table has 0.0092 and 10.9 for other rows.
    assert 0.0085 < random < 0.0105
    assert 900 < np.mean(drift_of(trained, "bfloat16", 0).per_sample[:4]) / random < 1300
