"""The method for extending a checkpoint to a target length, by the name a recipe gives.

What happens to a checkpoint that is already scaled: extending by its own method goes on where it stands, and
the factor is multiplied by target over present length. Replacing its scaling by another method is refused by
name, because the weights have adapted to the frequencies they were trained with and two methods on top of
each other have no agreed meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.rope.methods import (
    METHODS,
    Default,
    DynamicNtk,
    Linear,
    Llama3,
    LongRope,
    Ntk,
    RopeMethod,
    Yarn,
    longrope_attention_factor,
)
from ropewalk.rope.theory import Recommendation, recommended_theta


def trained_length(config: Mapping[str, Any], method: RopeMethod | None) -> int:
    """Tokens a checkpoint was trained for: some yarn configs state only the length before their factor.

    Args:
        config: the decoder's config as a mapping.
        method: its method; None where layer types differ.

    Raises:
        RopewalkError: if the config states no ``max_position_embeddings``.
    """
    length = config.get("max_position_embeddings")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise RopewalkError(f"the config must state max_position_embeddings in tokens, got {length!r}")
    if isinstance(method, Yarn):
        return max(length, round(method.factor * method.original_max_position_embeddings))
    return dual_chunk_length(config) or length


def dual_chunk_length(config: Mapping[str, Any]) -> int | None:
    """The length that a checkpoint with dual chunk attention was trained for, in tokens (Qwen2.5-1M); None without.

    Its ``max_position_embeddings`` is what that attention reaches by using shorter distances again.

    Raises:
        RopewalkError: if the config states something else than a whole number.
    """
    chunks = config.get("dual_chunk_attention_config")
    length = chunks.get("original_max_position_embeddings") if isinstance(chunks, Mapping) else None
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < 1):
        raise RopewalkError(
            "dual_chunk_attention_config must state original_max_position_embeddings in tokens, got "
            f"{length!r}"
        )
    return length


@dataclass(frozen=True)
class MethodParameters:
    """What a user says about a method beyond its name; None means: as derived or as published.

    Attributes:
        factor: in place of target over original length (linear, ntk, yarn, llama3).
        attention_factor: yarn, longrope.
        beta_fast, beta_slow, mscale, mscale_all_dim, truncate: yarn.
        low_freq_factor, high_freq_factor: llama3; published 1 and 4.
        short_factor, long_factor: longrope, ``[rotary_dim // 2]``; always needed.
        start_tokens: longrope; None means 0.
    """

    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    start_tokens: int | None = None


PARAMETERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "theta": (),
    "linear": ("factor",),
    "ntk": ("factor",),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("attention_factor", "short_factor", "long_factor", "start_tokens"),
}
"""The trainable methods by name, and which of :class:`MethodParameters` each one reads."""


def method_for_target(
    name: str,
    current: RopeMethod,
    original_length: int,
    target_length: int,
    *,
    rope_theta: float | None = None,
    parameters: MethodParameters | None = None,
) -> RopeMethod:
    """The method that extends a checkpoint from its present length to a longer one.

    ======== ================================================================================================
    name     result, with ``s`` = ``factor`` or target over original length
    ======== ================================================================================================
    default  ``current`` unchanged, its scaling included
    theta    a new base: ``rope_theta``, else by :func:`~ropewalk.rope.theory.recommended_theta`. On a linear,
             yarn or llama3 checkpoint the scaling stays and ``rope_theta`` must be given, as the rules are
             derived for unscaled RoPE
    linear   factor ``s``, times that of a linear checkpoint
    ntk      factor ``s``
    yarn     factor ``s``, times that of a yarn checkpoint, whose other parameters stay
    llama3   factor ``s``, times that of a llama3 checkpoint, whose other parameters stay
    longrope the given factors, relative to ``θ_i``; on a longrope checkpoint its original length stays
    ======== ================================================================================================

    A dynamic-NTK checkpoint was trained unscaled and counts as default; "default" itself is then refused,
    because dynamic NTK cannot be trained with.

    Args:
        name: a method's name as in :data:`~ropewalk.rope.methods.METHODS`.
        current: the method the checkpoint was trained with.
        original_length: tokens the checkpoint was trained for, scaling included.
        target_length: tokens to extend to, at least ``original_length``.
        rope_theta: the new base, for "theta" only.
        parameters: what to set other than by derivation; each must belong to the method.

    Raises:
        RopewalkError: if the name is unknown, the method is inference only, a parameter does not belong to
            it, or the checkpoint's scaling makes the request ambiguous; the message says what to do instead.
    """
    if name == DynamicNtk.name:
        raise RopewalkError(
            "dynamic NTK is for inference only: its base changes with the length; choose ntk or theta"
        )
    if name not in METHODS:
        raise RopewalkError(f"unknown RoPE method {name!r}; choose one of {', '.join(PARAMETERS)}")
    if original_length < 1 or target_length < original_length:
        raise RopewalkError(
            f"the target length must be at least the original length, got {target_length} and "
            f"{original_length}"
        )
    given = _given(name, parameters or MethodParameters())
    if rope_theta is not None and name != "theta":
        raise RopewalkError(f"rope_theta {rope_theta} has no meaning for {name!r}; the method is 'theta'")
    if name == "default":
        if not current.trainable:
            raise RopewalkError(f"{current.name} cannot be trained with; choose theta, linear, ntk or yarn")
        return current
    plain = _plain(current)
    if name == "theta":
        return _with_theta(plain, original_length, target_length, rope_theta)
    if not isinstance(plain, Default | METHODS[name]):
        raise RopewalkError(
            f"{name!r} on a checkpoint that is already {current.name}-scaled is ambiguous: choose "
            f"{current.name!r} to scale further, or 'default' to keep its frequencies"
        )
    return _BUILDERS[name](plain, original_length, target_length, given)


def _given(name: str, parameters: MethodParameters) -> MethodParameters:
    for field in fields(parameters):
        if getattr(parameters, field.name) is not None and field.name not in PARAMETERS[name]:
            takes = ", ".join(PARAMETERS[name]) or "no parameters"
            raise RopewalkError(f"{field.name} has no meaning for {name!r}, which takes {takes}")
    return parameters


def _plain(current: RopeMethod) -> RopeMethod:
    if isinstance(current, DynamicNtk):
        return Default(current.rotary_dim, current.rope_theta)
    return current.as_default() if isinstance(current, Ntk) else current


def _with_theta(
    current: RopeMethod, original_length: int, target_length: int, rope_theta: float | None
) -> RopeMethod:
    if isinstance(current, LongRope):
        raise RopewalkError(
            "'theta' on a longrope checkpoint is ambiguous: its factors belong to its base; choose "
            "'longrope' with factors for the target length"
        )
    if rope_theta is None:
        rope_theta = recommended_base(current, original_length, target_length).rope_theta
    return replace(current, rope_theta=rope_theta)


def recommended_base(current: RopeMethod, original_length: int, target_length: int) -> Recommendation:
    """The base that a checkpoint gets for a longer context where nobody names one.

    Args:
        current: the method it was trained with; dynamic NTK counts as unscaled.
        original_length, target_length: tokens, the second not shorter.

    Raises:
        RopewalkError: if the checkpoint is scaled otherwise than by its base.
    """
    plain = _plain(current)
    if not isinstance(plain, Default):
        raise RopewalkError(
            f"a base by rule is derived for unscaled RoPE, and this checkpoint is {current.name}-scaled: give "
            f"rope_theta (the scaling stays), or choose {current.name!r}"
        )
    return recommended_theta(plain.rope_theta, original_length, target_length)


def _linear(current: RopeMethod, original: int, target: int, given: MethodParameters) -> RopeMethod:
    before = current.factor if isinstance(current, Linear) else 1.0
    return Linear(current.rotary_dim, current.rope_theta, _factor(before, original, target, given))


def _ntk(current: RopeMethod, original: int, target: int, given: MethodParameters) -> RopeMethod:
    return Ntk(current.rotary_dim, current.rope_theta, _factor(1.0, original, target, given))


def _yarn(current: RopeMethod, original: int, target: int, given: MethodParameters) -> RopeMethod:
    base = (
        current if isinstance(current, Yarn) else Yarn(current.rotary_dim, current.rope_theta, 1.0, original)
    )
    if base.attention_factor is not None and given.attention_factor is None:
        raise RopewalkError(
            f"this yarn checkpoint fixes attention_factor {base.attention_factor}, which belongs to its "
            "present length; give attention_factor for the target length"
        )
    return replace(base, **_changes(given, factor=_factor(base.factor, original, target, given)))


def _llama3(current: RopeMethod, original: int, target: int, given: MethodParameters) -> RopeMethod:
    dim, theta = current.rotary_dim, current.rope_theta
    base = current if isinstance(current, Llama3) else Llama3(dim, theta, 1.0, 1.0, 4.0, original)
    return replace(base, **_changes(given, factor=_factor(base.factor, original, target, given)))


def _longrope(current: RopeMethod, original: int, target: int, given: MethodParameters) -> RopeMethod:
    if given.short_factor is None or given.long_factor is None:
        missing = "short_factor" if given.short_factor is None else "long_factor"
        raise RopewalkError(f"longrope needs {missing}, one number a pair; a search finds them")
    start = current.original_max_position_embeddings if isinstance(current, LongRope) else original
    attention_factor = given.attention_factor
    if attention_factor is None:
        attention_factor = longrope_attention_factor(target / start, start)
    return LongRope(
        current.rotary_dim,
        current.rope_theta,
        given.short_factor,
        given.long_factor,
        attention_factor,
        start,
        given.start_tokens or 0,
    )


_BUILDERS: dict[str, Callable[[RopeMethod, int, int, MethodParameters], RopeMethod]] = {
    "linear": _linear,
    "ntk": _ntk,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}


def _factor(before: float, original: int, target: int, given: MethodParameters) -> float:
    """A given factor is the final one; a derived one goes on from what the checkpoint has."""
    return given.factor if given.factor is not None else before * target / original


def _changes(given: MethodParameters, factor: float) -> dict[str, Any]:
    said = {field.name: getattr(given, field.name) for field in fields(given)}
    return {key: value for key, value in said.items() if value is not None} | {"factor": factor}
