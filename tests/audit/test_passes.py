"""Whole passes: float64 against a decoder written out here, shifts, planted faults, and differences of logits."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk import PackedLayout, RopewalkError
from ropewalk.audit.arithmetic import EXACT, stock_arithmetic
from ropewalk.audit.audited_model import AuditedModel
from ropewalk.audit.passes import Pass, Runner, exact_cos_sin, logit_difference, longest, shifted
from tests.audit.plain_llamas import LENGTH, UNIT, drift, row, tiny


@pytest.fixture(scope="module")
def llama():
    return AuditedModel.of(tiny())


def all_logits(runner, found, **options):
    return torch.cat(list(runner.logits(found, **options)))


def decoder(model, ids, positions):
    """A Llama in float64 by its definition: (attention [layers, heads, T, T], logits)."""
    weights = {name: p.detach().double().numpy() for name, p in model.state_dict().items()}
    config = model.config
    group = config.num_attention_heads // config.num_key_value_heads
    pairs = config.head_dim // 2
    angles = positions[:, None] * 1e4 ** (-np.arange(pairs) / pairs)

    def norm(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weights[name]

    def heads_of(x, name):
        return (x @ weights[name].T).reshape(len(x), -1, config.head_dim).swapaxes(0, 1)

    def turned(x):
        z = (x[..., :pairs] + 1j * x[..., pairs:]) * np.exp(1j * angles)
        return np.concatenate([z.real, z.imag], -1)

    x, attention = weights["model.embed_tokens.weight"][ids], []
    hidden_from_future = np.triu(np.full((len(ids), len(ids)), -np.inf), 1)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        y = norm(x, at + "input_layernorm.weight")
        q, k = (turned(heads_of(y, f"{at}self_attn.{n}_proj.weight")) for n in "qk")
        v = heads_of(y, at + "self_attn.v_proj.weight")
        k, v = k.repeat(group, 0), v.repeat(group, 0)
        s = q @ k.swapaxes(1, 2) / math.sqrt(config.head_dim) + hidden_from_future
        a = np.exp(s - s.max(-1, keepdims=True))
        a /= a.sum(-1, keepdims=True)
        attention.append(a)
        x = x + (a @ v).swapaxes(0, 1).reshape(len(x), -1) @ weights[at + "self_attn.o_proj.weight"].T
        y = norm(x, at + "post_attention_layernorm.weight")
        gate = y @ weights[at + "mlp.gate_proj.weight"].T
        up = y @ weights[at + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weights[at + "mlp.down_proj.weight"].T
    return np.stack(attention), norm(x, "model.norm.weight") @ weights["lm_head.weight"].T


@pytest.mark.parametrize("shift", [0, 1000])
def test_float64_is_the_decoder_written_out(llama, shift):
    ids, positions = row(), shifted(LENGTH, shift)
    runner = Runner(llama, longest([shift], LENGTH), block_bytes=5000)
    found = runner.run(ids, EXACT, positions)
    attention, logits = decoder(llama.model, ids.numpy(), positions.numpy())
    assert attention[..., 1:, 0].max() > 0.9
    # Angles are off by their position's rounding, and each layer adds some hundred roundings of sums.
    relative = (2**10 + shift) * UNIT * 2**4
    ours = all_logits(runner, found).numpy()
    np.testing.assert_allclose(ours, logits, rtol=0, atol=relative * np.abs(logits).max())
    received = attention.sum(2)
    np.testing.assert_allclose(found.received.numpy(), received, rtol=0, atol=relative * LENGTH)


def bfloat16_angles(rotary):
    """A forward that rounds angles as autocast once did."""

    def forward(x, position_ids):
        angles = (position_ids[..., None].float() * rotary.inv_freq).to(torch.bfloat16).float()
        both = torch.cat((angles, angles), dim=-1)
        return both.cos().to(x.dtype), both.sin().to(x.dtype)

    return forward


@pytest.mark.parametrize("plant", ["forward", "inv_freq"])
def test_wrong_angles_of_the_model_are_seen_with_its_angles_alone(plant):
    model = tiny()
    float32 = stock_arithmetic(torch.float32)
    runner = Runner(AuditedModel.of(model), 2000)
    sound, exact = (drift(runner, replace(float32, angles=angles), 0, 1000) for angles in ("model", "exact"))
    expected = all_logits(runner, runner.run(row(), EXACT, shifted(LENGTH, 1000)))

    def error():
        """Of the model's own angles, all else exact."""
        found = runner.run(row(), replace(EXACT, angles="model"), shifted(LENGTH, 1000))
        return float((all_logits(runner, found) - expected).abs().max())

    sound_error = error()
    rotary = model.model.rotary_emb
    if plant == "forward":
        rotary.forward = bfloat16_angles(rotary)
    else:
        rotary.inv_freq.data = rotary.inv_freq.to(torch.bfloat16).float()
    runner = Runner(AuditedModel.of(model), 2000)
    # Float32 holds 16 bits more than bfloat16.
    assert error() > 2**4 * sound_error
    again = drift(runner, replace(float32, angles="exact"), 0, 1000)
    assert again == exact
    if plant == "forward":
        # Rounded angles break relative positions; rounded frequencies are others, but relative all the same.
        assert drift(runner, float32, 0, 1000) > 100 * sound
    assert torch.equal(all_logits(runner, runner.run(row(), EXACT, shifted(LENGTH, 1000))), expected)


LENGTH_DEPENDENT = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 3.0, 9.0, 20.0],
        "original_max_position_embeddings": 64,
        "factor": 32.0,
    },
}


def length_dependent(name):
    longrope = {"max_position_embeddings": 2048} if name == "longrope" else {}
    return tiny(rope_parameters=LENGTH_DEPENDENT[name], **longrope)


@pytest.mark.parametrize("name", sorted(LENGTH_DEPENDENT))
def test_shifting_does_not_switch_the_frequencies_of_a_sequence(name):
    """A row within the original 64 tokens, and one far beyond them, take the frequencies of one long sequence."""
    audited_model = AuditedModel.of(length_dependent(name))
    assert audited_model.methods[None].length_dependent
    runner = Runner(audited_model, 1600)
    own = replace(EXACT, angles="model")
    # Float32 angles of up to 1600 rad are off by 2^-24 of that, 1e-4 rad; the factors differ by far more.
    assert drift(runner, EXACT, 0, 1500) < 1e-8
    pinned = drift(runner, own, 0, 1500)
    ids = row()
    other = Runner(audited_model, LENGTH)
    short = other.run(ids, EXACT, shifted(LENGTH, 0))
    long = runner.run(ids, EXACT, shifted(LENGTH, 0))
    # What tokens receive of all queries; a lower bound of what changes.
    switched = float((short.received - long.received).abs().sum()) / LENGTH
    assert pinned < switched / 100
    assert switched > 0.1


@pytest.mark.parametrize("name", sorted(LENGTH_DEPENDENT))
@pytest.mark.parametrize("lengths", [(1600, 200, 50, 1600, 100, 99, 1600), (50, 65, 64, 63)])
@pytest.mark.parametrize("ran", [0, 150])
def test_the_models_own_angles_are_those_of_the_sequence_whatever_ran_before(name, lengths, ran):
    audited_model = AuditedModel.of(length_dependent(name))
    positions = torch.tensor([0, 1, 7, 40])
    if ran:
        with torch.no_grad():
            audited_model.model(row(ran)[None], use_cache=False)
    for total in lengths:
        for found, expected in zip(
            audited_model.cos_sin(positions, torch.float64, None, total),
            exact_cos_sin(audited_model, positions, None, total),
            strict=True,
        ):
            # Angles of up to 40 rad, frequencies and factors in float32: a few roundings of each.
            torch.testing.assert_close(found, expected, rtol=0, atol=40 * 2**-21)


@pytest.mark.parametrize("name", sorted(LENGTH_DEPENDENT))
@pytest.mark.parametrize("angles", ["model", "exact"])
def test_a_long_pass_leaves_the_frequencies_of_the_model_as_they_were(name, angles):
    model = length_dependent(name)
    audited_model = AuditedModel.of(model)
    ids = row(60)
    with torch.no_grad():
        # Between the original length and the long one, where a module would keep what a longer one left.
        middle = torch.cat([ids, ids])[None]
        expected = model(middle, use_cache=False).logits
    rotary = model.model.rotary_emb

    def held():
        return {
            **{key: value.tolist() for key, value in rotary.named_buffers()},
            "scaling": float(rotary.attention_scaling),
            "cached": int(rotary.max_seq_len_cached),
        }

    before = held()
    Runner(audited_model, 1600).run(ids, replace(EXACT, angles=angles), shifted(60, 1500))
    after = held()
    with torch.no_grad():
        assert torch.equal(model(middle, use_cache=False).logits, expected)
    assert after == before


@dataclass(frozen=True, eq=False)
class SmallChunks(Runner):
    """Logits a few rows, and a few columns of the head, at a time."""

    def logits(self, found, chunk_bytes=1000):
        return super().logits(found, chunk_bytes)


HEADS = {
    "llama": ("LlamaConfig", {}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 8, "final_logit_softcapping": 2.0}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
    "cohere": ("CohereConfig", {"logit_scale": 0.25}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4}),
}


def dense_logits(model, hidden):
    """From the config's own words, in float64."""
    config, head = model.config, model.get_output_embeddings()
    logits = hidden.double() @ head.weight.detach().double().T
    if head.bias is not None:
        logits = logits + head.bias.detach().double()
    logits = logits * getattr(config, "logit_scale", 1.0) / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


@pytest.fixture(scope="module", params=sorted(HEADS))
def headed(request):
    name, more = HEADS[request.param]
    # A vocabulary of more columns than a chunk has, and no multiple of it.
    model = tiny(name, vocab_size=251, **more)
    if model.get_output_embeddings().bias is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    return AuditedModel.of(model)


def test_logits_are_the_models_own_head_on_its_hidden_states(headed):
    model, ids = headed.model, row()
    runner = SmallChunks(headed, LENGTH)
    found = runner.run(ids, EXACT, shifted(LENGTH, 0))
    chunks = list(runner.logits(found))
    assert len(chunks) == LENGTH
    logits = torch.cat(chunks)
    expected = dense_logits(model, found.hidden)
    # Sums of 32 products.
    torch.testing.assert_close(logits, expected, rtol=0, atol=64 * UNIT * float(expected.abs().max()))
    with torch.no_grad():
        own = model(ids[None], use_cache=False).logits[0].double()
    assert (own - logits).abs().max() <= 2**-16 * own.abs().max()


@pytest.mark.parametrize("arithmetic", [EXACT, stock_arithmetic(torch.bfloat16)])
def test_the_difference_of_logits_is_the_dense_one(headed, arithmetic):
    runner = SmallChunks(headed, 200)
    reference = runner.run(row(), EXACT, shifted(LENGTH, 0))
    moved = runner.run(row(), arithmetic, torch.cat([shifted(1, 0), shifted(LENGTH - 1, 120)]))
    found = logit_difference(runner, reference, moved)
    p, q = (all_logits(Runner(headed, 200), one).numpy() for one in (reference, moved))
    rms = math.sqrt(((p - q) ** 2).mean())
    log_p, log_q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    # Chunks of another shape: sums in another order, then roundings to the pass's own dtype.
    rounding = 0.0 if arithmetic.rest == torch.float64 else 2.0**-8
    assert rms > 1e-3
    assert found.rms == pytest.approx(rms, rel=rounding + 2**10 * UNIT)
    assert found.kl == pytest.approx(kl, rel=2 * rounding + 2**20 * UNIT)
    assert found.kl > 0


@given(
    seed=st.integers(0, 10**6),
    length=st.integers(1, 30),
    chunk_bytes=st.sampled_from([1, 1000, 10**5, 2**26]),
)
@settings(max_examples=40)
def test_chunks_of_any_size_give_the_same_logits(seed, length, chunk_bytes):
    audited_model = chunked_model()
    hidden = torch.randn(length, 32, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    empty = torch.zeros(0)
    found = Pass(empty, empty, empty, empty, hidden, EXACT)
    runner = Runner(audited_model, 64)
    logits = all_logits(runner, found, chunk_bytes=chunk_bytes)
    expected = dense_logits(audited_model.model, hidden)
    torch.testing.assert_close(logits, expected, rtol=0, atol=64 * UNIT * float(expected.abs().max() + 1))
    sizes = [len(chunk) * 97 * 8 for chunk in runner.logits(found, chunk_bytes)]
    assert all(size <= max(chunk_bytes, 97 * 8) for size in sizes)


_CHUNKED = []


def chunked_model():
    if not _CHUNKED:
        _CHUNKED.append(AuditedModel.of(tiny()))
    return _CHUNKED[0]


def test_a_layout_gives_each_document_what_it_has_alone(llama):
    layout = PackedLayout.from_lengths([20, 28], "intra_document", 0)
    runner = Runner(llama, LENGTH)
    ids = row()
    packed = all_logits(runner, runner.run(ids, EXACT, shifted(LENGTH, 0), layout))
    for start, end in ((0, 20), (20, LENGTH)):
        alone = runner.run(ids[start:end], EXACT, torch.arange(start, end))
        expected = all_logits(runner, alone)
        atol = 2**10 * UNIT * float(expected.abs().max())
        torch.testing.assert_close(packed[start:end], expected, rtol=0, atol=atol)
    full = all_logits(runner, runner.run(ids, EXACT, shifted(LENGTH, 0)))
    assert (full - packed)[20:].abs().max() > 0.1


def test_what_is_not_kept_is_not_held(llama):
    runner = Runner(llama, LENGTH)
    found = runner.run(row(), EXACT, shifted(LENGTH, 0), keep=())
    assert found.hidden.untyped_storage().nbytes() == 0
    assert list(runner.run(row(), EXACT, shifted(LENGTH, 0)).hidden.shape) == [LENGTH, 32]


@pytest.mark.parametrize(
    ("ids", "positions", "message"),
    [
        (torch.zeros(5, dtype=torch.int64), torch.arange(4), r"got shapes \(5,\) and \(4,\)"),
        (torch.zeros(1, 5, dtype=torch.int64), torch.arange(5)[None], "must be 1-dimensional, equally long"),
        (
            torch.zeros(5, dtype=torch.int64),
            torch.arange(60, 65),
            "positions must lie between 0 and 63, got positions from 60 to 64",
        ),
        (
            torch.zeros(5, dtype=torch.int64),
            torch.arange(-1, 4),
            "positions must lie between 0 and 63, got positions from -1 to 3",
        ),
    ],
)
def test_rows_and_positions_that_do_not_fit_are_refused(llama, ids, positions, message):
    with pytest.raises(RopewalkError, match=message):
        Runner(llama, 64).run(ids, EXACT, positions)


def test_an_empty_row_is_refused(llama):
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(RopewalkError):
        Runner(llama, 64).run(nothing, EXACT, nothing)


@pytest.mark.parametrize(("shifts", "length", "expected"), [([0], 5, 5), ([16, 3], 10, 26)])
def test_the_longest_sequence_ends_with_the_furthest_row(shifts, length, expected):
    assert longest(shifts, length) == expected
    assert shifted(length, max(shifts))[-1] == expected - 1
