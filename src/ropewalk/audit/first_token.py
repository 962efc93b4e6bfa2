"""Whether the first token's position acts as an absolute reference: two experiments on the first token and the others.

*Moving*: only the first token moves, or only the others, or the whole row. In exact arithmetic moving the whole row
changes nothing, while moving a part changes relative positions; the audited dtype's additional change is arithmetic's.

*Rounding*: the whole row moves, and only the first token's queries and keys, or only those of the others, are rotated
and rounded as in the audited arithmetic. Relative positions stay equal, so every change is due to that rounding and can
be divided: each part gets the mean over both orders of rounding (Shapley value), and the two parts add up to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ropewalk.audit.arithmetic import EXACT, Arithmetic
from ropewalk.audit.differences import Term, differences, share
from ropewalk.audit.passes import Pass, Runner, shifted
from ropewalk.audit.results import FirstTokenEffect, Shifted

MOVES: tuple[Shifted, ...] = ("first", "others", "all")


def placements(length: int, delta1: int, delta2: int) -> dict[str, Tensor]:
    """Positions ``[length]`` where nothing, the first token, the others, or all tokens move from delta1 to delta2."""
    at, to = shifted(length, delta1), shifted(length, delta2)
    return {
        "none": at,
        "first": torch.cat([to[:1], at[1:]]),
        "others": torch.cat([at[:1], to[1:]]),
        "all": to,
    }


def tokens_of(move: Shifted, length: int) -> Tensor:
    """bool ``[length]``: the tokens that a move affects."""
    is_first = torch.arange(length) == 0
    return {"first": is_first, "others": ~is_first, "all": torch.ones(length, dtype=torch.bool)}[move]


def first_token_effects(
    runner: Runner,
    rows: Sequence[Tensor],
    arithmetic: Arithmetic,
    delta1: int = 0,
    delta2: int = 16,
) -> tuple[FirstTokenEffect, ...]:
    """Changes of attention and logits when the first token, the others, or all tokens are moved or rounded.

    Args:
        runner: runner of the model.
        rows: token ids, int64 ``[length]`` each.
        arithmetic: the audited arithmetic.
        delta1, delta2: shifts before and after the move, in tokens.

    Returns:
        Effects of ``first``, ``others`` and ``all``: means over rows; for logits the root of the mean square.

    Raises:
        RopewalkError: if a shift does not fit in the runner's ``total_length``.
    """
    sums = {move: _Sums() for move in MOVES}
    for row in rows:
        _add_moves(sums, runner, row, arithmetic, placements(len(row), delta1, delta2))
        _add_rounding(sums, runner, row, arithmetic, (delta1, delta2))
        runner.advance()
    return tuple(sums[move].effect(move, delta1, delta2, len(rows)) for move in MOVES)


@dataclass
class _Sums:
    """Sums over rows: D, mean squares of logit differences, and the products from which shares are computed."""

    D: dict[str, float] = field(default_factory=dict)
    squares: dict[str, float] = field(default_factory=dict)
    part: dict[str, float] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)

    def add_difference(self, name: str, D: float) -> None:
        self.D[name] = self.D.get(name, 0.0) + D

    def add_squares(self, name: str, change: Tensor, length: int) -> None:
        # Divided by the whole row, so that the sum over its chunks is a mean over its tokens.
        self.squares[name] = self.squares.get(name, 0.0) + float(change.square().mean(-1).sum()) / length

    def add_share(self, name: str, part: float, whole: float) -> None:
        """Add a part's contribution to the size of the whole, and that size."""
        self.part[name] = self.part.get(name, 0.0) + part
        self.whole[name] = self.whole.get(name, 0.0) + whole

    def effect(self, move: Shifted, delta1: int, delta2: int, rows: int) -> FirstTokenEffect:
        def share(name: str) -> float:
            return self.part[name] / self.whole[name] if self.whole[name] else math.nan

        D = {name: total / rows for name, total in self.D.items()}
        logit = {name: math.sqrt(total / rows) for name, total in self.squares.items()}
        return FirstTokenEffect(
            delta1=delta1,
            delta2=delta2,
            shifted=move,
            D=D["low"],
            D_exact=D["exact"],
            D_arithmetic=D["arithmetic"],
            D_rounding=D["rounding"],
            share_of_D=share("attention"),
            logit_difference=logit["low"],
            logit_exact=logit["exact"],
            logit_arithmetic=logit["arithmetic"],
            logit_rounding=logit["rounding"],
            share_of_logits=share("logits"),
        )


def _add_moves(
    sums: Mapping[Shifted, _Sums],
    runner: Runner,
    row: Tensor,
    arithmetic: Arithmetic,
    placed: Mapping[str, Tensor],
) -> None:
    # Moved in the model's arithmetic and exactly: what is left of their difference is due to the arithmetic alone.
    low = {name: _run(runner, row, arithmetic, at) for name, at in placed.items()}
    exact = {name: _run(runner, row, EXACT, at) for name, at in placed.items()}
    wanted: dict[tuple[Shifted, str], list[Term]] = {}
    for move in sums:
        wanted[move, "low"] = [(1, low[move]), (-1, low["none"])]
        wanted[move, "exact"] = [(1, exact[move]), (-1, exact["none"])]
        less_true: list[Term] = [(-factor, found) for factor, found in wanted[move, "exact"]]
        wanted[move, "arithmetic"] = [*wanted[move, "low"], *less_true]
    for (move, name), change in differences(runner, wanted).items():
        sums[move].add_difference(name, change.D)
    names = list(placed)
    # One chunk at a time: eight full sets of logits of a long row would not fit in memory.
    for chunks in zip(*(runner.logits(found[name]) for found in (low, exact) for name in names), strict=True):
        given = dict(zip(names, chunks[: len(names)], strict=True))
        meant = dict(zip(names, chunks[len(names) :], strict=True))
        for move, one in sums.items():
            change, true = given[move] - given["none"], meant[move] - meant["none"]
            one.add_squares("low", change, len(row))
            one.add_squares("exact", true, len(row))
            one.add_squares("arithmetic", change - true, len(row))


def _add_rounding(
    sums: Mapping[Shifted, _Sums],
    runner: Runner,
    row: Tensor,
    arithmetic: Arithmetic,
    shifts: tuple[int, int],
) -> None:
    found = {
        move: [
            # Here the whole row moves, and only the tokens of `move` are rounded.
            _run(runner, row, EXACT, shifted(len(row), shift), (tokens_of(move, len(row)), arithmetic))
            for shift in shifts
        ]
        for move in MOVES
    }
    terms: dict[Shifted, list[Term]] = {move: [(1, a), (-1, b)] for move, (a, b) in found.items()}
    for move, change in differences(runner, terms).items():
        sums[move].add_difference("rounding", change.D)
    added, total = share(runner, terms["all"], _first_of(terms))
    for move, part in (("first", added), ("others", total - added), ("all", total)):
        sums[move].add_share("attention", part, total)
    for chunks in zip(*(runner.logits(each) for move in MOVES for each in found[move]), strict=True):
        # The zip above lists the two shifts of each move side by side.
        moved = {move: chunks[2 * n] - chunks[2 * n + 1] for n, move in enumerate(MOVES)}
        parts = _parts(moved)
        for move, one in sums.items():
            one.add_squares("rounding", moved[move], len(row))
            # Each part counts by its contribution to the sum of squares.
            whole = moved["all"]
            one.add_share("logits", float((parts[move] * whole).sum()), float(whole.square().sum()))


def _run(
    runner: Runner,
    row: Tensor,
    arithmetic: Arithmetic,
    position_ids: Tensor,
    apart: tuple[Tensor, Arithmetic] | None = None,
) -> Pass:
    return runner.run(row, arithmetic, position_ids, apart=apart, keep=("hidden", "layers"))


def _first_of(terms: Mapping[Shifted, Sequence[Term]]) -> list[Term]:
    """The first token's part of the change from rounding all tokens: :func:`_parts` in terms of passes."""
    # Half of rounding it before the others, half of rounding it after them.
    signs: tuple[tuple[Shifted, float], ...] = (("first", 0.5), ("all", 0.5), ("others", -0.5))
    return [(sign * factor, found) for move, sign in signs for factor, found in terms[move]]


def _parts(change: Mapping[Shifted, Tensor]) -> dict[Shifted, Tensor]:
    """The parts of the total rounding change that the first token, the others, and both explain."""
    first, others, whole = (change[move] for move in MOVES)
    return {"first": (first + whole - others) / 2, "others": (others + whole - first) / 2, "all": whole}
