"""transformers' config class of a model type: found, built from a mapping, its complaints kept quiet."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from ropewalk.errors import RopewalkError
from ropewalk.rope.methods.base import methods_by_type

CONFIG_ERRORS = (
    StrictDataclassError,
    ArithmeticError,
    AttributeError,
    ImportError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers raises over a config that it cannot use."""
MOST_CHARACTERS = 300


def class_of(model_type: object) -> Any:
    """transformers' config class for a model type, or None where it has none."""
    from transformers import CONFIG_MAPPING

    return (
        CONFIG_MAPPING[model_type] if isinstance(model_type, str) and model_type in CONFIG_MAPPING else None
    )


def build(model: str, config_class: Any, values: Mapping[str, Any]) -> Any:
    try:
        with quiet():
            return config_class.from_dict(_with_present_types(values))
    except CONFIG_ERRORS as error:
        raise RopewalkError(
            f"transformers' {config_class.__name__} refuses the config of {model}: {one_line(error)}"
        ) from error


def _with_present_types(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy, for from_dict writes into what it is given, in which old names of RoPE types are today's.

    transformers 5 knows that su is longrope, but misses its original length before it looks.
    """
    copy = deepcopy(dict(values))
    today = {name: method.name for name, method in methods_by_type().items()}
    for place in (copy, copy.get("text_config")):
        scaling = place.get("rope_scaling") if isinstance(place, dict) else None
        if isinstance(scaling, dict):
            for key in ("type", "rope_type"):
                if isinstance(scaling.get(key), str):
                    scaling[key] = today.get(scaling[key], scaling[key])
    return copy


@contextmanager
def quiet() -> Iterator[None]:
    """transformers logs what it finds odd in a config; what matters of it is raised or reported here."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def one_line(error: BaseException) -> str:
    """The first sentence of an error; transformers lists every class it knows in the second."""
    text = " ".join(str(error).split()).split(". ")[0].rstrip(".")
    return (text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…") or type(error).__name__
