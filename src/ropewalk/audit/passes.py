"""One forward pass of one row in a given arithmetic at given positions, and the difference between two passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.arithmetic import (
    EXACT,
    Angles,
    Arithmetic,
    stock_arithmetic,
)
from ropewalk.audit.audited_model import AuditedModel, LayerRotation
from ropewalk.audit.layer_attention import (
    LayerAttention,
    LayerTrace,
    RoundedTokens,
    rotated,
    streamed_attention,
)
from ropewalk.audit.replaced_attention import AttentionCall, replacing_attention
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

        with replacing_attention(audited_model.model, answer, arithmetic.rest), any_positions():
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
