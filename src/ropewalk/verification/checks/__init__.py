"""The checks. Every module of this package is discovered automatically and declares its claims in ``CLAIMS``."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from ropewalk.parallel import MeshShape
from ropewalk.verification.case import Case
from ropewalk.verification.result import Outcome


@dataclass(frozen=True)
class Meshes:
    """The meshes that a case is checked on.

    Attributes:
        ranks: number of processes, 2 or more.
        shapes: every mesh of this many ranks, with the reason why it does not apply; None if it does.
        own: the recipe's mesh, which is one of them; None if the recipe has no mesh of this many ranks.
    """

    ranks: int
    shapes: Mapping[MeshShape, str | None]
    own: MeshShape | None

    @classmethod
    def of(cls, case: Case, ranks: int, own: MeshShape | None = None) -> Meshes:
        """All meshes of this many ranks, and the recipe's own; Ulysses only where the model's heads allow it."""
        heads = case.num_heads
        no_heads = f"not applicable: {ranks} ranks do not divide the model's {heads} attention heads"
        whole = "not applicable: the model's indexers need whole rows" if case.indexers else None
        shapes: dict[MeshShape, str | None] = {
            MeshShape(shard=ranks): None,
            MeshShape(sequence=ranks): whole or (no_heads if heads % ranks else None),
            MeshShape(ring=ranks): whole,
        }
        # Both together, at the smallest Ulysses degree: each may be right alone and wrong inside the other.
        if ranks > 2 and ranks % 2 == 0 and heads % 2 == 0:
            shapes[MeshShape(ring=ranks // 2, sequence=2)] = whole
        if own is not None:
            # If it is among them already, the reason why it does not apply stays.
            shapes.setdefault(own, None)
        return cls(ranks, shapes, own)


MeshChoice = Callable[[Meshes], list[MeshShape]]
"""Function that selects the meshes on which a claim is checked."""


def every_mesh(meshes: Meshes) -> list[MeshShape]:
    """Select every mesh."""
    return list(meshes.shapes)


def meshes_that_cut_rows(meshes: Meshes) -> list[MeshShape]:
    """Select the meshes that shard rows."""
    return [shape for shape in meshes.shapes if shape.sequence_degree > 1]


def sharded_and_own(meshes: Meshes) -> list[MeshShape]:
    """Select the mesh in which all ranks shard the model, and the recipe's mesh."""
    shapes = (MeshShape(shard=meshes.ranks), meshes.own)
    return list(dict.fromkeys(shape for shape in shapes if shape is not None))


def own_mesh(meshes: Meshes) -> list[MeshShape]:
    """Select the recipe's mesh, or the mesh in which all ranks shard the model if the recipe has none."""
    return sharded_and_own(meshes)[-1:]


@dataclass(frozen=True)
class Claim:
    """A property that should hold, and the function that checks it.

    Attributes:
        kind: unique key.
        place: sort key in the report, ascending.
        name: the property, as named in the report; ``{ranks}`` and ``{mesh}`` are filled in.
        compared: the two sides of the comparison, as "A with B".
        check: function that compares. It takes the case, or, if ``meshes`` is set, the case, a mesh and the world, and
            is then called on every rank; rank 0 has the outcome.
        meshes: selects the meshes for the check; None for a check in one process.
    """

    kind: str
    place: int
    name: str
    compared: str
    check: Callable[..., Outcome]
    meshes: MeshChoice | None = None


@dataclass(frozen=True)
class Planned:
    """A check to run; it is pickled and sent to the processes of a pool.

    Attributes:
        kind: kind of its claim.
        name, compared: as in :class:`~ropewalk.verification.result.Check`.
        shape: shape of the mesh; None for a check in one process.
        reason: why the check does not apply; None if it does.
    """

    kind: str
    name: str
    compared: str
    shape: MeshShape | None = None
    reason: str | None = None


@cache
def claims() -> dict[str, Claim]:
    """All claims by kind, in report order."""
    modules = (import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    found = sorted((claim for module in modules for claim in module.CLAIMS), key=lambda claim: claim.place)
    return {claim.kind: claim for claim in found}


def planned_checks(case: Case, ranks: int, own: MeshShape | None = None) -> list[Planned]:
    """All checks for a case, in the order in which they run.

    Args:
        case: case to verify.
        ranks: number of processes, 2 or more.
        own: the recipe's mesh, which is verified in addition to the others.
    """
    meshes = Meshes.of(case, ranks, own)
    planned = []
    for claim in claims().values():
        if claim.meshes is None:
            planned.append(Planned(claim.kind, claim.name, claim.compared))
            continue
        for shape in claim.meshes(meshes):
            name = claim.name.format(ranks=ranks, mesh=shape)
            planned.append(Planned(claim.kind, name, claim.compared, shape, meshes.shapes.get(shape)))
    return planned
