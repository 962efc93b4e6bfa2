"""The audit's memory: blocks of scores and a few tensors of a layer, however long the row and however many layers."""

from functools import cache

import pytest
import torch
import transformers

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import AttentionOptions
from ropewalk.audit.ablation import ABLATED, ablation_arithmetic
from ropewalk.audit.arithmetic import EXACT, stock_arithmetic
from ropewalk.audit.audited_model import AuditedModel, LayerRotation
from ropewalk.audit.layer_attention import LayerAttention, streamed_attention
from ropewalk.audit.mitigations import changes
from ropewalk.audit.passes import Runner
from ropewalk.audit.replaced_attention import AttentionCall
from tests.audit.peak_bytes import peak_bytes

BLOCK = 2**19
HEADS, HIDDEN, LAYERS = 4, 64, 2
LENGTH = 1024

BLOCKS = 4
"""Tensors of the size of one block's scores that may be held at once."""

LAYER_TENSORS = 10
"""Tensors ``[length, hidden]`` that may be held at once: residual, queries, keys, values and their rotation."""

KEPT = 2 * HEADS + 2
"""Values a token that are kept of each layer: attention received and first score by head, and what every head of the
layer sees and would give evenly."""

DTYPES = (
    torch.float32,
    pytest.param(torch.float64, marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, marks=pytest.mark.slow),
)


def runner(block_bytes=BLOCK, layers=LAYERS):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return Runner(AuditedModel.of(model), LENGTH, block_bytes)


@cache
def peak(dtype, length, layers=LAYERS, block_bytes=BLOCK):
    """Each block is dozens of operations that the profiler reports, so no pass is measured twice."""
    of = runner(block_bytes, layers)
    ids = torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(1))
    return peak_bytes(lambda: of.run(ids, stock_arithmetic(dtype), torch.arange(length)))


def bound(dtype, length):
    """Blocks, tensors of a layer, and what is kept of all layers, which is copied once at the end."""
    wide = stock_arithmetic(dtype).wide.itemsize
    return BLOCKS * BLOCK + length * (LAYER_TENSORS * HIDDEN * wide + 2 * LAYERS * KEPT * 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_peak_of_a_pass_grows_with_the_row_and_not_with_its_square(dtype):
    half, whole = (peak(dtype, length) for length in (LENGTH // 2, LENGTH))
    assert half <= bound(dtype, LENGTH // 2)
    assert whole <= bound(dtype, LENGTH)
    assert whole < 2.6 * half


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_blocks_the_same_pass_holds_a_whole_layers_scores(dtype):
    """The ruler sees what blocks avoid, so that the bounds above say something."""
    whole = peak(dtype, LENGTH, block_bytes=2**40)
    scores = HEADS * LENGTH**2 * stock_arithmetic(dtype).wide.itemsize
    assert whole >= 2 * scores
    assert whole > 5 * bound(dtype, LENGTH)


@pytest.mark.slow
def test_a_layer_adds_what_is_kept_of_it_and_no_scores():
    length = LENGTH // 2
    peaks = [peak(torch.float64, length, layers) for layers in (LAYERS + 1, LAYERS)]
    assert 0 < peaks[0] - peaks[1] <= KEPT * length * 8


def arithmetics():
    layout = PackedLayout.from_lengths([8, 8], "full", 0)
    for dtype in (torch.bfloat16, torch.float32):
        for step in ABLATED:
            yield pytest.param(
                ablation_arithmetic(step, stock_arithmetic(dtype)), id=f"{str(dtype)[6:]} {step} alone"
            )
        for name, change in changes(stock_arithmetic(dtype), layout).items():
            yield pytest.param(change.arithmetic, id=f"{str(dtype)[6:]} {name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arithmetic", "softcap"),
    [(stock_arithmetic(torch.bfloat16), None), (stock_arithmetic(torch.float32), 20.0)],
)
def test_attention_holds_few_blocks_at_once(arithmetic, softcap):
    assert_few_blocks(arithmetic, softcap)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", list(arithmetics()))
def test_every_arithmetic_holds_few_blocks_at_once(arithmetic):
    assert_few_blocks(arithmetic, None)


FEW = 2**16


def assert_few_blocks(arithmetic, softcap):
    length, dim = 128, 4
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(8, length, dim, generator=generator).to(arithmetic.rest) for _ in range(3))
    call = AttentionCall(0, q, k, v, AttentionOptions(0.5, softcap))
    cos, sin = torch.ones(length, dim // 2), torch.zeros(length, dim // 2)
    rotation = LayerRotation(None, dim, "halves")
    held = peak_bytes(lambda: streamed_attention(LayerAttention(call, (cos, sin), rotation, arithmetic), FEW))
    # Beside the blocks: queries, keys and outputs, six tensors at most while they are rotated.
    assert held <= BLOCKS * FEW + 8 * q.numel() * 8


def test_a_pass_without_logits_lets_go_of_its_hidden_states():
    of = runner()
    ids = torch.arange(64)
    kept, dropped = (of.run(ids, EXACT, ids, keep=keep).hidden for keep in (("hidden",), ()))
    assert kept.untyped_storage().nbytes() == 64 * HIDDEN * 8
    assert dropped.untyped_storage().nbytes() == 0


def test_peak_of_known_allocations(capfd):
    """If the profiler counts otherwise some day, this says so: three tensors, of which two live at once."""

    def run():
        first = torch.empty(1000)
        second = torch.empty(500)
        del first
        third = torch.empty(1250, dtype=torch.float64)
        return second, third

    # 4 bytes each of 1000 and 500, then of 500 with 8 each of 1250.
    assert peak_bytes(run) == 4 * 500 + 8 * 1250
    assert peak_bytes(lambda: None) == 0
    # The profiler would write to the error stream, which belongs to a progress bar.
    assert capfd.readouterr().err == ""


def test_peak_sees_the_scratch_memory_of_a_kernel():
    x = torch.randn(1, 4, 512, 16)
    output = x.numel() * x.element_size()
    assert (
        peak_bytes(lambda: torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)) > output
    )
