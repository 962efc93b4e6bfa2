"""One forward pass of one row in a given arithmetic at given positions, and the difference between two passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal, TypeVar

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.arithmetic import (
    EXACT,
    Angles,
    Arithmetic,
    multiplied,
    operands,
    rounded,
    stock_arithmetic,
)
from ropewalk.audit.intercept import (
    AttentionCall,
    AuditedModel,
    LayerRotation,
    float32_products,
    intercepted,
    joined,
    rotate,
)
from ropewalk.audit.results import Sink
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.attention.hooks import any_positions
from ropewalk.models.compute.losses import decoder_of

Kept = Literal["hidden", "layers"]
"""What a pass keeps besides its traces: hidden states before the output head, queries and keys of each layer."""

LARGEST_MISMATCH = 0.01
"""Largest share of rotated values that may differ from the model's own before the rotation is rejected. Elementwise
operations match to the last bit; compiled or fused ones may round one value in hundreds differently."""

LOGITS_BYTES = 64 * 2**20
"""Largest float64 logits in bytes that one pass holds at once; the first-token experiment holds those of eight."""


@dataclass(frozen=True, eq=False)
class Pass:
    """Everything that is kept of a forward pass.

    Attributes:
        received: float64 ``[layers, heads, length]``: attention that each token received, summed over queries.
        first_scores: float64 ``[layers, heads, length]``: each query's score of the first token; 0 if not visible.
        seen_by: float64 ``[layers, length]``: number of queries that see each token.
        even: float64 ``[layers, length]``: attention each token would receive if all queries attended evenly.
        layers: the attention call of each layer with its queries and keys on the CPU, from which attention can be
            computed again; empty if they were not kept.
        tables: cos and sin of each rotation; empty if layers were not kept.
        layout: layout of the pass.
        apart: for each rotation, the tokens that are rotated in a different arithmetic.
        hidden: ``[length, hidden_size]`` before the output head, on the model's device, in ``arithmetic.rest``.
        arithmetic: arithmetic of the pass and of its logits.
    """

    received: Tensor
    first_scores: Tensor
    seen_by: Tensor
    even: Tensor
    hidden: Tensor
    arithmetic: Arithmetic
    layers: tuple[AttentionCall, ...] = ()
    tables: Mapping[LayerRotation, tuple[Tensor, Tensor]] = field(default_factory=dict)
    layout: PackedLayout | None = None
    apart: Mapping[LayerRotation, RoundedTokens] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Runner:
    """Runs passes of one model.

    Attributes:
        audited_model: the model.
        total_length: tokens of the longest sequence that positions are taken from. RoPE methods that depend on the
            length (longrope, dynamic) use the frequencies for it in every pass, so two passes differ only in
            arithmetic.
        block_bytes: size in bytes of the attention scores computed at once; None for a default for the device.
        advance: called by each measurement when it has finished a row in one arithmetic.
    """

    audited_model: AuditedModel
    total_length: int
    block_bytes: int | None = None
    advance: Callable[[], None] = lambda: None

    def stock(self, dtype: torch.dtype, angles: Angles = "model") -> Arithmetic:
        """The arithmetic of transformers for this model in a dtype under eager attention.

        Most models rotate in their own dtype, some in float32 with cos and sin in either dtype. The choice is found by
        measurement: the rotation of a few tokens must match to the last bit.

        Raises:
            EngineError: if none of these matches the model, or the model cannot run in that dtype.
        """
        if dtype == torch.float64:
            return EXACT
        # Sorted with the model's own dtype first, which min() then prefers among equals.
        choices = {dtype, torch.float32}
        positions, calls = self.audited_model.with_and_without_rotation(dtype)
        fits = {
            (cos_sin, rotation): self._mismatch(
                stock_arithmetic(dtype, "model", cos_sin, rotation), positions, calls
            )
            for cos_sin in sorted(choices, key=lambda each: each != dtype)
            for rotation in sorted(choices, key=lambda each: each != dtype)
        }
        best = min(fits, key=lambda each: fits[each])
        if fits[best] > LARGEST_MISMATCH:
            name = type(self.audited_model.model).__name__
            raise EngineError(
                f"the audit does not support how {name} rotates in {str(dtype).removeprefix('torch.')}: "
                f"{fits[best]:.0%} of the rotated values differ from every rotation that it can emulate"
            )
        return stock_arithmetic(dtype, angles, *best)

    def _mismatch(
        self, arithmetic: Arithmetic, positions: Tensor, calls: list[tuple[AttentionCall, AttentionCall]]
    ) -> float:
        """The share of rotated values that differ from the model's own."""
        wrong = total = 0
        for plain, own in calls:
            rotation = self.audited_model.layers[plain.layer]
            cos, sin = self._cos_sin(positions, rotation, arithmetic)
            for before, after in ((plain.query, own.query), (plain.key, own.key)):
                ours = rotated(before, cos, sin, rotation, arithmetic).to(after.dtype)
                unlike = ours != after
                if self.audited_model.gives == "complex" and rotation.rotary_dim:
                    # A float32 product of complex numbers may use fused multiply-add, which rounds only once.
                    size = before.abs().amax(-1, keepdim=True) * torch.hypot(cos, sin).max()
                    unlike &= (ours - after).abs() > torch.finfo(torch.float32).eps * size
                # Values that overflow are NaN in both and count as equal.
                wrong += int((unlike & ~(ours.isnan() & after.isnan())).sum())
                total += after.numel()
        return wrong / total

    def run(
        self,
        input_ids: Tensor,
        arithmetic: Arithmetic,
        position_ids: Tensor,
        layout: PackedLayout | None = None,
        apart: tuple[Tensor, Arithmetic] | None = None,
        keep: Sequence[Kept] = ("hidden",),
    ) -> Pass:
        """One forward pass.

        Args:
            input_ids: int64 ``[length]``.
            arithmetic: precision of each step.
            position_ids: int64 ``[length]``, below ``total_length``.
            layout: visibility of the row's tokens; the positions are still ``position_ids``.
            apart: bool ``[length]`` and an arithmetic: tokens whose queries and keys are rotated and rounded in that
                arithmetic, up to the operands of the product.
            keep: ``hidden`` if logits will be computed, ``layers`` if attention will be computed again.

        Raises:
            RopewalkError: if ids and positions differ in length, or a position is out of range.
        """
        if input_ids.dim() != 1 or len(input_ids) == 0 or input_ids.shape != position_ids.shape:
            raise RopewalkError(
                "input_ids and position_ids must be 1-dimensional, equally long and not empty, got shapes "
                f"{tuple(input_ids.shape)} and {tuple(position_ids.shape)}"
            )
        if not 0 <= int(position_ids.min()) <= int(position_ids.max()) < self.total_length:
            raise RopewalkError(
                f"positions must lie between 0 and {self.total_length - 1}, got positions from "
                f"{int(position_ids.min())} to {int(position_ids.max())}"
            )
        audited_model = self.audited_model
        traces: list[LayerTrace] = []
        kept: list[AttentionCall] = []
        tables: dict[LayerRotation, tuple[Tensor, Tensor]] = {}
        tokens: dict[LayerRotation, RoundedTokens] = {}

        def answer(call: AttentionCall) -> Tensor:
            rotation = audited_model.layers[call.layer]
            # Layers with the same rotation share one table of cosines and sines.
            if rotation not in tables:
                tables[rotation] = self._cos_sin(position_ids, rotation, arithmetic)
                if apart is not None:
                    tokens[rotation] = RoundedTokens(*apart, *self._cos_sin(position_ids, rotation, apart[1]))
            layer = LayerAttention(call, tables[rotation], rotation, arithmetic, layout, tokens.get(rotation))
            output, trace = streamed_attention(layer, self.block_bytes)
            traces.append(trace)
            if "layers" in keep:
                # Attention weights need no values, which are as large as the keys.
                nothing = call.value[:, :0].cpu()
                kept.append(replace(call, query=call.query.cpu(), key=call.key.cpu(), value=nothing))
            return output

        with intercepted(audited_model.model, answer, arithmetic.rest), any_positions():
            ids = input_ids[None].to(audited_model.device)
            # Some models use positions outside RoPE too. The mask of ones keeps restarted positions one sequence.
            hidden = decoder_of(audited_model.model)(
                ids,
                position_ids=position_ids[None].to(audited_model.device),
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            ).last_hidden_state[0]
        return Pass(
            torch.stack([trace.received for trace in traces]),
            torch.stack([trace.first_scores for trace in traces]),
            torch.stack([trace.seen_by for trace in traces]),
            torch.stack([trace.even for trace in traces]),
            # A clone, because an empty view would keep the whole tensor alive.
            hidden if "hidden" in keep else hidden[:0].clone(),
            arithmetic,
            tuple(kept),
            tables if "layers" in keep else {},
            layout,
            tokens if "layers" in keep else {},
        )

    def prepared(self, found: Pass, layer: int) -> LayerAttention:
        """A layer of a pass that kept queries and keys, ready to compute its attention again."""
        call = found.layers[layer]
        device, rotation = self.audited_model.device, self.audited_model.layers[layer]
        moved = replace(call, query=call.query.to(device), key=call.key.to(device))
        return LayerAttention(
            moved, found.tables[rotation], rotation, found.arithmetic, found.layout, found.apart.get(rotation)
        )

    def _cos_sin(
        self, position_ids: Tensor, rotation: LayerRotation, arithmetic: Arithmetic
    ) -> tuple[Tensor, Tensor]:
        audited_model = self.audited_model
        if rotation.rotary_dim == 0:
            nothing = torch.zeros(0)
            return nothing, nothing
        if arithmetic.angles == "model":
            return audited_model.cos_sin(
                position_ids, arithmetic.cos_sin, rotation.layer_type, self.total_length
            )
        return exact_cos_sin(audited_model, position_ids, rotation.layer_type, self.total_length)

    def logits(self, found: Pass, chunk_bytes: int = LOGITS_BYTES) -> Iterator[Tensor]:
        """Logits of a pass, computed in the arithmetic of the pass.

        Args:
            found: a pass of this runner that kept its hidden states.
            chunk_bytes: size in bytes of the float64 logits held at once.

        Returns:
            float64 ``[tokens, vocab_size]`` for consecutive groups of tokens, in order.
        """
        vocab, width = self.audited_model.head.linear.weight.shape
        # Eight bytes for each logit in float64.
        for hidden in found.hidden.split(max(1, chunk_bytes // (8 * vocab))):
            yield self._logits_of(hidden, max(1, chunk_bytes // (8 * width)))

    def _logits_of(self, hidden: Tensor, columns: int) -> Tensor:
        # Not inside the generator: it would keep its intermediates while suspended, and eight are suspended at once.
        head = self.audited_model.head
        vocab, bias = head.linear.weight.shape[0], head.linear.bias
        logits = hidden.new_empty(len(hidden), vocab, dtype=torch.float64)
        for first in range(0, vocab, columns):
            some = slice(first, first + columns)
            weight = head.linear.weight[some].detach().to(hidden.dtype)
            added = None if bias is None else bias[some].detach().to(hidden.dtype)
            logits[:, some] = torch.nn.functional.linear(hidden, weight, added)
        logits *= head.multiplier
        if head.softcap is not None:
            logits.div_(head.softcap).tanh_().mul_(head.softcap)
        return logits


def exact_cos_sin(
    audited_model: AuditedModel, position_ids: Tensor, layer_type: str | None, total_length: int
) -> tuple[Tensor, Tensor]:
    """cos and sin in float64 from the config's RoPE method: ``[length, rotary_dim / 2]`` each."""
    inv_freq, attention_factor = audited_model.methods[layer_type].frequencies(total_length)
    angles = position_ids.to(audited_model.device, torch.float64)[:, None] * inv_freq.to(audited_model.device)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


@dataclass(frozen=True)
class LogitDifference:
    """Difference between two passes in their logits.

    Attributes:
        rms: root mean square over positions and vocabulary.
        kl: Kullback-Leibler divergence of the second distribution from the first in nats; mean over positions.
    """

    rms: float
    kl: float


def logit_difference(runner: Runner, reference: Pass, other: Pass) -> LogitDifference:
    """Difference between the next-token predictions of two passes.

    Args:
        runner: the runner that made both passes.
        reference: pass to compare with; KL is the divergence of the other distribution from this one.
        other: another pass of the same row.

    Returns:
        Root mean square of the logits' difference, and Kullback-Leibler divergence in nats per token.
    """
    squares = divergence = 0.0
    for expected, found in zip(runner.logits(reference), runner.logits(other), strict=True):
        squares += float((found - expected).square().mean(-1).sum())
        log_p, log_q = expected.log_softmax(-1), found.log_softmax(-1)
        divergence += float((log_p.exp() * (log_p - log_q)).sum())
    length = reference.hidden.shape[0]
    return LogitDifference((squares / length) ** 0.5, divergence / length)


def shifted(length: int, shift: int) -> Tensor:
    """int64 ``[length]``: positions ``shift, shift + 1, …``."""
    return torch.arange(shift, shift + length)


def longest(shifts: Sequence[int], length: int) -> int:
    """Tokens of the sequence that ends with the row at the largest shift."""
    return max(shifts) + length


# Shapes: H query heads, K key/value heads, G = H / K, T row length, Q queries of a block, S keys seen, D head dim.

BLOCK_BYTES = 64 * 2**20
"""Size in bytes of the scores of one block of queries; the peak is at most four times this plus the layer's tensors."""

CPU_BLOCK_BYTES = 4 * 2**20
"""The same limit on a CPU: a block of this size reuses memory that the process already has, much of it in the cache.
Larger blocks take twice the time, mostly for page faults."""

CPU_QUERIES = 64
"""Fewest queries in a block on a CPU, if they fit in ``BLOCK_BYTES``: smaller products cost more than page faults."""


@dataclass(frozen=True, eq=False)
class LayerTrace:
    """Summary of one layer's attention, in float64 on the CPU.

    Attributes:
        received: ``[heads, length]``: the attention that each token received, summed over queries.
        first_scores: ``[heads, length]``: each query's score (logit) of the row's first token; 0 if not visible.
        seen_by: ``[length]``: number of queries that see each token.
        even: ``[length]``: attention each token would receive if every query attended evenly to what it sees.
    """

    received: Tensor
    first_scores: Tensor
    seen_by: Tensor
    even: Tensor


def rotated(x: Tensor, cos: Tensor, sin: Tensor, rotation: LayerRotation, arithmetic: Arithmetic) -> Tensor:
    """Queries or keys ``[heads, length, head_dim]`` at their positions, in the arithmetic's wide dtype."""
    wide, width = arithmetic.wide, rotation.rotary_dim
    x = x.to(wide)
    if width == 0:
        return x
    turning = x[..., rotation.dims]
    cos, sin = (rounded(part.to(wide), arithmetic.cos_sin) for part in (cos, sin))
    a, b, c, d = (rounded(part, arithmetic.rotation) for part in rotate(turning, cos, sin, rotation.style))
    return rotation.put_back(x, joined(a - b, c + d, rotation.style))


@dataclass(frozen=True, eq=False)
class RoundedTokens:
    """Tokens whose queries and keys are rotated and rounded in a different arithmetic.

    Attributes:
        tokens: bool ``[length]``.
        arithmetic: arithmetic of the steps up to the operands of the product.
        cos, sin: ``[length, rotary_dim / 2]`` in that arithmetic.
    """

    tokens: Tensor
    arithmetic: Arithmetic
    cos: Tensor
    sin: Tensor

    def among(self, x: Tensor, exact: Tensor, rotation: LayerRotation) -> Tensor:
        """Queries or keys ``[heads, length, head_dim]``: ``exact`` with these tokens replaced."""
        parts = operands(rotated(x, self.cos, self.sin, rotation, self.arithmetic), self.arithmetic.product)
        # The two parts of the split are added up again, which float64 does without rounding.
        found = torch.stack([part.to(exact.dtype) for part in parts]).sum(0)
        return torch.where(self.tokens.to(x.device)[:, None], found, exact)


class LayerAttention:
    """Rotated and rounded queries and keys of one layer, from which attention is computed block by block.

    Args:
        call: queries and keys before rotation, and values.
        table: cos and sin, ``[length, rotary_dim / 2]`` each.
        rotation: how the layer rotates.
        arithmetic: precision of each step.
        layout: visibility of tokens; None for plain causal attention.
        apart: tokens that are rotated in a different arithmetic.
    """

    def __init__(
        self,
        call: AttentionCall,
        table: tuple[Tensor, Tensor],
        rotation: LayerRotation,
        arithmetic: Arithmetic,
        layout: PackedLayout | None = None,
        apart: RoundedTokens | None = None,
    ) -> None:
        self.call, self.arithmetic, self.layout = call, arithmetic, layout
        q_HTD, k_KTD = (rotated(x, *table, rotation, arithmetic) for x in (call.query, call.key))
        if apart is not None:
            q_HTD, k_KTD = apart.among(call.query, q_HTD, rotation), apart.among(call.key, k_KTD, rotation)
        kv_heads = k_KTD.shape[0]
        # The query heads of a key head are neighbours, as transformers' repeat_kv lays them out.
        self.q_KGTD = q_HTD.unflatten(0, (kv_heads, q_HTD.shape[0] // kv_heads))
        self.keys = operands(k_KTD, arithmetic.product)
        device = call.query.device
        self.documents = None if layout is None else layout.document_ids.to(device)
        # Windows and chunks count tokens of a run, whatever lies between them in the row.
        length = q_HTD.shape[1]
        self.places = torch.arange(length) if layout is None else layout.run_index
        self.places = self.places.to(device)

    def scores(self, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Scores ``[K, G, Q, S]`` of some queries before masking, and bool ``[Q, S]``: visible keys."""
        seen = [k_KTD[:, :end] for k_KTD in self.keys]
        scores = _scores(self.q_KGTD[:, :, start:end], seen, self.call, self.arithmetic)
        return scores, self.visible(start, end)

    def visible(self, start: int, end: int) -> Tensor:
        """bool ``[end - start, end]``: the visibility rule for some queries."""
        device, layout, locality = self.call.query.device, self.layout, self.call.options.locality
        # Keys after the block are causally hidden from all of its queries and are never computed.
        i = torch.arange(start, end, device=device)[:, None]
        j = torch.arange(end, device=device)[None, :]
        visible: Tensor = j <= i
        query, key = self.places[start:end, None], self.places[None, :end]
        if locality.window is not None:
            visible = visible & (query - key < locality.window)
        if locality.chunk is not None:
            visible = visible & (query // locality.chunk == key // locality.chunk)
        if layout is not None and self.documents is not None and layout.pattern != "full":
            allowed = self.documents[start:end, None] == self.documents[None, :end]
            if layout.pattern == "anchor":
                allowed = allowed | (j < layout.anchor_length)
            visible = visible & allowed
        return visible

    def weights(self, scores: Tensor, visible: Tensor) -> Tensor:
        """Attention weights ``[K, G, Q, S]``; masks the scores in place.

        Each head's sink takes its share and is left out, so with sinks the weights of a query sum to less than 1.
        """
        # Keys before the block are hidden only by a window, a chunk or a layout.
        some = self.call.options.locality.reach is not None or (
            self.layout is not None and self.layout.pattern != "full"
        )
        first = 0 if some else visible.shape[1] - visible.shape[0]
        scores[..., first:].masked_fill_(~visible[:, first:], -torch.inf)
        if self.call.options.sinks is None:
            return scores.to(self.arithmetic.softmax).softmax(-1).to(self.arithmetic.weights)
        weights = (
            _beside_sinks(scores, self.call.options.sinks, self.arithmetic)
            .to(self.arithmetic.softmax)
            .softmax(-1)
        )
        # The last column is the sink's share.
        return weights[..., :-1].to(self.arithmetic.weights)


def block_edges(
    length: int,
    heads: int,
    itemsize: int,
    lengths: Sequence[int],
    block_bytes: int | None,
    device: torch.device,
) -> list[int]:
    """Boundaries of blocks of queries, each with at most ``block_bytes`` of scores; every length is a boundary.

    If ``block_bytes`` is None, a default for the device is used.
    """
    a_query = heads * length * itemsize
    size = (BLOCK_BYTES if block_bytes is None else block_bytes) // a_query
    if block_bytes is None and device.type == "cpu":
        size = min(size, max(CPU_BLOCK_BYTES // a_query, CPU_QUERIES))
    # The requested lengths are edges too, so that a sum over blocks can be read off at each of them.
    return sorted({*range(0, length, max(1, size)), *(n for n in lengths if n < length), length})


def streamed_attention(layer: LayerAttention, block_bytes: int | None = None) -> tuple[Tensor, LayerTrace]:
    """Causal attention of one row.

    Args:
        layer: queries, keys and values of the layer, and the arithmetic.
        block_bytes: size in bytes of the scores computed at once; None for a default for the device.

    Returns:
        The output ``[heads, length, value_dim]`` in ``arithmetic.rest``, and the trace.
    """
    call, arithmetic = layer.call, layer.arithmetic
    heads, length, _ = call.query.shape
    # Converted once for each layer, because every block of queries sees most values.
    v_KTV = call.value.to(_sums_in(arithmetic))
    edges = block_edges(length, heads, arithmetic.wide.itemsize, (), block_bytes, call.query.device)
    received = torch.zeros(heads, length, dtype=torch.float64, device=call.query.device)
    seen_by, even = torch.zeros_like(received[0]), torch.zeros_like(received[0])
    outputs, first_scores = [], []
    for start, end in pairwise(edges):
        scores, visible = layer.scores(start, end)
        # torch.where makes a new tensor: a view would keep the whole block alive.
        first_scores.append(torch.where(visible[:, 0], scores[..., 0].flatten(0, 1).double(), 0.0))
        seen_by[:end] += visible.sum(0)
        even[:end] += (visible / visible.sum(1, keepdim=True)).sum(0, dtype=torch.float64)
        weights = layer.weights(scores, visible)
        # Free each block before the next one is computed.
        del scores
        received[:, :end] += _summed_over_queries(weights.flatten(0, 1))
        outputs.append(_weighted(weights, v_KTV[:, :end], arithmetic).flatten(0, 1))
        del weights
    trace = LayerTrace(
        received.cpu(),
        torch.cat(first_scores, dim=-1).cpu(),
        seen_by.cpu(),
        even.cpu(),
    )
    return torch.cat(outputs, dim=1), trace


def _scores(q_KGQD: Tensor, k_KSD: Sequence[Tensor], call: AttentionCall, arithmetic: Arithmetic) -> Tensor:
    # One product for all queries of a key head: broadcasting would copy the keys for each query head.
    products = multiplied(operands(q_KGQD.flatten(1, 2), arithmetic.product), k_KSD)
    scores: Tensor = products.unflatten(1, q_KGQD.shape[1:3]).to(arithmetic.wide)
    _round(
        _round(scores, arithmetic.scores).mul_(call.options.scale_of(call.query.shape[-1])), arithmetic.scores
    )
    if call.options.softcap is not None:
        _round(_round(scores.div_(call.options.softcap), arithmetic.scores).tanh_(), arithmetic.scores)
        _round(scores.mul_(call.options.softcap), arithmetic.scores)
    return scores


def _beside_sinks(scores_KGQS: Tensor, sinks: Tensor, arithmetic: Arithmetic) -> Tensor:
    """``[K, G, Q, S + 1]``: masked scores and each head's sink minus their maximum, rounded as gpt-oss does.

    Its eager attention concatenates the sinks to the scores in their dtype and subtracts the maximum in that dtype.
    """
    kv_heads, groups, queries, _ = scores_KGQS.shape
    sinks = rounded(sinks.to(scores_KGQS.dtype), arithmetic.scores).view(kv_heads, groups, 1, 1)
    both = torch.cat((scores_KGQS, sinks.expand(-1, -1, queries, -1)), dim=-1)
    return _round(both.sub_(both.amax(-1, keepdim=True)), arithmetic.scores)


def _round(x: Tensor, dtype: torch.dtype) -> Tensor:
    """:func:`rounded`, in place."""
    return x if x.dtype == dtype else x.copy_(x.to(dtype))


def _summed_over_queries(weights_HQS: Tensor) -> Tensor:
    """float64 ``[H, S]``, computed head by head: a sum in a wider dtype first copies its whole input."""
    return torch.stack([weights_QS.sum(0, dtype=torch.float64) for weights_QS in weights_HQS])


def _sums_in(arithmetic: Arithmetic) -> torch.dtype:
    """Sums of values run in float32, or in float64 if weights or values are wider than float32."""
    return torch.float64 if torch.float64 in (arithmetic.weights, arithmetic.rest) else torch.float32


def _weighted(weights_KGQS: Tensor, v_KSV: Tensor, arithmetic: Arithmetic) -> Tensor:
    """The weighted mean of the values, ``[K, G, Q, V]``."""
    mean: Tensor = weights_KGQS.to(v_KSV.dtype).flatten(1, 2) @ v_KSV
    found: Tensor = mean.unflatten(1, weights_KGQS.shape[1:3])
    return found.to(arithmetic.rest)


Term = tuple[float, Pass]
"""A factor, and the pass whose attention it multiplies."""

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, eq=False)
class AttentionDifference:
    """A difference of attention, on the CPU in float64.

    Attributes:
        sums: ``[layers, heads, length]``: for each token, the sum over queries of the absolute difference.
        sums_at: ``[lengths, length]``: the same for the row truncated at each length, summed over layers and heads.
        lengths: the lengths in ``sums_at``, in tokens.
    """

    sums: Tensor
    sums_at: Tensor
    lengths: tuple[int, ...]

    @property
    def heads(self) -> Tensor:
        """``[layers, heads]``: each head's part of D."""
        return (self.sums / queries_from(self.sums.shape[-1])).sum(-1)

    @property
    def tokens(self) -> Tensor:
        """``[length]``: each token's part of D."""
        return (self.sums / queries_from(self.sums.shape[-1])).sum((0, 1))

    @property
    def D(self) -> float:
        return float(self.heads.sum())

    @property
    def moved(self) -> float:
        """The share of all attention that moves to other tokens, 0 to 1: one token's loss is another's gain.

        Attention lost to a learned sink, or gained from it, counts half.
        """
        return float(self.sums.sum()) / 2 / self.sums.numel()

    @property
    def D_at(self) -> list[float]:
        """D of the row truncated at each length."""
        found = []
        for length, sums in zip(self.lengths, self.sums_at, strict=True):
            found.append(float((sums[:length] / queries_from(length)).sum()))
        return found

    def share_of(self, token: int) -> float:
        """The share of D that falls on one token, 0 to 1; NaN if D is 0."""
        return float(self.tokens[token]) / self.D if self.D else math.nan


def queries_from(length: int) -> Tensor:
    """float64 ``[length]``: number of queries at or after each token, whatever a layout lets them see."""
    return length - torch.arange(length, dtype=torch.float64)


def difference(runner: Runner, *terms: Term, lengths: tuple[int, ...] = ()) -> AttentionDifference:
    """The absolute value of a weighted sum of passes' attention, summed over queries.

    Args:
        runner: the runner that made the passes.
        terms: factors, and passes of one row that kept their ``layers``: ``(1, a), (-1, b)`` for a difference.
        lengths: lengths for ``sums_at`` in tokens, increasing.
    """
    return differences(runner, {0: terms}, lengths)[0]


def differences(
    runner: Runner, wanted: Mapping[Name, Sequence[Term]], lengths: tuple[int, ...] = ()
) -> dict[Name, AttentionDifference]:
    """Several differences of one row; the attention of each pass is computed only once.

    Args:
        runner: the runner that made the passes.
        wanted: the terms of each difference by name, as in :func:`difference`.
        lengths: lengths for ``sums_at`` in tokens, increasing.
    """
    passes = _passes(*wanted.values())
    layers, heads, length = passes[0].received.shape
    sums = {name: torch.zeros(layers, heads, length, dtype=torch.float64) for name in wanted}
    sums_at = {name: torch.zeros(len(lengths), length, dtype=torch.float64) for name in wanted}
    # Allocating costs more than summing, so a tensor that nobody needs afterwards is overwritten.
    once = sum(map(len, wanted.values())) == len(passes) and len(wanted) == 1
    for layer, end, weights in _blocks(runner, passes, lengths):
        scratch = weights[passes[0]] if once else torch.empty_like(weights[passes[0]])
        for name, terms in wanted.items():
            found = sums[name]
            found[layer, :, :end] += _weighted_sum(terms, weights, scratch).abs_().sum(-2).cpu()
            # Every length is the end of a block, so the sums up to there are those of the truncated row.
            for number, cut in enumerate(lengths):
                if end == cut:
                    sums_at[name][number] += found[layer].sum(0)
    return {name: AttentionDifference(sums[name], sums_at[name], lengths) for name in wanted}


def share(runner: Runner, whole: Sequence[Term], part: Sequence[Term]) -> tuple[float, float]:
    """The contribution of a part of a change of attention to the D of the whole change, and that D.

    Contributions of parts that add up to the whole add up to its D.
    """
    passes = _passes(whole, part)
    added = total = 0.0
    for _, end, weights in _blocks(runner, passes, ()):
        first, second = (
            _weighted_sum(terms, weights, torch.empty_like(weights[passes[0]])) for terms in (whole, part)
        )
        seen = queries_from(passes[0].received.shape[-1])[:end].to(first.device)
        total += float((first.abs() / seen).sum())
        # sign(whole) * part: over parts that add up to the whole, these terms add up to |whole|.
        added += float((first.sign() * second / seen).sum())
    return added, total


def _passes(*terms: Sequence[Term]) -> list[Pass]:
    """The distinct passes of some terms, in order of appearance."""
    return list(dict.fromkeys(found for each in terms for _, found in each))


def _weighted_sum(terms: Sequence[Term], weights: Mapping[Pass, Tensor], into: Tensor) -> Tensor:
    """The weighted sum; it may reuse the memory of the first term."""
    (factor, first), *others = terms
    torch.mul(weights[first], factor, out=into)
    for factor, each in others:
        into.add_(weights[each], alpha=factor)
    return into


def _blocks(
    runner: Runner, passes: Sequence[Pass], lengths: tuple[int, ...]
) -> Iterator[tuple[int, int, dict[Pass, Tensor]]]:
    """Layer, end of the block of queries, and each pass's attention ``[heads, queries, keys]`` in float64."""
    layers, heads, length = passes[0].received.shape
    # The float64 weights of all passes are in memory at once, 8 bytes each.
    edges = block_edges(
        length, heads, 8 * len(passes), lengths, runner.block_bytes, runner.audited_model.device
    )
    for layer in range(layers):
        prepared = {found: runner.prepared(found, layer) for found in passes}
        for start, end in pairwise(edges):
            with float32_products(), torch.no_grad():
                weights = {
                    found: one.weights(*one.scores(start, end)).flatten(0, 1).double()
                    for found, one in prepared.items()
                }
            yield layer, end, weights


def logit_differences(first: Pass, second: Pass, lengths: tuple[int, ...]) -> list[float]:
    """D_logit of the row truncated at each length T: Σ_layers Σ_heads 1/T Σ_i | S^{Δ1}_i0 − S^{Δ2}_i0 |.

    S_i0 is the score, before softmax, that query i gives the row's first token.
    """
    scores = (first.first_scores - second.first_scores).abs().sum((0, 1)).cumsum(-1)
    return [float(scores[length - 1]) / length for length in lengths]


def attention_sink(found: Pass) -> Sink:
    """The token of a row that receives most attention from the queries that see it.

    Only the first half of the row is considered: a mean over the few queries that see a late token is meaningless.
    """
    # With a sliding window, fewer queries see a token.
    by_query = found.received / found.seen_by[:, None]
    mean = by_query.mean((0, 1))[: max(1, found.received.shape[-1] // 2)]
    index = int(mean.argmax())
    return Sink(
        index=index,
        attention=float(mean[index]),
        first_attention=float(mean[0]),
        even_attention=float((found.even / found.seen_by).mean(0)[0]),
        strongest_head=float(by_query[..., 0].max()),
    )


def mean_sink(sinks: list[Sink]) -> Sink:
    """Over rows: the most frequent index, and mean values."""
    indices = [sink.index for sink in sinks]

    def mean(name: str) -> float:
        return float(sum(getattr(sink, name) for sink in sinks)) / len(sinks)

    return Sink(
        # Sorted, so that of equally frequent tokens the earliest wins.
        max(sorted(set(indices)), key=indices.count),
        mean("attention"),
        mean("first_attention"),
        mean("even_attention"),
        mean("strongest_head"),
    )
