"""The causal families of transformers that ropewalk supports, as tested with a tiny random model of each.

``families.json`` in this folder contains the results of ``scripts/supported_models.py``; no model is built here.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Annotated, Any

from pydantic import Field

from ropewalk.errors import RopewalkError
from ropewalk.io.results import Result
from ropewalk.io.settings import Option, Settings

COLUMNS = {
    "packed_training": "packed training",
    "context_parallelism": "context parallelism",
    "distributed_training": "distributed training",
    "audit": "audit",
    "planning": "planning",
    "export": "export",
}
"""The features that are tested with each family, by their names in JSON and in text."""

TESTED, REFUSED = "tested", "refused"
REFUSED_BY_CODE = (
    *("aya_vision", "cohere2_vision", "falcon", "gpt_neox_japanese", "modernbert-decoder", "muse_glimmer"),
    *("muse_spark", "nemotron", "stablelm"),
)
"""Families refused for what their code does. Others are refused for their config, which may differ in a checkpoint."""


class ModelsSettings(Settings):
    """The family to look up."""

    family: Annotated[str | None, Option(argument=True)] = Field(
        default=None,
        description="Family to show, by its model_type in config.json, such as qwen3. Shows which features of ropewalk "
        "are tested for this family, which are refused, and why. Default: all families.",
    )


@dataclass(frozen=True)
class Support:
    """The result for one feature and one family.

    Attributes:
        status: ``tested`` or ``refused``.
        reason: why it is refused; if ``tested``, what it requires. May be empty.
    """

    status: str
    reason: str = ""


@dataclass(frozen=True)
class SupportResult(Result):
    """Results for transformers' causal families.

    Attributes:
        transformers: version of transformers in the test.
        families: results by name and by the keys of :data:`COLUMNS`; only the requested family if there is one.
        without_rope: names of the families whose decoder has no RoPE.
    """

    transformers: str
    families: Mapping[str, Mapping[str, Support]]
    without_rope: tuple[str, ...]


def supported(config: ModelsSettings) -> SupportResult:
    """Look up the results for every causal family of transformers, or for one.

    Raises:
        RopewalkError: if the family is unknown, or its decoder has no RoPE.

    Example:
        >>> from ropewalk.models.support import ModelsSettings, supported
        >>> supported(ModelsSettings(family="qwen3")).families["qwen3"]["packed_training"].status
        'tested'
    """
    table = _table()
    if config.family is None:
        return table
    if config.family in table.without_rope:
        raise RopewalkError(f"{config.family} has no RoPE, so ropewalk has nothing to extend")
    if config.family not in table.families:
        near = difflib.get_close_matches(config.family, table.families, n=1)
        meant = f"did you mean {near[0]}?" if near else "`ropewalk models` lists the known types"
        raise RopewalkError(
            f"transformers {table.transformers} has no causal language model of type {config.family!r}; {meant}"
        )
    return SupportResult(
        table.transformers, {config.family: table.families[config.family]}, table.without_rope
    )


def loading_refusal(model_type: str | None) -> str | None:
    """Why ropewalk cannot load any model of a type: a predicate whose subject is the model; None if it can.

    Args:
        model_type: type of the whole model, as ``config.json`` states it; None, or a type that transformers does not
            know, may come with code of its own.
    """
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    if model_type is None or model_type not in CONFIG_MAPPING:
        return None
    config_class = CONFIG_MAPPING[model_type]
    if getattr(config_class, "is_encoder_decoder", False) is True:
        return f"is an encoder-decoder ({model_type}); ropewalk extends only decoders that read tokens by themselves"
    if config_class in MODEL_FOR_CAUSAL_LM_MAPPING or config_class in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return None
    only = "no class for language models"
    if config_class in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        only = "AutoModelForMultimodalLM alone"
    return (
        f"is of type {model_type}, which {only} of transformers loads; ropewalk loads models with AutoModelForCausalLM "
        "and AutoModelForImageTextToText"
    )


def packing_refusal(model_type: str | None) -> str | None:
    """Why no model of a family can be trained on packed rows; None if its config decides, or if nobody knows.

    A different transformers than the tested one may have changed the family's code, so nothing is known of it.
    """
    table = _table()
    if model_type not in REFUSED_BY_CODE or version("transformers") != table.transformers:
        return None
    return table.families[model_type]["packed_training"].reason


@cache
def _table() -> SupportResult:
    found: dict[str, Any] = json.loads(
        resources.files("ropewalk.models").joinpath("families.json").read_text(encoding="utf-8")
    )
    families = {
        name: {column: Support(**cells[column]) for column in COLUMNS}
        for name, cells in found["families"].items()
    }
    return SupportResult(found["transformers"], families, tuple(found["without_rope"]))
