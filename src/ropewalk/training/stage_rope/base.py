"""A stage's RoPE: what it begins with, what was decided, and what cannot be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json
from ropewalk.models.config.model import ModelConfig
from ropewalk.rope import RopeMethod
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
    checkpoint: Path, method: RopeMethod, stage: Stage, number: int, others: Mapping[str, RopeMethod]
) -> None:
    """Raise if a stage would resume with another RoPE, for example after an update of ropewalk changed a rule.

    Sharded checkpoints contain no config, so they are not checked.

    Args:
        checkpoint: latest checkpoint of the stage.
        method: RoPE method that the stage gets now.
        stage: the stage's section of the recipe.
        number: index of the stage, counted from 0.
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
        if not _same_frequencies(config.methods.get(kind, other), other, stage.context):
            raise RopewalkError(
                f"{checkpoint.name} was trained with another RoPE for layers of type {kind} than "
                f"stages.{number}.rope gives now ({other.name}, rope_theta {other.rope_theta:.10g}); start a new "
                "run in another output folder"
            )
    if not _same_frequencies(saved, method, stage.context):
        raise RopewalkError(
            f"{checkpoint.name} was trained with method {saved.name} and rope_theta {saved.rope_theta:.10g}, but "
            f"stages.{number}.rope now gives method {method.name} and rope_theta {method.rope_theta:.10g}; set "
            f"stages.{number}.rope.rope_theta to {saved.rope_theta:.10g}, both in your recipe and in the run's "
            "own recipe.yaml"
        )


def _same_frequencies(one: RopeMethod, other: RopeMethod, length: int) -> bool:
    there, here = (each.frequencies(length).inv_freq for each in (one, other))
    # Relative alone: the slowest frequencies are smaller than any useful absolute tolerance.
    return there.shape == here.shape and torch.allclose(there, here, rtol=1e-6, atol=0)
