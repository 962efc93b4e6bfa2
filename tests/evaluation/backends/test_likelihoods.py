"""Likelihoods: chunks of a row change no loss, and neither logits nor hidden states are ever whole."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MistralConfig, MistralForCausalLM

from ropewalk.attention.layout import IGNORED
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.evaluation.backends.likelihoods import (
    WindowReader,
    causal_losses,
    check_prefill_chunk,
    window_row,
)
from ropewalk.evaluation.tasks.perplexity import SlidingWindows, document_windows, sliding_perplexity
from ropewalk.models.compute import losses as losses_module
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.load import attach
from ropewalk.models.rope.rotary import rotary_module
from ropewalk.rope import Default, RotaryRows
from tests.evaluation.evaluation_cases import tiny_llama
from tests.evaluation.plain_cases import BOS, FLOAT32, VOCABULARY, naive_losses, text


def chunked_row_losses(
    model: Any, head: OutputHead, input_ids: torch.Tensor, chunk: int | None
) -> np.ndarray:
    """Losses ``[length - 1]`` in nats of one causal sequence, every token of which but the first is scored."""
    ids = input_ids.to(model.device)[None]
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
    with torch.no_grad():
        return causal_losses(model, head, ids, labels, chunk)[0, :-1].cpu().numpy()


def test_window_begins_with_bos_and_labels_only_what_is_new() -> None:
    document = np.arange(10, 19, dtype=np.uint16)
    second = list(document_windows(9, 5, 2, 0))[1]
    ids, labels = window_row(document, second, BOS)
    assert ids.tolist() == [BOS, 12, 13, 14, 15, 16]
    assert labels.tolist() == [IGNORED] * 3 + [15, 16, IGNORED]
    assert ids.dtype == labels.dtype == np.int64


class DoubleHead(OutputHead):
    """Logits in float64, so that nothing but the forward pass is rounded to float32."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.linear(hidden)
        return logits


ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
        "original_max_position_embeddings": 24,
        "factor": 4.0,
    },
}


@pytest.mark.parametrize("chunk", [1, 7, 16, 39, 40, 100])
@pytest.mark.parametrize("rope", sorted(ROPES))
def test_chunks_change_nothing(rope: str, chunk: int) -> None:
    model = tiny_llama(rope_parameters=ROPES[rope]).double()
    attach(model)
    # Longer than its 64 positions, so that dynamic frequencies depend on the length.
    ids = torch.from_numpy(text(90)[0].astype(np.int64))
    head = DoubleHead(model.get_output_embeddings())
    whole = chunked_row_losses(model, head, ids, None)
    assert whole.shape == (89,)
    assert chunked_row_losses(model, head, ids, chunk) == pytest.approx(whole, abs=1e-10)


def test_whole_row_equals_plain_logits(model: Any, plain: Any, head: OutputHead) -> None:
    ids = text(60)[0].tolist()
    expected = naive_losses(plain, ids)
    for chunk in (None, 13):
        found = chunked_row_losses(model, head, torch.tensor(ids), chunk)
        assert found == pytest.approx(expected, rel=FLOAT32, abs=FLOAT32)


@pytest.mark.parametrize("attached", [False, True])
def test_chunks_keep_a_sliding_window_of_attention(attached: bool) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        sliding_window=8,
        initializer_range=0.3,
        attn_implementation="eager",
    )
    mistral = MistralForCausalLM(config).eval()
    ids = text(60)[0].tolist()
    expected = naive_losses(mistral, ids)
    config.sliding_window = None
    assert naive_losses(MistralForCausalLM(config).eval(), ids) != pytest.approx(expected, rel=1e-2)
    config.sliding_window = 8
    if attached:
        attach(mistral)
    head = OutputHead.of(mistral)
    for chunk in (None, 5, 8, 23):
        found = chunked_row_losses(mistral, head, torch.tensor(ids), chunk)
        assert found == pytest.approx(expected, rel=FLOAT32, abs=FLOAT32)


def test_chunks_are_refused_where_the_rope_would_change_between_them() -> None:
    stock = tiny_llama(rope_parameters=ROPES["dynamic"])
    head = OutputHead.of(stock)
    with pytest.raises(
        EngineError, match=r"LlamaForCausalLM uses transformers' own RoPE of type dynamic.*exact_rope=True"
    ):
        sliding_perplexity(WindowReader(stock, head, BOS, prefill_chunk=4), text(30), SlidingWindows(16, 5))
    sliding_perplexity(WindowReader(stock, head, BOS), text(30), SlidingWindows(16, 5))
    plain = tiny_llama()
    sliding_perplexity(WindowReader(plain, head, BOS, prefill_chunk=4), text(30), SlidingWindows(16, 5))


def test_chunks_of_rows_with_their_own_methods_equal_one_pass() -> None:
    model = tiny_llama(rope_parameters=ROPES["longrope"])
    attach(model)
    parent, attribute, own = rotary_module(model)
    longrope = own.methods[None]
    setattr(parent, attribute, RotaryRows([longrope, Default(longrope.rotary_dim, 5000.0)]).eval())
    ids = torch.from_numpy(text(60)[0].astype(np.int64))[None].expand(2, -1)
    labels = torch.cat((ids[:, 1:], torch.full((2, 1), IGNORED)), dim=1)
    head = OutputHead.of(tiny_llama())
    with torch.no_grad():
        whole, chunked = (causal_losses(model, head, ids, labels, chunk) for chunk in (None, 7))
    assert chunked.numpy() == pytest.approx(whole.numpy(), rel=FLOAT32, abs=FLOAT32)


class Largest(TorchDispatchMode):
    """Rows of the largest tensors whose last dimension is one of some widths."""

    def __init__(self, widths: set[int]) -> None:
        super().__init__()
        self.rows = dict.fromkeys(widths, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.t.default:
            # A weight, transposed.
            return out
        for tensor in _tensors(out):
            if tensor.dim() > 1 and tensor.shape[-1] in self.rows:
                width = tensor.shape[-1]
                self.rows[width] = max(self.rows[width], tensor.numel() // width)
        return out


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def test_a_chunk_has_a_token(model: Any) -> None:
    with pytest.raises(RopewalkError, match="prefill_chunk must be 1 token or more, got -1"):
        check_prefill_chunk(model, -1)


@pytest.mark.parametrize(("chunk", "most_rows", "most_logits"), [(None, 60, 8), (12, 12, 6)])
def test_logits_and_hidden_states_are_never_whole(
    model: Any,
    head: OutputHead,
    monkeypatch: pytest.MonkeyPatch,
    chunk: int | None,
    most_rows: int,
    most_logits: int,
) -> None:
    monkeypatch.setattr(losses_module, "LOGITS_BYTES", 4 * VOCABULARY * 8)
    ids = torch.from_numpy(text(60)[0].astype(np.int64))[None]
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED)
    vocabulary, intermediate = head.linear.weight.shape[0], model.config.intermediate_size
    with torch.no_grad(), Largest({intermediate, vocabulary}) as largest:
        causal_losses(model, head, ids, labels, chunk)
    assert largest.rows == {intermediate: most_rows, vocabulary: most_logits}
    labels[:, :50] = IGNORED
    seen: list[int] = []
    stock = OutputHead.logits
    monkeypatch.setattr(OutputHead, "logits", lambda self, h: (seen.append(len(h)), stock(self, h))[1])
    with torch.no_grad():
        causal_losses(model, head, ids, labels, chunk)
    assert sum(seen) == 9
    assert max(seen) <= 8
