"""Mitigations of the drift: changes of arithmetic and of layout, each measured on the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ropewalk.attention.choices import Positions
from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.ablation import Comparison, run_shifts, shift_changes
from ropewalk.audit.arithmetic import EXACT, Arithmetic
from ropewalk.audit.passes import Pass, Runner
from ropewalk.audit.results import Mitigation
from ropewalk.errors import RopewalkError


@dataclass(frozen=True)
class Change:
    """One way to run a model.

    Attributes:
        arithmetic: precision of each step.
        layout: visibility and positions of the documents; None for a plain row.
    """

    arithmetic: Arithmetic
    layout: PackedLayout | None = None


def changes(eager: Arithmetic, layout: PackedLayout) -> dict[str, Change]:
    """The ways that are compared, by name: two of stock transformers, then the mitigations.

    Each is an arithmetic that real kernels can run: fused kernels take queries, keys and values in one dtype, so a
    float32 product means attention in float32, including its weights and values. Each arithmetic after ``exact angles``
    includes the earlier steps: a float32 rotation uses exact angles, and a more precise product uses the float32
    rotation.

    Args:
        eager: arithmetic of transformers for the model under eager attention.
        layout: documents of the row.
    """
    dtype, documents = eager.rest, documents_of(layout)
    # Fused kernels (FlashAttention, SDPA) keep the scores in float32.
    fused = replace(eager, scores=torch.float32)
    rotation = replace(fused, angles="exact", cos_sin=torch.float32, rotation=torch.float32)
    found = {
        "eager attention": Change(eager),
        "fused attention": Change(fused),
        "exact angles": Change(replace(fused, angles="exact")),
        "float32 rotation": Change(rotation),
        "tf32 attention": Change(replace(rotation, product="tf32", weights=torch.float32)),
        "split product": Change(replace(rotation, product="split")),
        "float32 attention": Change(replace(rotation, product="float32", weights=torch.float32)),
        "anchor layout": Change(fused, anchored(documents)),
        "positions reset": Change(fused, separated(documents)),
    }
    if dtype != torch.bfloat16:
        # The split is into two bfloat16 numbers: other dtypes lose range or precision in it.
        del found["split product"]
    # A float32 model rotates and multiplies in float32 anyway, so the other rows would repeat these.
    if dtype == torch.float32:
        return {
            name: found[name]
            for name in (
                "eager attention",
                "fused attention",
                "exact angles",
                "anchor layout",
                "positions reset",
            )
        }
    return found


def measure_mitigations(
    runner: Runner,
    rows: Sequence[Tensor],
    layouts: Sequence[PackedLayout],
    eager: Arithmetic,
    shifts: tuple[int, int],
    delta2: int = 16,
) -> tuple[Mitigation, ...]:
    """D near and far, and the error of the logits, for each way of running the model.

    D is what arithmetic causes. A layout may itself change relative positions with the shift (documents move and the
    anchor does not); the change in float64 is then subtracted.

    Args:
        runner: runner of the model.
        rows: token ids, int64 ``[length]`` each.
        layouts: documents of each row.
        eager: arithmetic of transformers for the model under eager attention.
        shifts: delta1 near and far, in tokens.
        delta2: the shift in tokens that they are compared with.

    Returns:
        One value for each way, in the order of :func:`changes`.

    Raises:
        RopewalkError: if a row is too short to cut into documents, or a shift does not fit in the runner's
            ``total_length``.
    """
    near, far = shifts
    wanted = [near, far, delta2]
    sums: dict[str, tuple[Comparison, Comparison]] = {}
    for row, layout in zip(rows, layouts, strict=True):
        plain: dict[int, Pass] = {}
        for name, change in changes(eager, layout).items():
            if change.layout is None:
                # All mitigations without a layout of their own share one exact reference.
                plain = plain or run_shifts(runner, row, EXACT, wanted)
                exact = plain
            else:
                exact = run_shifts(runner, row, EXACT, wanted, change.layout)
            found = run_shifts(runner, row, change.arithmetic, wanted, change.layout)
            at_near, at_far = sums.setdefault(name, (Comparison(), Comparison()))
            # In float64 the attention of a plain row does not change with the shift, so nothing is subtracted.
            true = None if change.layout is None else exact
            D = shift_changes(runner, found, (near, far), delta2, true)
            for shift, at in ((near, at_near), (far, at_far)):
                at.add(runner, D[shift], found[shift], found[delta2], exact[shift])
            runner.advance()
    return tuple(
        Mitigation(name, near, delta2, a.D, far, b.D, a.logit_error, a.kl) for name, (a, b) in sums.items()
    )


QUARTERS = 4
"""Number of documents that a row of one long document is cut into, so that layouts have documents to separate."""


def documents_of(layout: PackedLayout) -> PackedLayout:
    """A row's documents in one plain causal sequence; a row of one document is cut into four quarters.

    Raises:
        RopewalkError: if there are too few tokens for that.
    """
    lengths, documents = layout.cu_seqlens.diff().tolist(), layout.segment_documents.tolist()
    # The anchor stands before the first segment; without it, its tokens belong to that segment again.
    lengths[0] += layout.anchor_length
    # Layout mitigations act at the boundaries of documents, and a row of one document has none.
    if len(set(documents)) == 1:
        total = layout.total_length
        if total < 2 * QUARTERS:
            raise RopewalkError(
                f"a row of one document must have {2 * QUARTERS} tokens or more, because the audit "
                f"cuts such a row into {QUARTERS} documents, got {total} tokens"
            )
        quarter = total // QUARTERS
        lengths, documents = (
            [quarter] * (QUARTERS - 1) + [total - quarter * (QUARTERS - 1)],
            list(range(QUARTERS)),
        )
    return PackedLayout.from_segments(lengths, documents, "full", 0)


def anchored(layout: PackedLayout) -> PackedLayout:
    """The same documents under the pattern ``anchor``. Without an anchor, the first token of the row becomes one."""
    return _again(layout, "anchor", max(1, layout.anchor_length))


def separated(layout: PackedLayout) -> PackedLayout:
    """The same documents separately, each at positions from 0; an anchor becomes part of the first one."""
    return _again(layout, "intra_document", 0)


def _again(
    layout: PackedLayout, pattern: Literal["anchor", "intra_document"], anchor_length: int
) -> PackedLayout:
    lengths = layout.cu_seqlens.diff().tolist()
    lengths[0] += layout.anchor_length - anchor_length
    # A document disappears if its only token became the anchor; the others are renumbered from 0.
    kept = [(n, doc) for n, doc in zip(lengths, layout.segment_documents.tolist(), strict=True) if n]
    numbers = {doc: number for number, doc in enumerate(sorted({doc for _, doc in kept}))}
    positions: Positions = "reset" if pattern == "intra_document" else "continuous"
    return PackedLayout.from_segments(
        [n for n, _ in kept], [numbers[doc] for _, doc in kept], pattern, anchor_length, positions
    )
