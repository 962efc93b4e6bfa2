"""The checks: each module here declares its claims in ``CLAIMS``, and is found because it lies here."""

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
        ranks: how many processes there are, 2 or more.
        shapes: every mesh of so many ranks, with the reason why it cannot be, if so.
        own: the recipe's, among them; None where it has none of so many ranks.
    """

    ranks: int
    shapes: Mapping[MeshShape, str | None]
    own: MeshShape | None

    @classmethod
    def of(cls, case: Case, ranks: int, own: MeshShape | None = None) -> Meshes:
        """All meshes of so many ranks that the model's heads allow, and the recipe's own."""
        heads = case.num_heads
        no_heads = f"not applicable: {ranks} ranks do not divide the model's {heads} attention heads"
        shapes: dict[MeshShape, str | None] = {
            MeshShape(shard=ranks): None,
            MeshShape(sequence=ranks): no_heads if heads % ranks else None,
            MeshShape(ring=ranks): None,
        }
        if ranks > 2 and ranks % 2 == 0 and heads % 2 == 0:
            shapes[MeshShape(ring=ranks // 2, sequence=2)] = None
        if own is not None:
            shapes.setdefault(own, None)
        return cls(ranks, shapes, own)


MeshChoice = Callable[[Meshes], list[MeshShape]]
"""Which of the meshes a claim is checked on."""


def every_mesh(meshes: Meshes) -> list[MeshShape]:
    """All of them."""
    return list(meshes.shapes)


def meshes_that_cut_rows(meshes: Meshes) -> list[MeshShape]:
    """Those that hold a row in parts."""
    return [shape for shape in meshes.shapes if shape.sequence_degree > 1]


def sharded_and_own(meshes: Meshes) -> list[MeshShape]:
    """All ranks sharding the model, and the recipe's."""
    shapes = (MeshShape(shard=meshes.ranks), meshes.own)
    return list(dict.fromkeys(shape for shape in shapes if shape is not None))


def own_mesh(meshes: Meshes) -> list[MeshShape]:
    """The recipe's, or all ranks sharding the model where it has none."""
    return sharded_and_own(meshes)[-1:]


@dataclass(frozen=True)
class Claim:
    """Something that should hold, and how it is checked.

    Attributes:
        kind: its key, unique.
        place: where it stands in the report; lower ones come first.
        name: what should hold, in the report; ``{ranks}`` and ``{mesh}`` are filled in.
        compared: what with what.
        check: compares, given the case alone, or the case, a mesh and the world that all ranks of it share; rank 0
            has the outcome.
        meshes: which meshes it is checked on; None for a check of one process.
    """

    kind: str
    place: int
    name: str
    compared: str
    check: Callable[..., Outcome]
    meshes: MeshChoice | None = None


@dataclass(frozen=True)
class Planned:
    """A check that is to run; it travels to the processes of a pool.

    Attributes:
        kind: of its claim.
        name, compared: as of a :class:`~ropewalk.verification.result.Check`.
        shape: of the mesh, for a check of all ranks.
        reason: why it cannot be run, if so.
    """

    kind: str
    name: str
    compared: str
    shape: MeshShape | None = None
    reason: str | None = None


@cache
def claims() -> dict[str, Claim]:
    """All claims by kind, in the order of the report."""
    modules = (import_module(f"{__name__}.{each.name}") for each in pkgutil.iter_modules(__path__))
    found = sorted((claim for module in modules for claim in module.CLAIMS), key=lambda claim: claim.place)
    return {claim.kind: claim for claim in found}


def planned_checks(case: Case, ranks: int, own: MeshShape | None = None) -> list[Planned]:
    """All checks for a case, in the order that they run.

    Args:
        case: to verify.
        ranks: how many there are, 2 or more.
        own: the recipe's mesh, verified beside the others.
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
