"""Keys and values of earlier tokens in a call of a model: transformers 5.24 renamed their argument."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache as cached
from typing import Any

NAMES = ("cache", "past_key_values", "cache_params")
"""Names of the argument: since transformers 5.24, and before it in models and in recurrent mixers."""


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among a call's keyword arguments, by any of its names; None without one."""
    return next((arguments[name] for name in NAMES if arguments.get(name) is not None), None)


def cache_of(output: Any) -> Any:
    """The cache that a model's output contains; None without one."""
    # By its present name alone: to read an earlier one makes transformers warn, even where there is no cache.
    return getattr(output, present_name(), None)


def cache_argument(cache: Any) -> dict[str, Any]:
    """The keyword argument that gives a model a cache."""
    return {present_name(): cache}


def keeps_all_tokens(cache: Any) -> bool:
    """Whether every layer keeps the keys of all tokens, so that padding between tokens shifts no window and no state.

    Args:
        cache: a ``DynamicCache`` that was made from a config.
    """
    from transformers.cache_utils import DynamicLayer

    return bool(cache.layers) and all(type(layer) is DynamicLayer for layer in cache.layers)


@cached
def present_name() -> str:
    """The name that the installed transformers gives the argument of its models, and the field of their outputs."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    # The argument has the name of the output's field.
    named = {field.name for field in fields(CausalLMOutputWithPast)}
    return next(name for name in NAMES if name in named)
