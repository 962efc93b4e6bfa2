"""The CUDA engines on the device ``meta``: a stray CPU tensor, or a number that the host waits for, raises there.

Nothing is computed, so these are tests of devices, shapes and dtypes alone; on a GPU the same code runs kernels.
"""

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

from ropewalk import PackedLayout, attend
from ropewalk.attention.choices import PATTERNS
from ropewalk.attention.engines import capabilities, flex
from ropewalk.attention.options import AttentionOptions
from tests.marks import slow_after
from tests.meta_cases import META, OneDevice


@pytest.fixture
def one_device():
    """Not for flex, which is an operator of higher order here, over aten's own."""
    with OneDevice() as mode:
        yield mode


def rows(pattern, positions="continuous"):
    """Two rows of 40 tokens of a pattern, the second one interleaved; and a full one beside them."""
    return (
        PackedLayout.from_lengths([12, 1, 25], pattern, 2, positions),
        PackedLayout.from_segments([12, 8, 5, 13], [0, 1, 0, 1], pattern, 2, positions),
        PackedLayout.from_lengths([38], "full", 2, positions),
    )


def meta_qkv(batch, dtype=torch.bfloat16, heads=4, kv_heads=2, head_dim=32, length=40):
    # As projections leave them: heads of one token side by side.
    shapes = [(batch, length, n, head_dim) for n in (heads, kv_heads, kv_heads)]
    return [torch.empty(shape, dtype=dtype, device=META).transpose(1, 2).requires_grad_() for shape in shapes]


def assert_gradients_fit(output, inputs):
    query, value = inputs[0], inputs[2]
    assert output.shape == (*query.shape[:3], value.shape[3])
    assert (output.dtype, output.device) == (query.dtype, META)
    for gradient, given in zip(
        torch.autograd.grad(output, inputs, torch.empty_like(output)), inputs, strict=True
    ):
        assert (gradient.shape, gradient.dtype, gradient.device) == (given.shape, given.dtype, META)


@pytest.fixture
def flex_on_meta(monkeypatch):
    """FlexAttention uncompiled, with its backward; it knows no device ``meta``, and needs to know none."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(flex, "_kernel", lambda device: torch_flex.flex_attention)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "batch", [slice(0, 1), slice(1, 2), slice(0, 3)], ids=["plain", "interleaved", "all"]
)
def test_varlen_never_leaves_the_device(one_device, pattern, batch):
    layouts = rows(pattern)[batch]
    for dtype, heads in ((torch.bfloat16, (4, 2)), (torch.float16, (3, 3))):
        inputs = meta_qkv(len(layouts), dtype, *heads)
        for engine in ("varlen", "auto"):
            assert_gradients_fit(attend(*inputs, layouts, engine), inputs)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize(
    "batch", slow_after(1, [slice(0, 1), slice(1, 2), slice(0, 3)]), ids=["plain", "interleaved", "all"]
)
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_flex_never_leaves_the_device(flex_on_meta, pattern, batch, softcap):
    layouts = rows(pattern)[batch]
    inputs = meta_qkv(len(layouts), torch.float32)
    for engine in ("flex", "auto"):
        assert_gradients_fit(attend(*inputs, layouts, engine, AttentionOptions(softcap=softcap)), inputs)


def test_the_tables_and_the_rule_of_flex_lie_on_the_device():
    mask = flex.block_mask_of(rows("anchor"), META)
    lists = [f"{full}{side}" for full in ("", "full_") for side in ("kv", "q")]
    tables = [getattr(mask, f"{name}_{what}") for name in lists for what in ("num_blocks", "indices")]
    assert {(table.device, table.dtype) for table in tables} == {(META, torch.int32)}
    index = torch.empty(3, dtype=torch.int32, device=META)
    assert mask.mask_mod(index, index, index, index).device == META


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 30.0}, {"window": 5}, {"chunk": 7}, {"sinks": True}], ids=str
)
def test_sdpa_never_leaves_the_device(monkeypatch, one_device, pattern, capability, options):
    """FlashAttention, or cuDNN in slices."""
    monkeypatch.setattr(capabilities, "capability_of", lambda device: capability)
    inputs = meta_qkv(3)
    if "sinks" in options:
        options = {"sinks": torch.empty(4, device=META, requires_grad=True)}
    made = AttentionOptions(**options)
    assert_gradients_fit(attend(*inputs, rows(pattern), "sdpa", made), inputs)
    if made.softcap is None:
        assert_gradients_fit(attend(*inputs, rows(pattern), "varlen", made), inputs)
