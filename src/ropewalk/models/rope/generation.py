"""Generation with a RoPE that depends on the length: one choice of frequencies for the whole sequence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ropewalk.errors import RopewalkError
from ropewalk.models.attention.kv_cache import cache_in, cache_of
from ropewalk.models.config.model import ModelConfig
from ropewalk.rope import RotaryEmbedding, RotaryRows

_CHOICE = "_ropewalk_long"
"""Attribute of a key/value cache: for each LongRoPE method, whether the cached keys use its long factors."""


def unpinned_methods(model: nn.Module) -> list[str]:
    """Names of a model's length-dependent RoPE methods that transformers' own rotary module computes.

    That module selects its frequencies anew in each call, by the length that the call sees. ropewalk's module can be
    fixed to one length, so a model with it has no such methods.
    """
    config = ModelConfig.of(model.config)
    if _rotaries(model) or not any(layer.rotates for layer in config.layers):
        return []
    return sorted({method.name for method in config.methods.values() if method.length_dependent})


@contextmanager
def generating(model: Any, total_length: int) -> Iterator[None]:
    """Fix the length that selects short or long factors, for all calls within the context manager.

    Without this, each call uses the length that it sees: the prompt's, then one token more at each step. When that
    passes the original length, cached keys would have the short factors and queries the long ones. If the RoPE does not
    depend on the length, this has no effect.

    Args:
        model: a model from ``load_model``.
        total_length: tokens of the complete sequence: the prompt and all tokens to generate. All rows of a batch use
            the factors of this length.

    Raises:
        RopewalkError: if the length is below 1, or the model runs transformers' own rotary module with a RoPE that
            depends on the length.

    Example:
        >>> with generating(model, ids.shape[1] + 200):
        ...     model.generate(ids, max_new_tokens=200)
    """
    dependent = unpinned_methods(model)
    if dependent:
        raise RopewalkError(
            f"generating() cannot fix the sequence length for the {', '.join(dependent)} RoPE of "
            f"{type(model).__name__}, because transformers' own rotary module computes this RoPE; load the model "
            "with exact_rope=True"
        )
    with ExitStack() as stack:
        for rotary in _rotaries(model):
            stack.enter_context(rotary.pinned(total_length))
        yield


def fixed_length(model: nn.Module) -> int | None:
    """The length that an enclosing :func:`generating` has fixed; None outside of it."""
    return next((rotary.total_length for rotary in _rotaries(model)), None)


def _rotaries(model: nn.Module) -> list[RotaryEmbedding | RotaryRows]:
    return [each for each in model.modules() if isinstance(each, RotaryEmbedding | RotaryRows)]


def keep_one_choice(model: nn.Module) -> None:
    """Make a model reject calls that would use other LongRoPE factors than its cached keys.

    It also rejects steps of ``generate`` whose cache was lost.

    Args:
        model: the module that contains the rotary module. Further calls have no effect.
    """
    # Plain functions, so that a deep copy of the model has the hooks too.
    if _refuse_switch not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_refuse_switch, with_kwargs=True)
        model.register_forward_hook(_remember, with_kwargs=True)


def _refuse_switch(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = cache_in(kwargs)
    if cache is None:
        _refuse_lost_cache(args, kwargs)
        return
    if not (limits := _limits(decoder)):
        return
    cached = int(cache.get_seq_length())
    length, choice = _choice(decoder, limits, cached, args, kwargs)
    # A cache that other code filled has the factors for its own length.
    held = getattr(cache, _CHOICE, [cached > limit for limit in limits]) if cached else choice
    if held != choice:
        names = ("short", "long") if choice > held else ("long", "short")
        raise RopewalkError(
            f"the cache holds {cached} keys computed with LongRoPE's {names[0]} factors, but at a length of {length} "
            f"tokens this call would use the {names[1]} factors; run all calls of a generation within "
            "ropewalk.models.load.generating(model, number of prompt and new tokens together)"
        )
    # The choice is stored with the cache, since a cache may be used by several calls and outlive any of them.
    setattr(cache, _CHOICE, choice)


def _refuse_lost_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise for a step of ``generate`` that reads one token in the middle of a sequence without a cache."""
    ids, positions = _ids_of(args, kwargs), kwargs.get("position_ids")
    if not kwargs.get("use_cache") or ids is None or ids.shape[1] != 1 or positions is None:
        return
    if int(positions.min()) > 0:
        raise RopewalkError(
            f"this call has only the token at position {int(positions.max())}, and the cache of the earlier tokens "
            "is missing; Phi-4-multimodal, and Phi-3 in transformers before 5.20, drop the cache when a sequence "
            "passes the original length; generate with use_cache=False, or for Phi-3 update transformers to 5.20 or "
            "later"
        )


def _remember(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Record the choice of a call that created its cache itself."""
    cache = cache_of(output)
    if cache is None or cache_in(kwargs) is not None:
        return
    if limits := _limits(decoder):
        setattr(cache, _CHOICE, _choice(decoder, limits, 0, args, kwargs)[1])


def _rotary(decoder: nn.Module) -> RotaryEmbedding | None:
    return next((each for each in decoder.children() if isinstance(each, RotaryEmbedding)), None)


def _limits(decoder: nn.Module) -> list[int]:
    """Original lengths of the LongRoPE methods whose factors differ; [] if nothing can switch."""
    rotary = _rotary(decoder)
    return [
        method.switch_length
        for method in (rotary.methods.values() if rotary else ())
        if method.switch_length is not None
    ]


def _choice(
    decoder: nn.Module, limits: list[int], cached: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, list[bool]]:
    """The length that a call goes by, and for each limit whether the length exceeds it."""
    rotary = _rotary(decoder)
    length = (rotary.total_length if rotary else None) or _length_of_call(cached, args, kwargs)
    return length, [length > limit for limit in limits]


def _length_of_call(cached: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Length of the sequence in tokens, as the rotary module determines it."""
    positions = kwargs.get("position_ids")
    if positions is not None:
        return int(positions.max()) + 1
    ids = _ids_of(args, kwargs)
    # Without ids the model itself raises an error.
    return cached + (0 if ids is None else int(ids.shape[1]))


def _ids_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Token ids or embeddings of a call; None if it has neither."""
    ids = args[0] if args else kwargs.get("input_ids")
    return kwargs.get("inputs_embeds") if ids is None else ids
