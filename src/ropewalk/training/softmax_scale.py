"""The softmax scale of a model without RoPE: measured on the final weights, and folded into the exported ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ropewalk.attention.layout import Row
from ropewalk.errors import RunFailure
from ropewalk.evaluation.backends.likelihoods import RowLosses, has_target, row_losses
from ropewalk.evaluation.backends.protocol import evaluating
from ropewalk.evaluation.backends.sharded import row_losses_of
from ropewalk.models.compute.losses import LossModel
from ropewalk.models.softmax_scale import scaled_softmax
from ropewalk.training.checkpoint.sharded import load_weights
from ropewalk.training.recipe.softmax_scale import UNSCALED, SoftmaxScale
from ropewalk.training.resolved import AtStage, RopeAt, load_for_run
from ropewalk.training.stage_rope.search import WantedRows, rows_for_search
from ropewalk.training.update.step import autocast


def choose_softmax_scale(
    settings: SoftmaxScale, wanted: WantedRows, rope: RopeAt, at: AtStage
) -> dict[str, Any]:
    """Measure every scale on the same rows, and choose the one with the lowest objective.

    Args:
        settings: scales and lengths.
        wanted: the rows, of the longest length.
        rope: RoPE method of the result.
        at: state of the run after its last stage; every rank must call this function.

    Returns:
        JSON values: the chosen ``scale``; ``lengths``, number of rows (``documents``), their ``text`` and ``sha256``;
            and ``scales``, each with its losses in nats per token, one for each length, and their mean, the
            ``objective``; both are null if they are not finite.

    Raises:
        RopewalkError: if the documents do not fill the rows.
        RunFailure: if no scale has a finite loss.
    """
    resolved, context = at.resolved, at.context
    data = context.world.on_rank_0(lambda: rows_for_search(wanted, at))
    here = resolved.stages[-1]
    model = load_for_run(resolved, context, resolved.model, rope, here.compute_dtype)
    assert at.weights is not None
    load_weights(at.weights, model, context.world, context.mesh)
    losses_of = row_losses_of(model, context.mesh) or partial(_own_losses, model)
    found = []
    total = len(settings.candidates)
    with (
        context.rank_0_reporter.bar("softmax scale", total) as advance,
        autocast(resolved.device, here.precision, context.mesh is not None),
    ):
        for number, scale in enumerate(settings.candidates, start=1):
            with scaled_softmax(model.model, scale), evaluating(model.model):
                losses = _losses(data.rows, losses_of, settings.lengths)
            found.append((scale, losses, sum(losses) / len(losses)))
            advance(number, f"scale {scale:g}")
    # The first of equal ones is taken, and 1 comes first.
    best = min(found, key=lambda each: each[2] if math.isfinite(each[2]) else math.inf)
    if not math.isfinite(best[2]):
        raise context.world.known_to_all(
            RunFailure("the loss of every softmax scale is NaN or infinite; check the last checkpoint")
        )
    return {
        "scale": best[0],
        "lengths": list(settings.lengths),
        "documents": len(data.rows),
        "text": data.source,
        "sha256": data.sha256,
        "scales": [
            {"scale": scale, "losses": [_or_none(loss) for loss in losses], "objective": _or_none(objective)}
            for scale, losses, objective in found
        ],
    }


def describe_softmax_scale(found: dict[str, Any]) -> str:
    """One sentence on a result of :func:`choose_softmax_scale`, without a full stop."""
    objective = {each["scale"]: each["objective"] for each in found["scales"]}
    lengths, scale = ", ".join(f"{length:,}" for length in found["lengths"]), found["scale"]
    loss = f"mean loss {objective[scale]:.4f} nats per token at {lengths} tokens"
    if scale == UNSCALED:
        return f"1, because no other is better: {loss}"
    without = "not finite" if objective[UNSCALED] is None else f"{objective[UNSCALED]:.4f}"
    return f"{scale:g}, folded into the weights: {loss}, {without} without"


def _losses(rows: Sequence[Row], losses_of: RowLosses, lengths: Sequence[int]) -> list[float]:
    """Mean loss per token of the first so many tokens of all rows, for each length."""
    sums, counts = [0.0] * len(lengths), [0] * len(lengths)
    for row, losses in zip(rows, losses_of(rows), strict=True):
        targets = has_target(row)
        for number, length in enumerate(lengths):
            # The loss at an index is that of the token after it.
            sums[number] += float(losses[: length - 1].sum())
            counts[number] += int(targets[: length - 1].sum())
    return [total / count for total, count in zip(sums, counts, strict=True)]


def _own_losses(model: LossModel, rows: Sequence[Row]) -> Any:
    return (row_losses(model.model, model.head, row) for row in rows)


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None
