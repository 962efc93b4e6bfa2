"""One decision of a stage's RoPE: which methods it may come to, what is settled already, and the decision itself.

A stage gives its method, names a factor table, searches for factors, or chooses a base (``auto``); each is one class.
The checks before a run and the run itself ask the same object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json
from ropewalk.models.config import ModelConfig
from ropewalk.rope import Linear, LongRope, RopeMethod
from ropewalk.training.recipe.recipe import Recipe, Rope, Stage
from ropewalk.training.resolved import AtStage, ResolvedRecipe, RopeAt


def factors_file(name: str) -> str:
    """File of a table in a run's folder; the log of its search has the suffix ``.jsonl``."""
    return f"factors-{name}.json"


def stage_name(number: int) -> str:
    """Name of a stage in files, the first being 1."""
    return f"stage{number + 1}"


@dataclass(frozen=True)
class Before:
    """What a stage begins with, as far as its RoPE is concerned.

    Attributes:
        method: of the checkpoint, or of the stage before.
        length: tokens that the model is trained for.
        origin: method and length that a recommended base is derived from. Bases that are recommended one after another
            all follow from what came before the first of them, so that a run in more stages ends with the same base.
        checkpoint: method and trained length of the recipe's model.
    """

    method: RopeMethod
    length: int
    origin: RopeAt
    checkpoint: RopeAt

    @classmethod
    def first(cls, checkpoint: RopeAt) -> Before:
        """What the first stage begins with."""
        return cls(*checkpoint, checkpoint, checkpoint)

    def after(self, stage: Stage, method: RopeMethod) -> Before:
        """What the next stage begins with, after a stage that has got its method."""
        origin = self.origin if takes_recommended_base(stage.rope.limiting) else (method, stage.context)
        return replace(self, method=method, length=stage.context, origin=origin)


@dataclass(frozen=True)
class Decision:
    """What a stage trains with.

    Attributes:
        method: its RoPE.
        found: what the run's summary says of how it was found: ``choice`` or ``search``; empty where it was given.
    """

    method: RopeMethod
    found: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageRope(ABC):
    """The RoPE of one stage.

    Attributes:
        recipe: the whole recipe.
        number: of the stage, counted from 0.
    """

    recipe: Recipe
    number: int

    @property
    def stage(self) -> Stage:
        """What the recipe says of the stage."""
        return self.recipe.stages[self.number]

    @property
    def searches(self) -> bool:
        """Whether its factors are not known before the run."""
        return False

    @abstractmethod
    def bounds(self, low: Before, high: Before) -> tuple[RopeMethod, RopeMethod]:
        """The methods with the smallest and with the largest base that the stage may get; equal where it is known.

        Args:
            low, high: what it begins with where the stages before got the smallest, or the largest, base.

        Raises:
            RopewalkError: if the stage cannot have its method.
        """

    @abstractmethod
    def provisional(self, before: Before) -> tuple[RopeMethod, str]:
        """A method to verify the recipe with before the run, and a remark on where it comes from."""

    def check(self, trained: int, at: AtStage, outdated: Collection[str]) -> None:
        """Raise for what the stage could not do when the run comes to it.

        Args:
            trained: tokens that the model is trained for by then.
            at: what there is; its weights do not matter.
            outdated: files in the run's folder that will make room.

        Raises:
            RopewalkError: with what to do about it.
        """
        return None

    @abstractmethod
    def settled(self, before: Before, resolved: ResolvedRecipe, output: Path, begun: bool) -> Decision | None:
        """The decision where nothing has to be measured for it; None where something has.

        Args:
            before: what the stage begins with.
            resolved: the recipe.
            output: folder of the run, in which an earlier decision may lie.
            begun: whether the stage has been trained on already; it is never measured for again then.

        Raises:
            RopewalkError: if the decision of a stage that has begun is gone, or what lies there is another's.
        """

    def measured(self, before: Before, at: AtStage) -> Decision:
        """Decide by measuring; the result is on disk before this returns. Every process calls this.

        Raises:
            RopewalkError: if there is too little to measure on.
            RunFailure: if nothing has a finite loss.
        """
        raise NotImplementedError(f"{type(self).__name__} is settled without measuring")

    def decide(self, before: Before, at: AtStage) -> Decision:
        """The stage's RoPE: as settled, or measured now. Every process calls this."""
        output = at.output
        settled = at.context.world.on_rank_0(lambda: self.settled(before, at.resolved, output, False))
        return settled if settled is not None else self.measured(before, at)


@dataclass(frozen=True)
class StageBounds:
    """What is known of a stage's RoPE before a run.

    Attributes:
        low, high: the methods with the smallest and with the largest base that it may get; a search for factors has 1s
            in their place. In between nothing new can happen: every rule gives a larger base for a larger one, so what
            is refused for neither end is refused for none.
        method: the method where nothing is left to choose or to find for it.
        origin: what its recommended base is, or would be, derived from; None where that is not known yet.
    """

    low: RopeMethod
    high: RopeMethod
    method: RopeMethod | None
    origin: RopeAt | None


def bounds_of(ropes: Sequence[StageRope], checkpoint: RopeAt) -> list[StageBounds]:
    """What is known of each stage's RoPE before a run.

    Args:
        ropes: of all stages.
        checkpoint: method and trained length of the recipe's model.

    Raises:
        RopewalkError: if a stage cannot have its method.
    """
    low = high = Before.first(checkpoint)
    found: list[StageBounds] = []
    # Whether factors that a search will find are in the method, and in what the next base is derived from.
    searched = origin_searched = False
    for rope in ropes:
        stage = rope.stage
        if rope.number == 0 and stage.context <= low.length:
            raise RopewalkError(
                f"stages.0.context {stage.context} is not longer than the {low.length} tokens the model is trained for"
            )
        _refuse_ambiguous(stage, low.method, rope.number)
        ends = rope.bounds(low, high)
        origin = low.origin if low.origin == high.origin and not origin_searched else None
        # A later stage replaces the long factors, or keeps those that were found.
        searched = rope.searches or (searched and stage.rope.limiting.method == "default")
        if not takes_recommended_base(stage.rope.limiting):
            origin_searched = searched
        known = ends[0] if ends[0] == ends[1] and not searched else None
        found.append(StageBounds(*ends, known, origin))
        low, high = (before.after(stage, end) for before, end in zip((low, high), ends, strict=True))
    return found


def takes_recommended_base(rope: Rope) -> bool:
    """Whether a stage leaves its base to :func:`ropewalk.rope.theory.recommended_theta`."""
    return rope.method == "theta" and rope.rope_theta == "auto"


def refuse_start_tokens(rope: Rope) -> None:
    """Raise for start tokens, which no config can hold."""
    start_tokens = rope.parameter("start_tokens")
    if start_tokens:
        raise RopewalkError(
            f"start_tokens {start_tokens} has no place in a transformers config, so the result would not load "
            "elsewhere; set it to 0"
        )


def refuse_other_rope(
    checkpoint: Path, method: RopeMethod, rope: StageRope, others: Mapping[str, RopeMethod]
) -> None:
    """A version of ropewalk that decides on another base than the one before must not train on with it.

    Shards hold no config, so nothing can be said of a checkpoint of several processes.

    Args:
        checkpoint: of the stage.
        method: that the stage comes to now.
        rope: the stage's.
        others: that the stage comes to for layer types which do not limit the context.

    Raises:
        RopewalkError: if the checkpoint was trained with other frequencies.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        return
    config = ModelConfig(parse_json(path.read_text(encoding="utf-8")))
    saved = config.full_attention_rope
    for kind, other in others.items():
        if not _same_frequencies(config.methods.get(kind, other), other, rope.stage.context):
            raise RopewalkError(
                f"{checkpoint.name} was trained with another RoPE for layers of type {kind} than "
                f"stages.{rope.number}.rope comes to now ({other.name}, rope_theta {other.rope_theta:.10g}); give "
                "another output and begin a new run"
            )
    if not _same_frequencies(saved, method, rope.stage.context):
        raise RopewalkError(
            f"{checkpoint.name} was trained with {saved.name} of rope_theta {saved.rope_theta:.10g}, and "
            f"stages.{rope.number}.rope comes to {method.name} of rope_theta {method.rope_theta:.10g} now; write "
            f"rope_theta: {saved.rope_theta:.10g} for the stage into the recipe and into the run's own recipe.yaml"
        )


def _same_frequencies(one: RopeMethod, other: RopeMethod, length: int) -> bool:
    there, here = (each.frequencies(length).inv_freq for each in (one, other))
    return there.shape == here.shape and torch.allclose(there, here, rtol=1e-6, atol=0)


def _refuse_ambiguous(stage: Stage, current: RopeMethod, number: int) -> None:
    rope = stage.rope.limiting
    factor = rope.parameter("factor")
    if isinstance(current, Linear) and rope.method == "linear" and number == 0 and factor is None:
        raise RopewalkError(
            f"the checkpoint is scaled by {current.factor:g} already, and its config cannot say whether "
            "max_position_embeddings counts that in; give the whole factor as stages.0.rope.factor"
        )
    if rope.method == "ntk" and number and factor is not None:
        raise RopewalkError(
            f"stages.{number}.rope.factor {factor:g}: an ntk factor multiplies the base of the stage before; "
            "leave it out, or give the base itself with method theta"
        )
    if rope.method == LongRope.name and stage.positions == "reset":
        raise RopewalkError(
            f"stages.{number}: with positions reset, longrope would choose its factors by the longest document and "
            "not by the context; use positions continuous"
        )
