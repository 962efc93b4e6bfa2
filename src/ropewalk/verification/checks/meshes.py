"""Check that the training step on a mesh equals the step in one process, in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.attention.layout import IGNORED, Row
from ropewalk.parallel import Mesh, World
from ropewalk.verification.case import Case, with_labels
from ropewalk.verification.checks import Claim, every_mesh, sharded_and_own
from ropewalk.verification.computing import (
    Difference,
    Values,
    as_in_a_run,
    largest_difference,
    load_on,
    load_whole,
    once,
    packed_losses,
    rounding_budget,
    row_losses,
    trained_steps,
)
from ropewalk.verification.result import Outcome


def ranks_equal_one(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Compare loss, gradient norm and all gradients of two steps; gradients reveal errors that a loss hides.

    On the mesh, the first step uses the recipe's micro-batches and the second accumulates micro-batches of one row.
    """
    model, sizes = load_on(case, mesh, world, torch.float64), (case.rows_per_batch, 1)
    found = trained_steps(model, case.rows, mesh, sizes, case.offload_activations)
    if not world.is_rank_0:
        return Outcome.not_run("")
    # Kept for the next mesh: what one process computes does not depend on it.
    alone = once(case, "steps", lambda: trained_steps(load_whole(case, torch.float64), case.rows))
    # The error of float32 against float64 measures how far this model amplifies rounding; the budget follows from it.
    narrow = once(case, "narrow steps", lambda: trained_steps(load_whole(case, torch.float32), case.rows))
    expected, rough, theirs = (_numbered(steps) for steps in (alone, narrow, found))
    difference = largest_difference(theirs, expected)
    budget = rounding_budget(rough, expected, torch.float64)
    loss = largest_difference(*({"loss": steps["step 1: loss"]} for steps in (theirs, expected))).error
    return Outcome.within(
        difference.error,
        budget,
        "loss, gradient norm and gradients of two steps in float64",
        f"{difference.name} differs from one rank by a relative error of {difference.error:.1e} (the loss by "
        f"{loss:.1e}): {mesh.shape} does not compute this model correctly, so do not train on it",
    )


def _numbered(steps: Sequence[Values]) -> dict[str, Tensor]:
    return {
        f"step {number}: {name}": value
        for number, step in enumerate(steps, 1)
        for name, value in step.items()
    }


def uneven_rows(rows: Sequence[Row]) -> list[Row]:
    """The same rows with very different numbers of targets, in turn: all, one, the last eighth, none."""
    uneven = []
    for number, row in enumerate(rows):
        places = (row.labels != IGNORED).nonzero().flatten()
        # A row without targets is the case in which a mean per row divides by 0.
        keep = (places, places[:1], places[-max(1, len(places) // 8) :], places[:0])[number % 4]
        uneven.append(with_labels(row, keep))
    return uneven


def loss_is_the_mean_of_tokens(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Compare the step's loss and gradients with the sum over all targets divided by their number.

    The step runs on the mesh, and in one process with micro-batches of one row and of the recipe's size.
    """
    # Rows with equal numbers of targets would hide a mean of means.
    rows = uneven_rows(case.rows)
    model, offload = load_on(case, mesh, world, torch.float64), case.offload_activations
    (found,) = trained_steps(model, rows, mesh, (case.rows_per_batch,), offload)
    if not world.is_rank_0:
        return Outcome.not_run("")
    (expected, budget) = once(case, "uneven", lambda: _independent(case, rows))
    step = {f"over {mesh.shape}": found}
    for size in sorted({1, min(case.rows_per_batch, len(rows))}):
        (one,) = once(
            case,
            f"uneven by {size}",
            lambda size=size: trained_steps(  # type: ignore[misc]
                as_in_a_run(load_whole(case, torch.float64), case), rows, None, (size,), offload
            ),
        )
        step[f"in one process, {size} row{'s' * (size > 1)} per micro-batch"] = one
    differences = []
    for where, values in step.items():
        norm = {"gradient norm": _norm(expected)}
        difference = largest_difference(values, {**expected, **norm})
        differences.append(Difference(difference.error, f"{difference.name} {where}"))
    worst = max(differences, key=lambda difference: difference.error)
    counts = ", ".join(str(int((row.labels != IGNORED).sum())) for row in rows)
    return Outcome.within(
        worst.error,
        budget,
        f"rows with {counts} targets; loss and gradients",
        f"{worst.name} differs from the mean over all tokens, for rows with {counts} targets: "
        f"the step's loss is {float(found['loss']):.6f}, the mean over tokens is {float(expected['loss']):.6f}; tokens "
        "of rows with few targets get too much weight",
    )


def _independent(case: Case, rows: Sequence[Row]) -> tuple[Values, float]:
    wide, narrow = (
        row_losses(load_whole(case, d), rows, packed_losses) for d in (torch.float64, torch.float32)
    )
    return wide.values, rounding_budget(narrow.values, wide.values, torch.float64)


def _norm(values: Values) -> Tensor:
    norm: Tensor = torch.stack(
        [v.norm() for name, v in values.items() if name.startswith("gradient of")]
    ).norm()
    return norm


CLAIMS = (
    Claim(
        "ranks",
        70,
        "{ranks} ranks = 1 rank, {mesh}",
        "the training step on a mesh with one process",
        ranks_equal_one,
        every_mesh,
    ),
    Claim(
        "loss",
        80,
        "loss normalisation, {mesh}",
        "the step with a plain mean over all targets",
        loss_is_the_mean_of_tokens,
        sharded_and_own,
    ),
)
