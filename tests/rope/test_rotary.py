"""The rotary module: exact against extended precision, equal to transformers' where that is exact, robust."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import Cohere2Config, Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.models.cohere2.modeling_cohere2 import Cohere2RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from ropewalk.errors import RopewalkError
from ropewalk.rope import (
    Default,
    DynamicNtk,
    Linear,
    LongRope,
    RopeMethod,
    RotaryEmbedding,
    Yarn,
    config_entries,
    unscaled_inv_freq,
)
from tests.rope.rope_cases import examples, methods

X = torch.empty(0)
HEADS: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4}
LONGROPE = LongRope(
    16, 10000.0, tuple(1 + i / 8 for i in range(8)), tuple(2.0 + i for i in range(8)), 1.19, 64
)
# cos and sin are at most 1, so rounding to float32 errs by at most half a unit in the last place there.
HALF_ULP = 2**-25


def positions(*values: int) -> Tensor:
    return torch.tensor([values])


def float32_error(actual: Tensor, expected: Any) -> float:
    return float(np.abs(actual.numpy().astype(np.longdouble) - expected).max())


@examples
@given(methods, st.lists(st.integers(0, 4_000_000), min_size=1, max_size=8))
def test_angles_are_exact_to_float32_rounding(method: RopeMethod, at: list[int]) -> None:
    rotary = RotaryEmbedding(method).eval()
    cos, sin = rotary(X, positions(*at))
    inv_freq, attention_factor = method.frequencies(max(at) + 1)
    angles = np.asarray(at, dtype=np.longdouble)[:, None] * inv_freq.numpy().astype(np.longdouble)
    angles = np.concatenate((angles, angles), axis=-1)
    # The angle is one float64 product, so it errs by 2^-53 of itself: 4e6 / 2^53 = 4e-10 at most.
    budget = max(attention_factor, 1) * 2 * HALF_ULP + 4e6 * 2**-53 * attention_factor
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == (1, len(at), method.rotary_dim)
    assert float32_error(cos[0], np.cos(angles) * attention_factor) <= budget
    assert float32_error(sin[0], np.sin(angles) * attention_factor) <= budget


def test_default_angles_are_exact_from_the_definition() -> None:
    at = [0, 1, 1000, 100_003, 1_000_003, 16_000_001]
    cos, sin = RotaryEmbedding(Default(128, 500000.0))(X, positions(*at))
    exponents = -np.arange(0, 128, 2, dtype=np.longdouble) / 128
    angles = np.asarray(at, dtype=np.longdouble)[:, None] * np.longdouble(500000.0) ** exponents
    # inv_freq errs by ln(5e5)·2^-54 + 2^-52 of itself (9.5e-16), and pairs turn by at most 1 rad a token.
    budget = HALF_ULP + max(at) * 1e-15
    assert float32_error(cos[0, :, :64], np.cos(angles)) <= budget
    assert float32_error(sin[0, :, 64:], np.sin(angles)) <= budget


def test_float32_angles_would_fail_the_exactness_test() -> None:
    at = 1_000_003
    inv_freq = unscaled_inv_freq(128, 500000.0)
    exact = (at * inv_freq).cos()
    rounded = (at * inv_freq.float()).cos().double()
    assert float((exact - rounded).abs().max()) > 1e-3


def assert_equal_to_transformers(
    ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], longest: int
) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        # Their float32 frequencies err by at most 1e-6 relative and pairs turn by at most 1 rad a token; the
        # rest is the rounding of the angle and of the result.
        torch.testing.assert_close(mine, other, rtol=0, atol=longest * (1e-6 + 2**-24) + 2**-23)


AT = torch.arange(48)[None]


def test_equals_llama() -> None:
    method = Yarn(16, 10000.0, 4.0, 512)
    config = LlamaConfig(**HEADS, max_position_embeddings=2048, **config_entries(method, 16))
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), AT)
    assert_equal_to_transformers(RotaryEmbedding(method)(X, AT), theirs, 48)


def test_equals_gemma_3_in_each_layer_type() -> None:
    by_layer = {"full_attention": Linear(16, 1e6, 8.0), "sliding_attention": Default(16, 1e4)}
    config = Gemma3TextConfig(**HEADS, head_dim=16, **config_entries(by_layer, 16))
    theirs, ours = Gemma3RotaryEmbedding(config), RotaryEmbedding(by_layer)
    for layer_type in by_layer:
        assert_equal_to_transformers(ours(X, AT, layer_type), theirs(torch.zeros(1), AT, layer_type), 48)
    with pytest.raises(
        RopewalkError, match="layer type None; pass layer_type, one of full_attention, sliding"
    ):
        ours(X, AT)


def test_equals_cohere_2_which_interleaves() -> None:
    method = Default(16, 50000.0)
    theirs = Cohere2RotaryEmbedding(Cohere2Config(**HEADS, **config_entries(method, 16)))(torch.zeros(1), AT)
    assert_equal_to_transformers(RotaryEmbedding(method, style="interleaved")(X, AT), theirs, 48)
    with pytest.raises(AssertionError):
        assert_equal_to_transformers(RotaryEmbedding(method)(X, AT), theirs, 48)


@pytest.mark.parametrize("length", [63, 64, 65, 200])
def test_equals_phi_3_below_and_above_the_original_length(length: int) -> None:
    config = Phi3Config(**HEADS, max_position_embeddings=1024, **config_entries(LONGROPE, 16))
    at = torch.arange(length)[None]
    theirs = Phi3RotaryEmbedding(config)(torch.zeros(1), at)
    assert_equal_to_transformers(RotaryEmbedding(LONGROPE)(X, at), theirs, length)


def test_longrope_chooses_by_the_total_length() -> None:
    rotary = RotaryEmbedding(LONGROPE)
    short = (AT[0, :, None] * LONGROPE.frequencies(64).inv_freq).cos() * 1.19
    long = (AT[0, :, None] * LONGROPE.frequencies(65).inv_freq).cos() * 1.19

    def cosines(*at: int) -> Tensor:
        cos: Tensor = rotary(X, positions(*at))[0]
        return cos[0, :48, :8]

    assert torch.equal(cosines(*range(64)), short.float())
    assert torch.equal(cosines(*range(65)), long.float())
    with rotary.pinned(65):
        assert torch.equal(cosines(*range(48)), long.float())
        with rotary.pinned(64):
            assert torch.equal(cosines(*range(48)), short.float())
        assert torch.equal(rotary.frequencies().inv_freq, LONGROPE.frequencies(65).inv_freq)
    assert torch.equal(cosines(*range(48)), short.float())
    with pytest.raises(KeyError), rotary.pinned(65):
        raise KeyError
    assert rotary.total_length is None
    with pytest.raises(RopewalkError, match="at least 1 token, got 0"), rotary.pinned(0):
        pass


def test_start_tokens_keep_unscaled_angles_by_position_not_by_place() -> None:
    with_start = LongRope(16, 10000.0, LONGROPE.short_factor, LONGROPE.long_factor, 1.19, 64, start_tokens=4)
    at = positions(100, 3, 4, 0, 3)
    cos, sin = RotaryEmbedding(with_start)(X, at)
    unscaled = RotaryEmbedding(Default(16, 10000.0))(X, at)
    scaled = RotaryEmbedding(LONGROPE)(X, at)
    keeps = (at[0] < 4).tolist()
    assert keeps == [False, True, False, True, True]
    for place, keep in enumerate(keeps):
        for ours, plain, rescaled in zip((cos, sin), unscaled, scaled, strict=True):
            # The attention factor applies everywhere; scaling after the float32 rounding errs by 2^-23.
            expected = plain[0, place] * 1.19 if keep else rescaled[0, place]
            torch.testing.assert_close(ours[0, place], expected, rtol=0, atol=2**-23)
    assert not torch.equal(cos[0, 1], scaled[0][0, 1])


def test_dynamic_ntk_runs_in_inference_and_refuses_training() -> None:
    method = DynamicNtk(16, 10000.0, 2.0, 32)
    rotary = RotaryEmbedding(method)
    with pytest.raises(RopewalkError, match="method 'dynamic' is for inference only"):
        rotary(X, AT)
    with torch.no_grad():
        rotary(X, AT)
    cos, _ = rotary.eval()(X, AT)
    angles = AT[0, :, None] * method.frequencies(48).inv_freq
    assert torch.equal(cos[0, :, :8], angles.cos().float())
    cos, _ = rotary(X, AT[:, :8])
    assert torch.equal(cos[0, :, :8], (AT[0, :8, None] * unscaled_inv_freq(16, 10000.0)).cos().float())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary_emb = RotaryEmbedding(Yarn(16, 10000.0, 4.0, 512))
        self.layer = nn.Linear(2, 2)


FAR = positions(0, 1, 500_000)


@pytest.mark.parametrize(
    "treat",
    [
        lambda model: model.to(torch.bfloat16),
        lambda model: model.half().double().bfloat16(),
        lambda model: model.to("meta").to_empty(device="cpu"),
        copy.deepcopy,
        lambda model: model.requires_grad_(False).eval(),
    ],
    ids=["bfloat16", "half", "to_empty", "deepcopy", "eval"],
)
@pytest.mark.parametrize("used", [False, True])
def test_frequencies_survive_what_is_done_to_models(treat: Any, used: bool) -> None:
    before = Model().rotary_emb(X, FAR)
    model = Model()
    if used:
        model.rotary_emb(X, FAR)
    after = treat(model).rotary_emb(X.to(torch.bfloat16), FAR)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_model_made_on_the_meta_device_has_the_same_frequencies() -> None:
    with torch.device("meta"):
        model = Model()
    after = model.to_empty(device="cpu").rotary_emb(X, FAR)
    assert all(torch.equal(a, b) for a, b in zip(Model().rotary_emb(X, FAR), after, strict=True))


def test_module_holds_no_tensors_that_others_could_touch() -> None:
    model = Model()
    model.rotary_emb(X, FAR)
    assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
    assert not list(model.rotary_emb.parameters())
    assert not list(model.rotary_emb.buffers())
    file = io.BytesIO()
    torch.save(model.rotary_emb, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(X, FAR)[0], model.rotary_emb(X, FAR)[0])


def test_autocast_inference_mode_and_gradients_change_nothing() -> None:
    rotary = Model().rotary_emb
    with torch.inference_mode():
        rotary(X, FAR)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cos, sin = rotary(X, FAR)
    assert cos.dtype == torch.float32
    assert not cos.requires_grad
    expected = Model().rotary_emb(X, FAR)
    assert torch.equal(cos, expected[0])
    assert torch.equal(sin, expected[1])
    # What inference mode left in the cache must not stop a backward pass.
    weight = torch.ones(16, requires_grad=True)
    (weight * cos).sum().backward()
    assert torch.equal(weight.grad, cos.sum((0, 1)))


def test_fixed_methods_never_read_values_from_the_device() -> None:
    # A meta tensor has no values: anything that waits for them raises.
    at = torch.zeros(1, 4, dtype=torch.int64, device="meta")
    cos, _ = RotaryEmbedding(Yarn(16, 10000.0, 4.0, 512))(torch.empty(0, device="meta"), at)
    assert cos.shape == (1, 4, 16)
    rotary = RotaryEmbedding(LONGROPE)
    with rotary.pinned(128):
        rotary(torch.empty(0, device="meta"), at)
    with pytest.raises(RuntimeError, match="meta"):
        rotary(torch.empty(0, device="meta"), at)


def test_the_cache_holds_one_entry_a_device() -> None:
    rotary = RotaryEmbedding(DynamicNtk(16, 10000.0, 2.0, 32)).eval()
    for length in range(1, 100):
        rotary(X, torch.arange(length)[None])
    assert len(rotary._cache) == 1


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(
        RopewalkError,
        match="unknown rotary style 'quarters'; choose one of halves, interleaved, pairs, complex",
    ):
        RotaryEmbedding(Default(8, 1e4), style="quarters")  # type: ignore[arg-type]
    with pytest.raises(RopewalkError, match="at least one RoPE method"):
        RotaryEmbedding({})
    assert "rope_theta=10000.0" in repr(RotaryEmbedding(Default(8, 1e4)))
    assert "style=halves" in repr(RotaryEmbedding(Default(8, 1e4)))
