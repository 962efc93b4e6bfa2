"""StageRope: bounds on a stage's RoPE before the run, and the decision in the run.

A stage gives its method, names a factor table, searches for factors, or chooses a base (``auto``); each is a subclass.
The checks before a run and the run itself use the same object.
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


@dataclass(frozen=True)
class StageRope(ABC):
    """The RoPE of one stage.

    Attributes:
        recipe: the whole recipe.
        number: index of the stage, counted from 0.
    """

    recipe: Recipe
    number: int

    @property
    def stage(self) -> Stage:
        """The stage's section of the recipe."""
        return self.recipe.stages[self.number]

    @property
    def searches(self) -> bool:
        """Whether the stage searches for factors in the run."""
        return False

    @abstractmethod
    def bounds(self, low: Before, high: Before) -> tuple[RopeMethod, RopeMethod]:
        """Methods with the smallest and the largest base that the stage may get; equal if the base is known.

        Args:
            low, high: state before the stage if earlier stages got the smallest, or the largest, base.

        Raises:
            RopewalkError: if the stage cannot have its method.
        """

    @abstractmethod
    def provisional(self, before: Before) -> tuple[RopeMethod, str]:
        """A method with which the recipe can be verified before the run, and a remark on its origin."""

    def check(self, trained: int, at: AtStage, outdated: Collection[str]) -> None:
        """Raise now if the stage would fail when the run reaches it.

        Args:
            trained: trained length of the model at the stage, tokens.
            at: state of the run at the stage; its weights are not used.
            outdated: files in the run's folder that will be moved away.

        Raises:
            RopewalkError: with advice on what to change.
        """
        return None

    @abstractmethod
    def settled(self, before: Before, resolved: ResolvedRecipe, output: Path, begun: bool) -> Decision | None:
        """The decision if it needs no measurement, otherwise None.

        Args:
            before: state before the stage.
            resolved: the recipe.
            output: folder of the run, which may contain an earlier decision.
            begun: whether the stage has already been trained; its decision is never measured again.

        Raises:
            RopewalkError: if the decision of a stage that has started is missing, or belongs to another recipe.
        """

    def measured(self, before: Before, at: AtStage) -> Decision:
        """Decide by measurement, and write the result to disk before returning; every rank must call this method.

        Raises:
            RopewalkError: if there are too few documents to measure on.
            RunFailure: if no candidate has a finite loss.
        """
        raise NotImplementedError(f"{type(self).__name__} needs no measurement")

    def decide(self, before: Before, at: AtStage) -> Decision:
        """The stage's decision, already settled or measured now; every rank must call this method."""
        output = at.output
        # Measuring takes all ranks, so they must agree on whether it is needed.
        settled = at.context.world.on_rank_0(lambda: self.settled(before, at.resolved, output, False))
        return settled if settled is not None else self.measured(before, at)


@dataclass(frozen=True)
class StageBounds:
    """Bounds on a stage's RoPE that are known before a run.

    Attributes:
        low, high: methods with the smallest and the largest base that the stage may get; factors to be searched are
            1s. Checking both ends suffices, because every rule is monotonic in the base.
        method: the method if it is known before the run; otherwise None.
        origin: method and length from which its recommended base is derived; None if they are not known yet.
    """

    low: RopeMethod
    high: RopeMethod
    method: RopeMethod | None
    origin: RopeAt | None


def bounds_of(ropes: Sequence[StageRope], checkpoint: RopeAt) -> list[StageBounds]:
    """Bounds on the RoPE of all stages before a run.

    Args:
        ropes: RoPE decisions of all stages.
        checkpoint: method and trained length of the recipe's model.

    Raises:
        RopewalkError: if a stage cannot have its method.
    """
    low = high = Before.first(checkpoint)
    found: list[StageBounds] = []
    # Whether the method, or the origin of the next recommended base, contains factors that a search has yet to find.
    searched = origin_searched = False
    for rope in ropes:
        stage = rope.stage
        if rope.number == 0 and stage.context <= low.length:
            raise RopewalkError(
                f"stages.0.context must be longer than the trained length of {low.length} tokens, got {stage.context}"
            )
        _refuse_ambiguous(stage, low.method, rope.number)
        # A base that the run will measure is known only within bounds; what holds at both ends is checked now.
        ends = rope.bounds(low, high)
        origin = low.origin if low.origin == high.origin and not origin_searched else None
        # A later stage with method default keeps the factors found; any other method replaces them.
        searched = rope.searches or (searched and stage.rope.limiting.method == "default")
        if not takes_recommended_base(stage.rope.limiting):
            origin_searched = searched
        known = ends[0] if ends[0] == ends[1] and not searched else None
        found.append(StageBounds(*ends, known, origin))
        low, high = (before.after(stage, end) for before, end in zip((low, high), ends, strict=True))
    return found


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


def refuse_other_rope(
    checkpoint: Path, method: RopeMethod, rope: StageRope, others: Mapping[str, RopeMethod]
) -> None:
    """Raise if a stage would resume with another RoPE, for example after an update of ropewalk changed a rule.

    Sharded checkpoints contain no config, so they are not checked.

    Args:
        checkpoint: latest checkpoint of the stage.
        method: RoPE method that the stage gets now.
        rope: RoPE decision of the stage.
        others: RoPE that the stage gives to layer types that do not limit the context.

    Raises:
        RopewalkError: if the checkpoint was trained with other frequencies.
    """
    path = checkpoint / "config.json"
    if not path.is_file():
        return
    config = ModelConfig(parse_json(path.read_text(encoding="utf-8")))
    saved = config.full_attention_rope
    for kind, other in others.items():
        # A config without an entry for these layers cannot differ from the recipe.
        if not _same_frequencies(config.methods.get(kind, other), other, rope.stage.context):
            raise RopewalkError(
                f"{checkpoint.name} was trained with another RoPE for layers of type {kind} than "
                f"stages.{rope.number}.rope gives now ({other.name}, rope_theta {other.rope_theta:.10g}); start a new "
                "run in another output folder"
            )
    if not _same_frequencies(saved, method, rope.stage.context):
        raise RopewalkError(
            f"{checkpoint.name} was trained with method {saved.name} and rope_theta {saved.rope_theta:.10g}, but "
            f"stages.{rope.number}.rope now gives method {method.name} and rope_theta {method.rope_theta:.10g}; set "
            f"stages.{rope.number}.rope.rope_theta to {saved.rope_theta:.10g}, both in your recipe and in the run's "
            "own recipe.yaml"
        )


def _same_frequencies(one: RopeMethod, other: RopeMethod, length: int) -> bool:
    there, here = (each.frequencies(length).inv_freq for each in (one, other))
    # Relative alone: the slowest frequencies are smaller than any useful absolute tolerance.
    return there.shape == here.shape and torch.allclose(there, here, rtol=1e-6, atol=0)


def _refuse_ambiguous(stage: Stage, current: RopeMethod, number: int) -> None:
    rope = stage.rope.limiting
    factor = rope.parameter("factor")
    if isinstance(current, Linear) and rope.method == "linear" and number == 0 and factor is None:
        raise RopewalkError(
            f"the checkpoint is already scaled linearly by {current.factor:g}, and its config does not say whether "
            "max_position_embeddings includes that factor; set stages.0.rope.factor to the total factor"
        )
    if rope.method == "ntk" and number and factor is not None:
        raise RopewalkError(
            f"stages.{number}.rope.factor {factor:g}: after the first stage, method 'ntk' accepts no factor, because "
            "the factor would multiply the base of the previous stage; omit 'factor', or use method 'theta' with "
            "rope_theta"
        )
    if rope.method == LongRope.name and stage.positions == "reset":
        raise RopewalkError(
            f"stages.{number}.positions is 'reset', so longrope would select factors by the longest document instead "
            "of the context; set positions: continuous"
        )
