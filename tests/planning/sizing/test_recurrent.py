"""Operations of recurrences against what torch counts in transformers' own code of them, and published sizes."""

import sys
from unittest import mock

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ropewalk.models.attention.kernels import FUNCTIONS
from ropewalk.models.config.layers import MAMBA_2
from ropewalk.models.config.model import ModelConfig
from ropewalk.planning.sizing.recurrent import (
    DELTA_CHUNK,
    RecurrentShape,
    convolution_flops,
    delta_rule_flops,
    lightning_flops,
    recurrent_shapes,
    scan_flops,
)
from tests.models.attention.test_kernels import mixer_of, recurrence_of
from tests.models.families import HYBRIDS, tiny_model
from tests.versions import missing

TOKENS = 3 * DELTA_CHUNK
"""Whole chunks of every family below."""


def counted(function, *args, **kwargs):
    """Operations that torch counts in a call, without a convolution's, which it counts for the padding too."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*args, **kwargs)
    return sum(
        count
        for operator, count in counter.get_flop_counts()["Global"].items()
        if "convolution" not in str(operator)
    )


def function_of(family, name):
    """transformers' torch code of a function of a family's mixer."""
    module = sys.modules[type(mixer_of(tiny_model(family, sharp=True))).__module__]
    return getattr(module, name, None) or missing(f"{name} of {family}")


def delta_inputs(heads, key_heads, key_dim, value_dim, by_channel):
    q, k = (torch.randn(1, TOKENS, key_heads, key_dim) for _ in range(2))
    v = torch.randn(1, TOKENS, heads, value_dim)
    g = -torch.rand(1, TOKENS, heads, *([key_dim] if by_channel else []))
    return q, k, v, g, torch.rand(1, TOKENS, heads)


def test_the_gated_delta_rule_has_the_products_of_transformers_chunks():
    rule = function_of("qwen3_next", "torch_chunk_gated_delta_rule")
    given = delta_inputs(4, 2, 8, 12, by_channel=False)
    expected = delta_rule_flops(TOKENS, 4, 8, 12)
    # A triangular solver takes the place of two products, which torch does not count.
    solved = 2 * TOKENS * 4 * DELTA_CHUNK * (8 + 12)
    assert counted(rule, *given) == expected - solved
    module = sys.modules[rule.__module__]
    with mock.patch.object(module, "is_torchdynamo_exporting", return_value=True):
        assert counted(rule.__wrapped__, *given) == expected


def test_kimis_rule_has_the_products_of_transformers_chunks():
    rule = function_of("kimi_linear", "chunk_kimi_delta_attention")
    found = counted(rule, *delta_inputs(4, 4, 8, 12, by_channel=True))
    # The decay of each channel makes scores of keys with keys and queries sums, which kernels compute as products.
    sums = 2 * TOKENS * 4 * DELTA_CHUNK * 2 * 8
    assert found == delta_rule_flops(TOKENS, 4, 8, 12) - sums


def test_the_scan_has_the_products_of_transformers_chunks():
    scan = function_of("bamba", "mamba2_chunk_scan")
    heads, head_dim, state, groups, chunk = 4, 8, 6, 2, 16
    x, dt = torch.randn(1, TOKENS, heads, head_dim), torch.rand(1, TOKENS, heads)
    B, C = (torch.randn(1, TOKENS, groups, state) for _ in range(2))
    found = counted(scan, x, dt, -torch.rand(heads), B, C, chunk)
    expected = scan_flops(TOKENS, heads, head_dim, state, groups, chunk)
    # transformers computes B with C for each head of a group, and passes states on by a product over pairs of chunks.
    expected += 2 * TOKENS * chunk * state * (heads - groups)
    expected += 2 * (TOKENS // chunk + 1) ** 2 * heads * head_dim * state
    assert found == expected


def test_lightning_attention_has_the_products_of_transformers_blocks():
    mixer = mixer_of(tiny_model("minimax", sharp=True))
    shape = RecurrentShape.of(mixer, recurrence_of(tiny_model("minimax", sharp=True)))
    hidden = torch.randn(1, TOKENS, 32)
    found = counted(mixer, hidden, position_embeddings=None, attention_mask=None)
    maps = sum(each.weight.numel() for each in (mixer.qkv_proj, mixer.out_proj, mixer.output_gate))
    assert found - 2 * TOKENS * maps == lightning_flops(TOKENS, 4, 8, 8) == shape.flops(TOKENS)


def test_a_convolution_multiplies_each_channel_by_itself():
    convolution = function_of("lfm2", "causal_conv1d_fn")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        convolution(torch.randn(1, 10, TOKENS), torch.randn(10, 4))
    # transformers pads both ends by three, and drops the last three results.
    assert counter.get_total_flops() == convolution_flops(TOKENS + 3, 10, 4)


@pytest.mark.parametrize("family", sorted(HYBRIDS))
def test_every_mixer_is_read(family):
    """Dimensions that no product of tensors contradicts: those of the weights."""
    model = tiny_model(family, sharp=True)
    config = ModelConfig.of(model.config)
    shapes = recurrent_shapes(model, config)
    assert len(shapes) == len(config.recurrent_layers)
    shape, mixer = shapes[0], mixer_of(model)
    assert shape.flops(2 * TOKENS) == 2 * shape.flops(TOKENS) > 0
    convolutions = [each for each in mixer.children() if isinstance(each, torch.nn.Conv1d)]
    assert [(shape.channels, shape.width)] * len(convolutions) == [
        (len(each.weight), each.weight.shape[-1]) for each in convolutions
    ]
    if shape.heads:
        # What leaves the state enters the last map of the layer.
        last = mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj
        assert shape.heads * shape.value_dim == last.in_features
    else:
        assert "causal_conv1d_fn" in FUNCTIONS[shape.recurrence]
        assert shape.flops(TOKENS) == convolution_flops(TOKENS, 32, shape.width)


def test_operations_of_a_layer_of_qwen_3_5_9b():
    """262,144 tokens on eight ranks: projections 4.4 TFLOP, the MLP 9.9, the rule and its convolution 0.2."""
    tokens, hidden = 2**18 // 8, 4096
    shape = RecurrentShape("gated delta rule", 32, 128, 128, 0, DELTA_CHUNK, 2 * 2048 + 4096, 4)
    projections = hidden * (shape.channels + 4096 + 2 * 32) + 4096 * hidden
    assert 2 * tokens * projections == pytest.approx(4.4e12, rel=0.01)
    assert 2 * tokens * 3 * hidden * 12288 == pytest.approx(9.9e12, rel=0.01)
    assert shape.flops(tokens) == pytest.approx(0.19e12, rel=0.01)
    # A triangular solver would do with half of what the inverse is multiplied with.
    solver = delta_rule_flops(tokens, 32, 128, 128) - tokens * 32 * DELTA_CHUNK * (128 + 128)
    assert solver == pytest.approx(0.17e12, rel=0.02)
    # A summary is 4 MiB in float32.
    assert 4 * shape.summary == 4 * 2**20


def test_groups_and_chunks_of_a_scan_count():
    """Granite 4 tiny: 48 heads of 64, a state of 128, one group, chunks of 256."""
    shape = RecurrentShape(MAMBA_2, 48, 128, 64, 1, 256)
    assert shape.flops(1) == 2 * (256 * (128 + 48 * 64) + 2 * 48 * 64 * 128)
    assert RecurrentShape(MAMBA_2, 48, 128, 64, 8, 256).flops(1) - shape.flops(1) == 2 * 256 * 7 * 128
    assert shape.summary == 48 * (64 * 128 + 1)
