"""Check targets: of whole rows with an independent loop, and of shards by counting the entries of all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ropewalk.attention.layout import IGNORED, Row
from ropewalk.parallel import Mesh, ShardedLayouts, World
from ropewalk.training.update.step import Batch
from ropewalk.verification.case import Case
from ropewalk.verification.checks import Claim, every_mesh
from ropewalk.verification.result import Outcome

Entry = tuple[int, int, int]
"""Token id, target and RoPE position of one token."""


def labels_of_rows(case: Case) -> Outcome:
    """Check that every target is the next token of its own document, with none missing and none across documents."""
    wrong = [
        (number, place, target, expected)
        for number, (row, trained) in enumerate(zip(case.rows, case.trained, strict=True))
        for place, (target, expected) in enumerate(
            zip(row.labels.tolist(), _targets(row, trained), strict=True)
        )
        if target != expected
    ]
    targets = sum(int((row.labels != IGNORED).sum()) for row in case.rows)
    note = f"{targets} targets in {len(case.rows)} rows"
    if wrong:
        number, place, target, expected = wrong[0]
        note = (
            f"{len(wrong)} targets are wrong; token {place} of row {number} (document "
            f"{int(case.rows[number].layout.document_ids[place])}) has {_target(target)}, but its document requires "
            f"{_target(expected)}"
        )
    return Outcome(float(len(wrong)), 0.0, not wrong, note)


def _target(label: int) -> str:
    return "no target" if label == IGNORED else f"target {label}"


def _targets(row: Row, trained: Tensor) -> list[int]:
    """Expected targets. Walking backwards, the last token seen of a document is the next one in reading order."""
    documents, ids, may = row.layout.document_ids.tolist(), row.input_ids.tolist(), trained.tolist()
    following: dict[int, int] = {}
    targets = [IGNORED] * len(ids)
    # Backwards, so that the next token of the same document is known, even if another document lies between the two.
    for place in reversed(range(len(ids))):
        document = documents[place]
        # The anchor's number is negative: it belongs to no document.
        if document >= 0 and document in following and may[following[document]]:
            targets[place] = ids[following[document]]
        following[document] = place
    return targets


def labels_of_shards(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Check that all ranks together hold each token once, with its target and its position in the row."""
    held = _held(case, mesh)
    gathered: list[list[list[Entry]]] = [[] for _ in range(world.size)]
    dist.all_gather_object(gathered, held, group=world.control)
    faults = []
    for number, row in enumerate(case.rows):
        # The inverse of Case.batches, which deals rows to the data ranks in turn.
        ranks = [r for r in range(world.size) if mesh.shape.data_rank(r) == number % mesh.shape.data_degree]
        there = [entry for rank in ranks for entry in gathered[rank][number // mesh.shape.data_degree]]
        faults += [f"row {number}: {text}" for text in _faults(row, there)]
    tokens = sum(row.layout.total_length for row in case.rows)
    note = f"{tokens} tokens over {mesh.shape}"
    return Outcome(float(len(faults)), 0.0, not faults, "; ".join(faults[:2]) if faults else note)


def _held(case: Case, mesh: Mesh) -> list[list[Entry]]:
    """Tokens, targets and positions in this rank's batches of a run, one list per row, without padding."""
    held = []
    for rows in case.batches(mesh):
        batch = Batch.of(rows, mesh)
        if isinstance(batch.layouts, ShardedLayouts):
            positions = batch.layouts.position_ids()
            # Sharded ones tell tokens from padding, which is zero.
            tokens = [torch.ones(row.layout.total_length, dtype=torch.int64) for row in rows]
            there = batch.layouts.take(tokens, 0).bool()
        else:
            positions = torch.stack([layout.position_ids for layout in batch.layouts])
            there = torch.ones_like(positions, dtype=torch.bool)
        # Padding that has a target would be trained on, so it is counted as a token and reported.
        there |= batch.labels != IGNORED
        for number, places in enumerate(there):
            columns = (each[number, places].tolist() for each in (batch.input_ids, batch.labels, positions))
            held.append(list(zip(*columns, strict=True)))
    return held


def _faults(row: Row, there: Sequence[Entry]) -> list[str]:
    columns = (row.input_ids.tolist(), row.labels.tolist(), row.layout.position_ids.tolist())
    # Compared as multisets, because this check does not care where on its ranks a token is held.
    expected: Counter[Entry] = Counter(zip(*columns, strict=True))
    if Counter(there) == expected:
        return []
    faults = []
    tokens, held = Counter(columns[0]), Counter(token for token, _, _ in there)
    if tokens != held:
        faults.append(
            f"{(tokens - held).total()} tokens are on no rank, {(held - tokens).total()} are on too many"
        )
    pairs = Counter((token, target) for token, target, _ in expected.elements())
    theirs = Counter((token, target) for token, target, _ in there)
    if pairs != theirs:
        lost = sum(count for (_, target), count in (pairs - theirs).items() if target != IGNORED)
        new = sum(count for (_, target), count in (theirs - pairs).items() if target != IGNORED)
        faults.append(f"the ranks lack {lost} targets of the row and have {new} that the row does not have")
    positions = Counter((token, position) for token, _, position in expected.elements())
    if positions != Counter((token, position) for token, _, position in there):
        faults.append("the positions of tokens on their ranks differ from those in the row")
    return faults or ["targets and positions of tokens are mixed up between ranks"]


CLAIMS = (
    Claim("labels", 10, "labels of rows", "each target with the next token of its document", labels_of_rows),
    Claim(
        "shards",
        50,
        "labels of shards, {mesh}",
        "tokens, targets and positions of all ranks with the whole rows",
        labels_of_shards,
        every_mesh,
    ),
)
