"""Dry steps of tiny hybrid models, and what their recurrent layers do."""

from dataclasses import dataclass, replace
from unittest import mock

from ropewalk.models.config.model import ModelConfig
from ropewalk.planning.sizing.recurrent import recurrent_shapes
from ropewalk.training.simulation import step as dry
from tests.dry_run import cases
from tests.dry_run.cases import played, recipe_of
from tests.models.families import tiny_model

LENGTH = 100
"""Tokens of each document but the last in rows of 512 tokens."""


@dataclass(frozen=True)
class Played:
    """What recurrent layers do in a dry step.

    Attributes:
        kernels: names of their kernels in the forward.
        flops: operations of their kernels by moment of the step.
        formula: those of a forward over all tokens of the rank, in closed form.
        dense: operations of products in the forward.
        all_dense: those of the whole step.
        sent: bytes by kind of collective.
    """

    kernels: set[str]
    flops: dict[str, int]
    formula: int
    dense: int
    all_dense: int
    sent: dict[str, int]


def hybrid_recipe(path, family, **settings):
    """A recipe that trains a tiny model of a family, whose config is written to a folder."""
    tiny_model(family, sharp=True, shallow=True).config.save_pretrained(path)
    rope = {"method": "theta", "rope_theta": 1e5}
    return recipe_of(
        path, **{"pattern": "intra_document", "rope": rope, "precision": "bfloat16-autocast"} | settings
    )


def step_of(recipe, family, ranks=1, device="cuda", rank=0, missing=()):
    """A dry step of a rank.

    Args:
        recipe: of :func:`hybrid_recipe`.
        family: that of the recipe.
        ranks: number of ranks.
        device: type of device.
        rank: the rank.
        missing: packages that are not installed.
    """
    with mock.patch.object(cases, "dry_step", _without(missing)):
        step = played(recipe, ranks, device, rank, LENGTH, (9, 0) if device == "cuda" else None)
    recording = step.recording
    model = tiny_model(family, sharp=True, shallow=True)
    shapes = recurrent_shapes(model, ModelConfig.of(model.config))
    sent = {}
    for (_, kind), (size, _) in recording.sent.items():
        sent[kind] = sent.get(kind, 0) + size
    return Played(
        {each.name for each in recording.operators if (each.kind, each.phase) == ("recurrent", "forward")},
        {moment: count for (kind, moment), count in recording.flops.items() if kind == "recurrent"},
        sum(each.flops(512 // ranks) for each in shapes),
        recording.flops["dense", "forward"],
        sum(count for (kind, _), count in recording.flops.items() if kind == "dense"),
        sent,
    )


def _without(missing):
    return lambda resolved, *rest: dry.dry_step(replace(resolved, missing=missing), *rest)
