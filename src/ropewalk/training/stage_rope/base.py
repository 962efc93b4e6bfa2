"""A stage's RoPE: what it begins with, what was decided, and what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.rope import RopeMethod
from ropewalk.rope.methods import METHODS
from ropewalk.training.recipe.recipe import Rope, Stage
from ropewalk.training.resolved import RopeAt


def factors_file(name: str) -> str:
    """File name of a factor table in a run's folder; the log of its search has the suffix ``.jsonl``."""
    return f"factors-{name}.json"


def stage_name(number: int) -> str:
    """Name of a stage in file names, counted from 1."""
    return f"stage{number + 1}"


@dataclass(frozen=True)
class Before:
    """RoPE of the model when a stage starts.

    Attributes:
        method: method of the checkpoint, or of the previous stage.
        length: trained length of the model at that time, tokens.
        origin: method and length from which a recommended base is derived. Consecutive recommended bases share one
            origin, that of the first of them, so the final base does not depend on the number of stages.
        checkpoint: method and trained length of the recipe's model.
    """

    method: RopeMethod
    length: int
    origin: RopeAt
    checkpoint: RopeAt

    @classmethod
    def first(cls, checkpoint: RopeAt) -> Before:
        """State before the first stage."""
        return cls(*checkpoint, checkpoint, checkpoint)

    def after(self, stage: Stage, method: RopeMethod) -> Before:
        """State before the next stage, given the method of this one."""
        origin = self.origin if takes_recommended_base(stage.rope.limiting) else (method, stage.context)
        return replace(self, method=method, length=stage.context, origin=origin)


@dataclass(frozen=True)
class Decision:
    """RoPE that a stage trains with.

    Attributes:
        method: RoPE method.
        found: entry ``choice`` or ``search`` of the run's summary; empty if the method was given.
    """

    method: RopeMethod
    found: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """JSON values from which :meth:`from_json` makes the same decision."""
        return {"method": as_json(self.method), "found": dict(self.found)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Decision:
        """Inverse of :meth:`to_json`."""
        return cls(method_from(values["method"]), values["found"])


def as_json(method: RopeMethod) -> dict[str, Any]:
    """A method and all its values as JSON values."""
    stated = {each.name: getattr(method, each.name) for each in fields(method)}
    inner = {key: as_json(value) for key, value in stated.items() if isinstance(value, RopeMethod)}
    return {"method": method.name, **stated, **inner}


def method_from(values: Mapping[str, Any]) -> RopeMethod:
    """Inverse of :func:`as_json`."""
    given: dict[str, Any] = {
        name: tuple(each) if isinstance(each, list) else method_from(each) if isinstance(each, dict) else each
        for name, each in values.items()
    }
    return METHODS[given.pop("method")](**given)


def takes_recommended_base(rope: Rope) -> bool:
    """Whether the stage's base comes from :func:`ropewalk.rope.theory.recommended_theta`."""
    return rope.method == "theta" and rope.rope_theta == "auto"


def refuse_start_tokens(rope: Rope) -> None:
    """Raise for start tokens, which a transformers config cannot express."""
    start_tokens = rope.parameter("start_tokens")
    if start_tokens:
        raise RopewalkError(
            f"a transformers config cannot store start_tokens {start_tokens}, so other programs could not load the "
            "result; set start_tokens to 0"
        )
