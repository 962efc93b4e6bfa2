"""The flex engine: FlexAttention with a block mask built in closed form. CUDA, or forward only on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo_config
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ropewalk.attention.engines.blocks import padded_lists, touched_blocks
from ropewalk.attention.engines.capabilities import SIMULATED
from ropewalk.attention.engines.runs import Gather, sort_by_document, sort_rows, unsort_rows
from ropewalk.attention.engines.simulated_flex import simulated_flex
from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import EVERYTHING, AttentionOptions, Locality
from ropewalk.attention.spans import Spans

MOST_GRAPHS = 64
"""Most graphs compiled in one process; each takes seconds, and an evaluation may have many different lengths."""

BLOCK_SIZE = 128
"""FlexAttention's own block size; the last block of a row may be incomplete."""


@dataclass(frozen=True, eq=False)
class FlexPlan:
    """Attributes: the block mask; the gather that sorts by document, None if every row is already sorted; the number of
    pairs of query and key that the rows see."""

    block_mask: BlockMask
    by_document: Gather | None
    pairs: int


def plan(layouts: Sequence[PackedLayout], device: torch.device, locality: Locality) -> FlexPlan:
    pairs = sum(Spans.of(layout, locality).pairs for layout in layouts)
    return FlexPlan(block_mask_of(layouts, device, locality), sort_by_document(layouts, device), pairs)


def block_mask_of(
    layouts: Sequence[PackedLayout], device: torch.device, locality: Locality = EVERYTHING
) -> BlockMask:
    """A ``BlockMask`` with one batch entry for each row, whose tokens are in (document, order) order.

    Its four tables have an entry for every pair of blocks, as FlexAttention documents them: its compiled CPU kernel
    rejects narrower tables, and each width would need another graph. The cost is 16 bytes for each pair of blocks and
    row: 16 MiB for a row of 128K tokens, 1 GiB for one of 1M.
    """
    blocks = [touched_blocks(layout, BLOCK_SIZE, locality) for layout in layouts]
    partial, full = [b.partial for b in blocks], [b.full for b in blocks]
    num_blocks, total = blocks[0].num_blocks, layouts[0].total_length
    fields: dict[str, Any] = {}
    # The forward pass reads the key blocks of each query block, the backward pass also the query blocks of each key
    # block.
    for by, side in ((0, "kv"), (1, "q")):
        for pairs, name in ((partial, side), (full, f"full_{side}")):
            counts, indices = padded_lists(pairs, num_blocks, by)
            fields[f"{name}_num_blocks"] = torch.from_numpy(counts).to(device)
            fields[f"{name}_indices"] = torch.from_numpy(indices).to(device)
    return BlockMask(
        seq_lengths=(total, total),
        **fields,
        BLOCK_SIZE=(BLOCK_SIZE, BLOCK_SIZE),
        mask_mod=_mask_mod(layouts, device, locality),
    )


def _mask_mod(
    layouts: Sequence[PackedLayout], device: torch.device, locality: Locality
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The visibility rule for one pair of tokens; under ``full`` all tokens of a row share one document."""
    documents = torch.stack(
        [
            torch.zeros_like(layout.document_ids)
            if layout.pattern == "full"
            else layout.document_ids[layout.storage_in_order]
            for layout in layouts
        ]
    ).to(device)
    # A tensor instead of Python numbers: captured numbers would be compiled into the kernel, once for each value.
    anchors = torch.tensor(
        [layout.anchor_length if layout.pattern == "anchor" else 0 for layout in layouts], device=device
    )

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & ((documents[b, q] == documents[b, k]) | (k < anchors[b]))

    window, chunk = locality.window, locality.chunk
    if window is None and chunk is None:
        return visible
    # Windows and chunks count tokens of a run, not of the row.
    places = torch.stack([layout.run_index[layout.storage_in_order] for layout in layouts]).to(device)

    def visible_nearby(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = visible(b, h, q, k)
        if window is not None:
            seen = seen & (places[b, q] - places[b, k] < window)
        if chunk is not None:
            seen = seen & (places[b, q] // chunk == places[b, k] // chunk)
        return seen

    return visible_nearby


def run(q: Tensor, k: Tensor, v: Tensor, plan: FlexPlan, options: AttentionOptions) -> Tensor:
    if plan.by_document is not None:
        # In document order visible keys form few blocks; interleaved, almost every block would be partly visible.
        q, k, v = (sort_rows(x, plan.by_document) for x in (q, k, v))
    out, lse = _attention(q, k, v, plan, options)
    if options.sinks is not None:
        # With one more score in the softmax, the keys keep exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink).
        share = torch.sigmoid(lse - options.sinks.to(lse.dtype)[:, None])
        out = out * share[..., None].to(out.dtype)
    return out if plan.by_document is None else unsort_rows(out, plan.by_document)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, plan: FlexPlan, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Output without sinks, and its log-sum-exp ``[B, H, T]``."""
    if q.device.type == SIMULATED:
        return simulated_flex(q, k, v, plan.pairs)
    out, auxiliary = _kernel(q.device.type)(
        q,
        k,
        v,
        score_mod=None if options.softcap is None else _soft_cap(options.softcap),
        block_mask=plan.block_mask,
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    return out, auxiliary.lse


@cache
def _soft_cap(softcap: float) -> Callable[..., Tensor]:
    """One function object for each value: a new object would make torch compile the kernel again."""

    def cap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return softcap * torch.tanh(score / softcap)

    return cap


@cache
def _kernel(device_type: str) -> Callable[..., Any]:
    return compiled() if device_type == "cuda" else _uncompiled


def compiled(backend: str = "inductor") -> Callable[..., Any]:
    """FlexAttention compiled by torch: one graph for each length and number of rows, with and without gradients.

    By default torch runs it uncompiled after eight graphs, which materialises the scores of all pairs. This version
    raises an error instead.
    """
    kernel = torch.compile(flex_attention, dynamic=False, backend=backend)

    def call(*args: Any, **options: Any) -> Any:
        limits = {"recompile_limit": MOST_GRAPHS, "fail_on_recompile_limit_hit": True}
        with dynamo_config.patch(limits):
            return kernel(*args, **options)

    return call


def _uncompiled(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    """FlexAttention's dense evaluation, for checks on a CPU, where it has no backward pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        # On the CPU it rejects inputs that require a gradient, even under no_grad.
        return flex_attention(q.detach(), k.detach(), v.detach(), **options)
