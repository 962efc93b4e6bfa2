"""Recurrent layers of rows that are spread over ranks: each rank's fragments start from the state before them.

A mixer runs on the tokens of its rank in the order of the shard. transformers' code for everything but the recurrence
treats each token by itself. The functions that do not are globals of the module of the mixer's class: a causal
convolution, and a rule or scan. In a sharded call, the code of the class's forward runs with globals of its own, in
which these functions go through the fragments (:mod:`ropewalk.parallel.fragments`). No class or module is changed.

The rule runs twice: over fragments that others follow, for the state behind them, which is passed on; then over all
fragments, from the states that came. One pass with a correction for the incoming state would be less exact in bfloat16.

This is the only module that knows what the functions of transformers' mixers take and return. MiniMax's mixer has its
recurrence in line, so here its forward is written again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.attention.layout import cached_per_layout
from ropewalk.errors import EngineError
from ropewalk.models.attention.kernels import FUNCTIONS, functions_of, kernel_parameters, played
from ropewalk.models.attention.runs import RunBatch, RunBatches, batches_by_length, one_row
from ropewalk.models.compute.own_globals import with_globals
from ropewalk.models.config.layers import LIGHTNING
from ropewalk.parallel import ShardedLayouts
from ropewalk.parallel.fragments import Fragments, StatePlan, fragments_of, halo_plan, state_plan
from ropewalk.parallel.states import convolve, incoming_states

# Shapes: B rows, n tokens of the rank in a row, H heads, D dimensions of a key, V of a value; R runs of a batch, which
# are fragments here, padded to L tokens.

Summary = tuple[Tensor, Tensor]
"""What a fragment does to a state: the state behind it if it starts from zero, and the factors of the state before."""


@dataclass(frozen=True)
class _Ranks:
    """The fragments of a batch of rows, and this process's place among the ranks that hold them."""

    fragments: Fragments
    rank: int
    group: Any

    @classmethod
    def of(cls, sharded: ShardedLayouts) -> _Ranks:
        groups = sharded.groups
        return cls(fragments_of(sharded.layouts, sharded.rows), groups.rank, groups.row_group)

    def recur(
        self,
        inputs: tuple[Tensor, ...],
        summarize: Callable[..., Summary],
        compute: Callable[..., Tensor],
        by_boundaries: bool = False,
    ) -> Tensor:
        """A recurrence over the runs.

        Args:
            inputs: ``[B, n, ...]`` each. At zeros, a token must leave the state as it is: they are the padding.
            summarize: from a batch and its inputs ``[R, L, ...]`` the summaries of its runs.
            compute: from a batch, the states before its runs, and its inputs the outputs ``[R, L, ...]``.
            by_boundaries: whether both take runs one after another, with ``batch.cu_seqlens``, instead of padded ones.

        Returns:
            ``[B, n, ...]``.
        """
        flat = [x.flatten(0, 1) for x in inputs]
        device = flat[0].device
        plan = state_plan(self.fragments, self.rank, device)
        every, leading = _batches(plan, by_boundaries, device)
        states = None
        if plan.sent.anywhere:
            found = [summarize(batch, *map(batch.padded, flat)) for batch in leading.batches]
            added, factors = (
                torch.cat(each).index_select(0, leading.runs_back) for each in zip(*found, strict=True)
            )
            states = incoming_states(added, factors, plan, self.group)
        outputs = []
        for batch in every.batches:
            before = (
                None
                if states is None
                else states.index_select(0, plan.initial.index_select(0, batch.numbers))
            )
            outputs.append(batch.unpadded(compute(batch, before, *map(batch.padded, flat))))
        merged = torch.cat(outputs).index_select(0, every.back)
        rows: Tensor = merged.unflatten(0, inputs[0].shape[:2])  # type: ignore[no-untyped-call]
        return rows


@cached_per_layout
def _batches(plan: StatePlan, by_boundaries: bool, device: torch.device) -> tuple[RunBatches, RunBatches]:
    """All fragments of a rank, and those whose summary it sends; one token stands for none."""
    lengths = plan.lengths
    tokens = plan.tokens.split(lengths.tolist())
    leading = [tokens[number] for number in plan.leading.tolist()] or [plan.tokens[:1]]
    batches = one_row if by_boundaries else batches_by_length
    return (
        batches(plan.tokens, lengths, device),
        batches(torch.cat(leading), torch.tensor([len(each) for each in leading]), device),
    )


def passed(
    mixer: nn.Module, recurrence: str, sharded: ShardedLayouts, hidden: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """The forward of a recurrent mixer for this rank's part of rows; every rank that shares the rows must call it.

    Args:
        mixer: recurrent mixer of a layer.
        recurrence: its recurrence.
        sharded: layouts of the whole rows and the tokens of this rank.
        hidden: ``[B, n, hidden_size]``, with padding.
        args, kwargs: further arguments of the mixer, without a cache.

    Returns:
        What the mixer returns.

    Raises:
        EngineError: if transformers' mixer does not call the functions that pass a state on.
    """
    ranks = _Ranks.of(sharded)
    if recurrence == LIGHTNING:
        return _lightning_attention(mixer, ranks, hidden), None
    forward = inspect.unwrap(type(mixer).forward)
    functions = functions_of(mixer, recurrence)
    if functions is None:
        missing = next(name for name in FUNCTIONS[recurrence] if name not in forward.__code__.co_names)
        raise EngineError(
            f"the installed transformers computes {type(mixer).__name__} without {missing}, so its state cannot "
            "pass between ranks; install transformers 5.24, or set parallel.ring and parallel.sequence to 1"
        )
    own = {name: WRAPPED[name](function, ranks) for name, function in functions.items()}
    return with_globals(forward, own)(mixer, hidden, *args, **kwargs)


def _convolution(own: Callable[..., Tensor], ranks: _Ranks) -> Callable[..., Tensor]:
    def over_ranks(
        hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Any = None, **_: Any
    ) -> Tensor:
        plan = halo_plan(ranks.fragments, ranks.rank, weight.shape[-1] - 1, hidden_states.device)
        return convolve(
            hidden_states, plan, ranks.group, lambda x: own(x, weight, bias, activation=activation)
        )

    return over_ranks


def _delta_rule(own: Callable[..., Any], ranks: _Ranks) -> Callable[..., Any]:
    """Of gated DeltaNet and Kimi. Without a kernel that takes states, transformers' torch code runs."""
    taken = kernel_parameters(own)
    if taken and not {"initial_state", "output_final_state"} <= set(taken):
        own, taken = inspect.unwrap(own), ()
    by_boundaries = "cu_seqlens" in taken

    def over_ranks(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool,
        **_: Any,
    ) -> tuple[Tensor, None]:
        def rule(
            batch: RunBatch, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **states: Any
        ) -> Any:
            if by_boundaries:
                states["cu_seqlens"] = batch.cu_seqlens
            return own(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **states)

        def summarize(batch: RunBatch, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Summary:
            # Columns of a state do not mix. Those of the unit matrix, to which no value is added, become the factors.
            dim, value_dim = k.shape[3], v.shape[3]
            unit = torch.eye(dim, dim + value_dim, dtype=_wide(v), device=v.device).roll(value_dim, 1)
            unit = unit.expand(batch.runs, v.shape[2], -1, -1).contiguous()
            _, state = rule(
                batch, q, k, F.pad(v, (0, dim)), g, beta, initial_state=unit, output_final_state=True
            )
            return state[..., :value_dim], state[..., value_dim:]

        def compute(batch: RunBatch, state: Tensor | None, *inputs: Tensor) -> Tensor:
            output: Tensor = rule(batch, *inputs, initial_state=state, output_final_state=False)[0]
            return output

        return ranks.recur((query, key, value, g, beta), summarize, compute, by_boundaries), None

    return over_ranks


def _scan(own: Callable[..., Any], ranks: _Ranks) -> Callable[..., Tensor]:
    """Of Mamba-2. Without a kernel that takes states, transformers' torch code runs."""
    taken = kernel_parameters(own)
    if taken and not {"initial_states", "return_final_states"} <= set(taken):
        own = inspect.unwrap(own)

    def over_ranks(
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: Any,
    ) -> Tensor:
        # Step sizes are computed before the padding comes: a bias, or a limit above 0, would make it count.
        dt = dt.to(_wide(dt))
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)

        def summarize(batch: RunBatch, x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Summary:
            _, state = own(x, dt, A, B, C, chunk_size, return_final_states=True)
            return state, torch.exp(A.to(dt.dtype) * dt.sum(1))[..., None, None]

        def compute(
            batch: RunBatch, state: Tensor | None, x: Tensor, dt: Tensor, B: Tensor, C: Tensor
        ) -> Tensor:
            output: Tensor = own(x, dt, A, B, C, chunk_size, D, initial_states=state)
            return output

        return ranks.recur((hidden_states, dt, B, C), summarize, compute)

    return over_ranks


def _no_fused_training(own: Callable[..., Any], ranks: _Ranks) -> Callable[..., None]:
    # As without the kernel, which takes neither halos nor states: the mixer then calls the other functions.
    return lambda *args, **kwargs: None


WRAPPED: dict[str, Callable[[Callable[..., Any], _Ranks], Callable[..., Any]]] = {
    "causal_conv1d_fn": _convolution,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _scan,
    "mamba2_split_conv1d_scan_combined": _no_fused_training,
}
"""For each function in :data:`ropewalk.models.attention.kernels.FUNCTIONS` what makes it go through fragments."""


def _lightning_attention(mixer: Any, ranks: _Ranks, hidden: Tensor) -> Tensor:
    """MiniMax's mixer."""
    heads = mixer.act_fn(mixer.qkv_proj(hidden)).unflatten(2, (mixer.num_attention_heads, -1))
    q, k, v = heads.split(mixer.head_dim, dim=3)
    # [H], the logarithm of the factor by which a token makes the state smaller.
    rate = -mixer.slope_rate.flatten().to(_wide(q))

    def summarize(batch: RunBatch, q: Tensor, k: Tensor, v: Tensor) -> Summary:
        left = (batch.lengths[:, None] - 1 - torch.arange(k.shape[1], device=q.device)).clamp(min=0)
        k = k * torch.exp(left[..., None] * rate)[..., None]
        added = torch.einsum("rlhd,rlhe->rhde", k, v.to(k.dtype))
        return added, torch.exp(batch.lengths[:, None] * rate)[..., None, None]

    def compute(batch: RunBatch, state: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        lightning = played(LIGHTNING, _lightning, mixer.block_size)
        output: Tensor = lightning(q, k, v, rate, mixer.block_size, state)
        return output

    attended = mixer.norm(ranks.recur((q, k, v), summarize, compute).flatten(2))
    output: Tensor = mixer.out_proj(F.sigmoid(mixer.output_gate(hidden)) * attended)
    return output


def _lightning(
    q_RLHD: Tensor, k_RLHD: Tensor, v_RLHD: Tensor, rate_H: Tensor, block: int, state: Tensor | None
) -> Tensor:
    """``[R, L, H, D]``: linear attention with decay, block by block.

    Source: lightning attention, arXiv:2401.04658, algorithm 1.
    """
    rate = rate_H[:, None, None]
    heads = [x.transpose(1, 2) for x in (q_RLHD, k_RLHD, v_RLHD)]
    if state is None:
        state = rate.new_zeros(*heads[0].shape[:2], q_RLHD.shape[3], v_RLHD.shape[3])
    outputs = []
    for q, k, v in zip(*(x.split(block, 2) for x in heads), strict=True):
        length = q.shape[2]
        place = torch.arange(1, length + 1, device=q.device)[:, None]
        within = torch.exp((place - place.T).clamp(min=0) * rate).tril().to(q.dtype)
        before = q * torch.exp(place * rate).to(q.dtype)
        outputs.append((q @ k.mT * within) @ v + before @ state.to(q.dtype))
        behind = k * torch.exp((length - place) * rate).to(k.dtype)
        state = state * torch.exp(length * rate) + behind.mT @ v
    return torch.cat(outputs, 2).transpose(1, 2)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
