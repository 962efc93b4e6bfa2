"""One forward pass of one row in a given arithmetic, at given positions, and how two of them differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.arithmetic import EXACT, Angles, Arithmetic, stock_arithmetic
from ropewalk.audit.blockwise import LayerTrace, Prepared, RoundedTokens, rotated, streamed_attention
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.intercept import AttentionCall, LayerRotation, intercepted
from ropewalk.models.intercept import Subject as Subject
from ropewalk.models.losses import decoder_of

LARGEST_MISMATCH = 0.01
"""Share of rotated values that may come out otherwise than the model's own before it is refused. Elementwise operations
are exact to the last bit; compiled or fused ones may round one value in hundreds the other way."""

LOGITS_BYTES = 64 * 2**20
"""Size of the float64 logits of one pass held at once; the first-token experiment holds those of eight."""


@dataclass(frozen=True, eq=False)
class Pass:
    """What is kept of a forward pass.

    Attributes:
        received: float64 ``[layers, heads, length]``: attention that each token received, summed over queries.
        received_by: float64 ``[layers, lengths, length]``: mean over heads, for the row cut off at each length.
        first_scores: float64 ``[layers, heads, length]``: each query's score of the first token; 0 if unseen.
        seen_by: float64 ``[layers, length]``: queries that see each token.
        even: float64 ``[layers, length]``: what each token would receive of queries that attend evenly.
        layers: each layer's call, its queries and keys on the CPU, to compute its attention again; empty where they
            were not kept.
        tables: cos and sin of each rotation in it; empty where layers were not kept.
        layout: of the pass.
        apart: tokens that are rotated in an arithmetic of their own, for each rotation.
        hidden: ``[length, hidden_size]`` before the output head, on the model's device, in ``arithmetic.rest``.
        arithmetic: of the pass, and of its logits.
    """

    received: Tensor
    received_by: Tensor
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
        subject: the model.
        total_length: tokens of the longest sequence that positions are taken from; RoPE methods that depend on the
            length (longrope, dynamic) take their frequencies for it in every pass, so that two passes differ in
            arithmetic alone.
        lengths: row lengths at which ``received_by`` is kept.
        block_bytes: size of the attention scores held at once; what suits the device if None.
    """

    subject: Subject
    total_length: int
    lengths: tuple[int, ...] = ()
    block_bytes: int | None = None

    def stock(self, dtype: torch.dtype, angles: Angles = "model") -> Arithmetic:
        """What transformers does with this model in a dtype under eager attention.

        Most models rotate in their own dtype, some in float32 with cos and sin in one or the other. Which, is
        measured: the rotation of a few tokens must come out to the last bit.

        Raises:
            EngineError: if none of these is what the model does, or it cannot run in that dtype.
        """
        if dtype == torch.float64:
            return EXACT
        choices = {dtype, torch.float32}
        positions, calls = self.subject.with_and_without_rotation(dtype)
        fits = {
            (cos_sin, rotation): self._mismatch(
                stock_arithmetic(dtype, "model", cos_sin, rotation), positions, calls
            )
            for cos_sin in sorted(choices, key=lambda each: each != dtype)
            for rotation in sorted(choices, key=lambda each: each != dtype)
        }
        best = min(fits, key=lambda each: fits[each])
        if fits[best] > LARGEST_MISMATCH:
            raise EngineError(
                f"{type(self.subject.model).__name__} rotates in {str(dtype).removeprefix('torch.')} in a way that the "
                f"audit does not know: {fits[best]:.0%} of the rotated values come out otherwise"
            )
        return stock_arithmetic(dtype, angles, *best)

    def _mismatch(
        self, arithmetic: Arithmetic, positions: Tensor, calls: list[tuple[AttentionCall, AttentionCall]]
    ) -> float:
        """The share of rotated values that come out otherwise than the model's own."""
        wrong = total = 0
        for plain, own in calls:
            rotation = self.subject.layers[plain.layer]
            cos, sin = self._cos_sin(positions, rotation, arithmetic)
            for before, after in ((plain.query, own.query), (plain.key, own.key)):
                ours = rotated(before, cos, sin, rotation, arithmetic).to(after.dtype)
                # What overflows is no number in both.
                wrong += int(((ours != after) & ~(ours.isnan() & after.isnan())).sum())
                total += after.numel()
        return wrong / total

    def run(
        self,
        input_ids: Tensor,
        arithmetic: Arithmetic,
        position_ids: Tensor,
        layout: PackedLayout | None = None,
        keep_hidden: bool = True,
        apart: tuple[Tensor, Arithmetic] | None = None,
        keep_layers: bool = False,
    ) -> Pass:
        """One forward pass.

        Args:
            input_ids: int64 ``[length]``.
            arithmetic: precision of each step.
            position_ids: int64 ``[length]``, below ``total_length``.
            layout: visibility of the row's tokens; positions are ``position_ids`` all the same.
            keep_hidden: whether the pass can give logits.
            apart: bool ``[length]`` and an arithmetic: tokens whose queries and keys are rotated and rounded in that
                one, up to what the product reads.

        Raises:
            RopewalkError: if ids and positions differ in length, or a position is out of range.
        """
        if input_ids.dim() != 1 or len(input_ids) == 0 or input_ids.shape != position_ids.shape:
            raise RopewalkError(
                f"ids and positions must both be [length], got {tuple(input_ids.shape)} and "
                f"{tuple(position_ids.shape)}"
            )
        if not 0 <= int(position_ids.min()) <= int(position_ids.max()) < self.total_length:
            raise RopewalkError(
                f"positions must be 0 to {self.total_length - 1}, got {int(position_ids.min())} to "
                f"{int(position_ids.max())}"
            )
        subject = self.subject
        traces: list[LayerTrace] = []
        kept: list[AttentionCall] = []
        tables: dict[LayerRotation, tuple[Tensor, Tensor]] = {}
        tokens: dict[LayerRotation, RoundedTokens] = {}

        def answer(call: AttentionCall) -> Tensor:
            rotation = subject.layers[call.layer]
            if rotation not in tables:
                tables[rotation] = self._cos_sin(position_ids, rotation, arithmetic)
                if apart is not None:
                    tokens[rotation] = RoundedTokens(*apart, *self._cos_sin(position_ids, rotation, apart[1]))
            output, trace = streamed_attention(
                call,
                *tables[rotation],
                rotation,
                arithmetic,
                layout,
                self.lengths,
                self.block_bytes,
                tokens.get(rotation),
            )
            traces.append(trace)
            if keep_layers:
                nothing = call.value[:, :0].cpu()
                kept.append(replace(call, query=call.query.cpu(), key=call.key.cpu(), value=nothing))
            return output

        with intercepted(subject.model, answer, arithmetic.rest):
            ids = input_ids[None].to(subject.device)
            # Some models use positions beside RoPE too. A mask of ones says that nothing is packed where they restart.
            hidden = decoder_of(subject.model)(
                ids,
                position_ids=position_ids[None].to(subject.device),
                attention_mask=torch.ones_like(ids),
                use_cache=False,
            ).last_hidden_state[0]
        return Pass(
            torch.stack([trace.received for trace in traces]),
            torch.stack([trace.received_by for trace in traces]),
            torch.stack([trace.first_scores for trace in traces]),
            torch.stack([trace.seen_by for trace in traces]),
            torch.stack([trace.even for trace in traces]),
            hidden if keep_hidden else hidden[:0].clone(),
            arithmetic,
            tuple(kept),
            tables if keep_layers else {},
            layout,
            tokens if keep_layers else {},
        )

    def prepared(self, found: Pass, layer: int) -> Prepared:
        """A layer of a pass whose queries and keys were kept, to compute its attention again."""
        call = found.layers[layer]
        device, rotation = self.subject.device, self.subject.layers[layer]
        moved = replace(call, query=call.query.to(device), key=call.key.to(device))
        cos, sin = found.tables[rotation]
        return Prepared(moved, cos, sin, rotation, found.arithmetic, found.layout, found.apart.get(rotation))

    def _cos_sin(
        self, position_ids: Tensor, rotation: LayerRotation, arithmetic: Arithmetic
    ) -> tuple[Tensor, Tensor]:
        subject = self.subject
        if rotation.rotary_dim == 0:
            nothing = torch.zeros(0)
            return nothing, nothing
        if arithmetic.angles == "model":
            return subject.cos_sin(position_ids, arithmetic.cos_sin, rotation.layer_type, self.total_length)
        return exact_cos_sin(subject, position_ids, rotation.layer_type, self.total_length)

    def logits(self, found: Pass, chunk_bytes: int = LOGITS_BYTES) -> Iterator[Tensor]:
        """Logits of a pass, computed in its own arithmetic.

        Args:
            found: a pass of this runner, with its hidden states.
            chunk_bytes: size of the float64 logits held at once.

        Returns:
            float64 ``[tokens, vocab_size]`` for some tokens after the other, in order.
        """
        vocab, width = self.subject.head.linear.weight.shape
        for hidden in found.hidden.split(max(1, chunk_bytes // (8 * vocab))):
            yield self._logits_of(hidden, max(1, chunk_bytes // (8 * width)))

    def _logits_of(self, hidden: Tensor, columns: int) -> Tensor:
        # Not in the generator: it would hold its parts while it waits, and eight of them wait at once.
        head = self.subject.head
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
    subject: Subject, position_ids: Tensor, layer_type: str | None, total_length: int
) -> tuple[Tensor, Tensor]:
    """cos and sin in float64 from the config's RoPE method: ``[length, rotary_dim / 2]`` each."""
    inv_freq, attention_factor = subject.methods[layer_type].frequencies(total_length)
    angles = position_ids.to(subject.device, torch.float64)[:, None] * inv_freq.to(subject.device)
    return angles.cos() * attention_factor, angles.sin() * attention_factor


@dataclass(frozen=True)
class LogitDifference:
    """How two passes differ in their logits.

    Attributes:
        rms: root mean square over positions and vocabulary.
        kl: mean over positions of the Kullback-Leibler divergence of the second's distribution from the first's, nats.
    """

    rms: float
    kl: float


def logit_difference(runner: Runner, reference: Pass, other: Pass) -> LogitDifference:
    """How two passes' next-token predictions differ.

    Args:
        runner: that made both.
        reference: what the other is compared with; KL is the divergence of the other's distribution from its.
        other: of the same row.

    Returns:
        Root mean square of the logits' difference, and Kullback-Leibler divergence in nats a token.
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
    """Tokens of the sequence that the furthest shifted row ends."""
    return max(shifts) + length
