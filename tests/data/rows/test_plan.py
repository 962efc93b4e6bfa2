"""Each token lies in one place, rows are as full as the packing says, and both packings equal naive loops."""

from collections.abc import Iterator
from itertools import combinations, pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ropewalk.data.rows import plan as row_plan
from ropewalk.data.rows.plan import Pieces, RowPlan, plan_rows
from ropewalk.data.settings import Packing, Remainder
from ropewalk.errors import RopewalkError

Piece = tuple[int, int, int]
PACKINGS, REMAINDERS = get_args(Packing), get_args(Remainder)
packings = st.sampled_from(PACKINGS)
remainders = st.sampled_from(REMAINDERS)
rooms = st.integers(1, 30)
documents = rooms.flatmap(
    lambda room: st.tuples(
        st.just(room),
        st.lists(st.one_of(st.integers(0, 10 * room), st.integers(0, room), st.just(room)), max_size=30),
    )
)


@pytest.fixture(autouse=True, scope="module")
def few_at_a_time() -> Iterator[None]:
    """Stretches so short that the examples have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_plan, "_CHUNK", 3)
        yield


def listed(pieces: Pieces) -> list[Piece]:
    assert {array.dtype for array in (pieces.items, pieces.starts, pieces.lengths)} == {np.dtype(np.int64)}
    return list(zip(pieces.items.tolist(), pieces.starts.tolist(), pieces.lengths.tolist(), strict=True))


def rows_of(plan: RowPlan) -> list[list[Piece]]:
    return [listed(plan.row(number)) for number in range(plan.num_rows)]


def planned(lengths: list[int], room: int, packing: str, remainder: str) -> RowPlan:
    return plan_rows(np.array(lengths, np.int64), room, packing, remainder)


def sequential_by_tokens(lengths: list[int], room: int) -> list[list[Piece]]:
    """Token after token into the row that is open."""
    tokens = [(item, token) for item, length in enumerate(lengths) for token in range(length)]
    rows = []
    for begin in range(0, len(tokens), room):
        row: list[Piece] = []
        for item, token in tokens[begin : begin + room]:
            if row and row[-1][0] == item:
                row[-1] = (item, row[-1][1], row[-1][2] + 1)
            else:
                row.append((item, token, 1))
        rows.append(row)
    return rows


def best_fit_one_by_one(lengths: list[int], room: int) -> list[list[Piece]]:
    """Each piece looks at every row, longest piece first."""
    rows: list[list[Piece]] = []
    to_place: list[Piece] = []
    for item, length in enumerate(lengths):
        start = 0
        while length - start >= room:
            rows.append([(item, start, room)])
            start += room
        if length > start:
            to_place.append((item, start, length - start))
    free = [0] * len(rows)
    since = [0] * len(rows)
    for time, piece in enumerate(sorted(to_place, key=lambda piece: (-piece[2], piece[0]))):
        fitting = [row for row in range(len(rows)) if free[row] >= piece[2]]
        if not fitting:
            rows.append([])
            free.append(room)
            since.append(time)
        row = min(fitting, key=lambda row: (free[row], since[row])) if fitting else len(rows) - 1
        rows[row].append(piece)
        free[row] -= piece[2]
        since[row] = time
    return sorted(sorted(row) for row in rows)


NAIVE = {"sequential": sequential_by_tokens, "best_fit": best_fit_one_by_one}


def assert_equals_naive(lengths: list[int], room: int, packing: str, remainder: str) -> None:
    plan = planned(lengths, room, packing, remainder)
    rows = NAIVE[packing](lengths, room)
    in_rows: dict[int, set[int]] = {}
    for number, row in enumerate(rows):
        for item, _, _ in row:
            in_rows.setdefault(item, set()).add(number)
    assert plan.cut == sum(len(numbers) > 1 for numbers in in_rows.values())
    left_out: list[Piece] = []
    if remainder == "drop" and rows:
        used = [sum(piece[2] for piece in row) for row in rows]
        emptiest = max(number for number in range(len(rows)) if used[number] == min(used))
        if used[emptiest] < room:
            left_out = rows.pop(emptiest)
    assert rows_of(plan) == rows
    assert plan.padding.tolist() == [room - sum(piece[2] for piece in row) for row in rows]
    assert listed(plan.remainder) == left_out


@given(documents, packings, remainders)
@example((4, []), "best_fit", "drop")
@example((4, [0, 0]), "sequential", "pad")
@example((4, [4, 4]), "best_fit", "drop")
@example((4, [3, 3]), "best_fit", "drop")
def test_plan_equals_a_naive_loop(sized: tuple[int, list[int]], packing: str, remainder: str) -> None:
    room, lengths = sized
    assert_equals_naive(lengths, room, packing, remainder)


@pytest.mark.parametrize("remainder", REMAINDERS)
@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize(("room", "longest"), [(100, 40), (5000, 1200), (5000, 12000), (70000, 30000)])
def test_plan_of_many_documents_equals_a_naive_loop(
    room: int, longest: int, packing: str, remainder: str
) -> None:
    words = np.random.Philox(np.random.SeedSequence([room, longest])).random_raw(300)
    lengths = (words % longest).astype(np.int64)
    if packing == "sequential":  # its naive loop goes by tokens
        lengths, room = lengths // 50, room // 50
    assert_equals_naive(lengths.tolist(), room, packing, remainder)


@given(documents, packings, remainders)
def test_every_token_lies_in_one_piece_and_every_row_is_full_or_padded(
    sized: tuple[int, list[int]], packing: str, remainder: str
) -> None:
    room, lengths = sized
    plan = planned(lengths, room, packing, remainder)
    seen = [np.zeros(length, np.int64) for length in lengths]
    for item, start, length in [*listed(plan.pieces), *listed(plan.remainder)]:
        assert length >= 1
        assert start + length <= lengths[item]
        seen[item][start : start + length] += 1
    assert all((count == 1).all() for count in seen)
    assert plan.row_starts.dtype == plan.padding.dtype == np.int64
    assert (plan.row_starts[0], plan.row_starts[-1]) == (0, len(plan.pieces))
    for row, padding in zip(rows_of(plan), plan.padding.tolist(), strict=True):
        assert row == sorted(row)
        assert 0 <= padding < room
        assert sum(length for _, _, length in row) + padding == room
    firsts = [row[0] for row in rows_of(plan)]
    assert firsts == sorted(firsts)
    assert remainder == "drop" or len(plan.remainder) == 0
    assert plan.remainder.lengths.sum() < room


@given(documents, remainders)
def test_best_fit_cuts_the_documents_longer_than_a_row_and_no_other(
    sized: tuple[int, list[int]], remainder: str
) -> None:
    room, lengths = sized
    plan = planned(lengths, room, "best_fit", remainder)
    items = [*plan.pieces.items.tolist(), *plan.remainder.items.tolist()]
    pieces = [items.count(item) for item in range(len(lengths))]
    assert pieces == [-(-length // room) for length in lengths]
    assert plan.cut == sum(length > room for length in lengths)


@given(documents, remainders)
def test_sequential_cuts_where_a_row_ends_and_nowhere_else(
    sized: tuple[int, list[int]], remainder: str
) -> None:
    room, lengths = sized
    plan = planned(lengths, room, "sequential", remainder)
    bounds = np.cumsum([0, *lengths]).tolist()
    pieces = [*listed(plan.pieces), *listed(plan.remainder)]
    cuts = [bounds[item] + start for item, start, _ in pieces if start > 0]
    assert cuts == [end for end in range(room, bounds[-1], room) if end not in bounds]
    assert plan.cut == sum(
        any(begin < end < stop for end in range(room, stop, room)) for begin, stop in pairwise(bounds)
    )
    assert plan.num_rows == (bounds[-1] // room if remainder == "drop" else -(-bounds[-1] // room))


@given(documents)
def test_no_two_rows_of_best_fit_would_fit_into_one(sized: tuple[int, list[int]]) -> None:
    room, lengths = sized
    plan = planned(lengths, room, "best_fit", "pad")
    used = (room - plan.padding).tolist()
    assert all(a + b > room for a, b in combinations(used, 2))


@given(documents, packings)
def test_drop_leaves_out_one_row_of_the_padded_plan(sized: tuple[int, list[int]], packing: str) -> None:
    room, lengths = sized
    padded, dropped = (planned(lengths, room, packing, remainder) for remainder in ("pad", "drop"))
    rows = rows_of(padded)
    assert dropped.cut == padded.cut
    if padded.padding.sum() == 0:
        assert rows_of(dropped) == rows
        assert len(dropped.remainder) == 0
        return
    last = max(n for n in range(len(rows)) if padded.padding[n] == padded.padding.max())
    assert listed(dropped.remainder) == rows.pop(last)
    assert rows_of(dropped) == rows


def test_best_fit_by_hand() -> None:
    # Placed are 6, 5 (the tail of 25), 4 beside 6, 3 beside 5, and 1 there too.
    plan = planned([3, 25, 0, 6, 10, 4, 1], 10, "best_fit", "pad")
    assert rows_of(plan) == [
        [(0, 0, 3), (1, 20, 5), (6, 0, 1)],
        [(1, 0, 10)],
        [(1, 10, 10)],
        [(3, 0, 6), (5, 0, 4)],
        [(4, 0, 10)],
    ]
    assert plan.padding.tolist() == [1, 0, 0, 0, 0]
    assert plan.cut == 1


def test_sequential_by_hand() -> None:
    plan = planned([3, 9, 0, 4], 6, "sequential", "drop")
    assert rows_of(plan) == [[(0, 0, 3), (1, 0, 3)], [(1, 3, 6)]]
    assert listed(plan.remainder) == [(3, 0, 4)]
    assert plan.cut == 1
    padded = planned([3, 9, 0, 4], 6, "sequential", "pad")
    assert rows_of(padded) == [*rows_of(plan), [(3, 0, 4)]]
    assert padded.padding.tolist() == [0, 0, 2]


@pytest.mark.parametrize(
    ("lengths", "room", "packing", "remainder", "message"),
    [
        (np.array([1]), 0, "best_fit", "pad", r"room for 1 token or more, got 0"),
        (np.array([2, -1]), 4, "best_fit", "pad", r"lengths must be 0 or more, got -1 at index 1"),
        (np.array([2.0]), 4, "best_fit", "pad", r"array of integers, got float64 of shape \(1,\)"),
        (np.array([[2]]), 4, "best_fit", "pad", r"array of integers, got int64 of shape \(1, 1\)"),
        (
            np.array([2]),
            4,
            "first_fit",
            "pad",
            r"unknown packing 'first_fit'; choose one of sequential, best_fit",
        ),
        (np.array([2]), 4, "best_fit", "keep", r"unknown remainder 'keep'; choose one of drop, pad"),
    ],
)
def test_bad_arguments_are_named(
    lengths: NDArray, room: int, packing: str, remainder: str, message: str
) -> None:
    with pytest.raises(RopewalkError, match=message):
        plan_rows(lengths, room, packing, remainder)


@pytest.mark.parametrize("number", [-1, 2])
def test_a_row_that_is_not_there_is_refused(number: int) -> None:
    plan = planned([8], 4, "sequential", "pad")
    with pytest.raises(RopewalkError, match=rf"has 2 rows, numbered from 0; there is no row {number}"):
        plan.row(number)
