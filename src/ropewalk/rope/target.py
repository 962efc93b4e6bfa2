"""The RoPE method that extends a checkpoint to a target length, by its name in a recipe.

A checkpoint that is already scaled can be extended further by its own method: the factor is multiplied by target over
present length. Replacing its scaling by another method is an error, because the weights have adapted to the
frequencies they were trained with, and combining two methods has no agreed meaning.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_theta
from ropewalk.rope.methods import METHODS, Cope, Default, DynamicNtk, LongRope, NoRope, Yarn
from ropewalk.rope.methods.base import (
    CRITICAL_PAIR,
    RopeMethod,
    TargetContext,
    compared_methods,
    trainable_methods,
)
from ropewalk.rope.theory import SEARCH_LIMIT, Recommendation, context_bound, recommended_theta
from ropewalk.rope.theory.bases import Progress
from ropewalk.rope.theory.rules import CURRENT, NTK_AT, RULES, check_rule, pair_of, theta_by_rule

GIVEN = "theta="
YARN_AT = "yarn-rcd="
"""Begin of the name of yarn with a critical pair, as in ``yarn-rcd=30``."""
SPELLED = (f"{NTK_AT}PAIR", f"{YARN_AT}PAIR", f"{GIVEN}VALUE")
"""The names with a number that :func:`candidate` accepts, for messages."""


def method_for_target(
    name: str,
    current: RopeMethod,
    original_length: int,
    target_length: int,
    *,
    rope_theta: float | None = None,
    parameters: Mapping[str, Any] | None = None,
) -> RopeMethod:
    """The method that extends a checkpoint from its present length to a longer one.

    ======== ================================================================================================
    name     result, with ``s`` = ``factor``, or target over original length if it is not given
    ======== ================================================================================================
    default  ``current`` unchanged, its scaling included
    theta    a new base: ``rope_theta``, or by :func:`~ropewalk.rope.theory.recommended_theta`. On a linear,
             yarn or llama3 checkpoint the scaling is kept and ``rope_theta`` is required, because the rules are
             derived for unscaled RoPE
    linear   factor ``s``, times that of a linear checkpoint
    ntk      factor ``s``; with ``critical_pair``, the base ``b·s^(d/(2·critical_pair))``
    yarn     factor ``s``, times that of a yarn checkpoint, whose other parameters are kept; with
             ``critical_pair``, a ramp that ends there
    llama3   factor ``s``, times that of a llama3 checkpoint, whose other parameters are kept
    longrope the given factors, relative to ``θ_i``; a longrope checkpoint keeps its original length
    cope     ``clipped`` pairs as given, those of a cope checkpoint, or 20 of 64; the base too if it is given
    none     no rotation, whatever the checkpoint has; in ``layers`` alone if they are given
    ======== ================================================================================================

    A dynamic-NTK checkpoint was trained unscaled and counts as default. "default" itself is then an error, because
    dynamic NTK cannot be used in training.

    Args:
        name: a method's name as in :data:`~ropewalk.rope.methods.METHODS`.
        current: the method the checkpoint was trained with.
        original_length: tokens the checkpoint was trained for, scaling included.
        target_length: tokens to extend to, at least ``original_length``.
        rope_theta: the new base; only for "theta" and "cope".
        parameters: parameters to set instead of deriving them, by the names in the method's ``parameters``; None means
            not given.

    Raises:
        RopewalkError: if the name is unknown, the method is for inference only, a parameter does not belong to
            it, or the request is ambiguous for a scaled checkpoint; the message says what to do instead.
    """
    if name == DynamicNtk.name:
        raise RopewalkError(
            "dynamic NTK is for inference only: its base changes with the length; choose ntk or theta"
        )
    if name not in METHODS:
        raise RopewalkError(f"unknown RoPE method {name!r}; choose one of {', '.join(trainable_methods())}")
    if original_length < 1 or target_length < original_length:
        raise RopewalkError(
            f"the target length must be at least the original length of {original_length} tokens, got "
            f"{target_length}"
        )
    given = _given(name, parameters or {})
    if name not in ("default", NoRope.name):
        _needs_rotation(name, current)
    if rope_theta is not None and name not in ("theta", Cope.name):
        raise RopewalkError(
            f"rope_theta {rope_theta} has no meaning for method {name!r}; set the base with method 'theta'"
        )
    # "default" means the checkpoint's own method: training continues at its frequencies.
    if name == "default":
        if not current.trainable:
            raise RopewalkError(
                f"the checkpoint's RoPE method {current.name!r} cannot be used in training; choose theta, linear, ntk "
                "or yarn"
            )
        return current
    plain = current.plain
    if name == "theta":
        return _with_theta(plain, original_length, target_length, rope_theta)
    # A config states one method, so a second scaling on top of another could not be saved.
    if name != NoRope.name and not isinstance(plain, Default | METHODS[name]):
        raise RopewalkError(
            f"method {name!r} cannot extend a checkpoint that already has {current.name} RoPE; choose "
            f"{current.name!r} to extend further, or 'default' to keep the present frequencies"
        )
    if rope_theta is not None:
        plain = plain.with_theta(rope_theta)
    return METHODS[name].for_target(plain, TargetContext(original_length, target_length, given))


def _needs_rotation(name: str, current: RopeMethod) -> None:
    if isinstance(current, NoRope):
        some = "" if current.layers is None else " in some layers"
        raise RopewalkError(
            f"{name!r} cannot extend a checkpoint without RoPE{some}, whose weights know no rotation there; keep its "
            "RoPE as it is"
        )


def _given(name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    known = METHODS[name].parameters
    given = {key: value for key, value in parameters.items() if value is not None}
    for key in given:
        if key not in known:
            takes = f"only {', '.join(map(repr, known))}" if known else "no parameters"
            raise RopewalkError(f"{key!r} has no meaning for method {name!r}, which takes {takes}")
    return given


def _with_theta(
    current: RopeMethod, original_length: int, target_length: int, rope_theta: float | None
) -> RopeMethod:
    if isinstance(current, LongRope):
        raise RopewalkError(
            "method 'theta' cannot extend a checkpoint with longrope RoPE, whose factors belong to the present base; "
            "choose 'longrope' with factors for the target length"
        )
    if rope_theta is None:
        rope_theta = recommended_base(current, original_length, target_length).rope_theta
    return current.with_theta(rope_theta)


def recommended_base(current: RopeMethod, original_length: int, target_length: int) -> Recommendation:
    """The base that a checkpoint gets for a longer context if the user names none.

    Args:
        current: the method that it was trained with; dynamic NTK counts as unscaled.
        original_length, target_length: tokens; the second is at least the first.

    Raises:
        RopewalkError: if the checkpoint is scaled by anything but its base.
    """
    plain = current.plain
    if not isinstance(plain, Default):
        raise RopewalkError(
            f"the rules for rope_theta need unscaled RoPE, but this checkpoint has {current.name} RoPE; either set "
            f"rope_theta (the scaling stays), or choose method {current.name!r}"
        )
    return recommended_theta(plain.rope_theta, original_length, target_length, plain.rotary_dim)


def candidates() -> tuple[str, ...]:
    """Every name that :func:`candidate` accepts, besides those with a number (:data:`SPELLED`)."""
    return (CURRENT, *RULES, *compared_methods(), NoRope.name)


def candidate(
    name: str,
    current: RopeMethod,
    trained_length: int,
    target_length: int,
    ceiling: float | None = None,
    progress: Progress | None = None,
) -> RopeMethod:
    """The method that a checkpoint would get for a target length by a rule.

    Args:
        name: ``current`` (no change), ``none`` (no RoPE), one of :data:`~ropewalk.rope.theory.RULES` (a new base), a
            method of :func:`~ropewalk.rope.methods.base.compared_methods` (a factor), ``theta=5e6`` (that base), or
            ``ntk-rcd=30`` and ``yarn-rcd=30`` (these methods with that ``critical_pair``).
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens.
        ceiling, progress: for the rule lower-bound.

    Raises:
        RopewalkError: if the name is unknown, or the rule does not apply to this checkpoint; the message says which
            one does.
    """
    if name == CURRENT:
        return current
    if name.startswith(GIVEN):
        return method_for_target(
            "theta", current, trained_length, target_length, rope_theta=_base(name.removeprefix(GIVEN))
        )
    if name.startswith(YARN_AT):
        pair = {CRITICAL_PAIR: pair_of(name)}
        return method_for_target(Yarn.name, current, trained_length, target_length, parameters=pair)
    # A scaled checkpoint may go on with its own method even if that is not among those compared.
    own = name == current.name and not isinstance(current.plain, Default)
    if name in (*compared_methods(), NoRope.name) or own:
        return method_for_target(name, current, trained_length, target_length)
    check_candidate(name)
    _needs_rotation(name, current)
    plain = current.plain
    if not isinstance(plain, Default):
        raise RopewalkError(
            f"the rules for rope_theta need unscaled RoPE, but this checkpoint has {current.name} RoPE; choose "
            f"either {current.name} to extend further, or {GIVEN}VALUE to change the base"
        )
    theta = theta_by_rule(
        name, plain.rotary_dim, plain.rope_theta, trained_length, target_length, ceiling, progress
    )
    return Default(current.rotary_dim, theta)


def check_candidate(name: str, *, bases_only: bool = False) -> None:
    """Raise for a name that :func:`candidate` does not accept, or with ``bases_only`` one that sets no base."""
    others = (CURRENT,) if bases_only else (CURRENT, *compared_methods(), NoRope.name)
    if name.startswith(GIVEN):
        _base(name.removeprefix(GIVEN))
    elif name.startswith(YARN_AT) and not bases_only:
        pair_of(name)
    elif name not in others:
        spelled = [each for each in SPELLED if not (bases_only and each.startswith(YARN_AT))]
        try:
            check_rule(name)
        except RopewalkError as error:
            raise RopewalkError(f"{error} (also possible: {', '.join([*others, *spelled])})") from None


def _base(text: str) -> float:
    try:
        base = float(text)
    except ValueError:
        raise RopewalkError(f"theta={text} is not a number; write, for example, theta=5e6") from None
    check_theta(base)
    return base


def bound_at(method: RopeMethod, length: int) -> int:
    """The context bound of a method's frequencies for sequences of ``length`` tokens; at most ``SEARCH_LIMIT``."""
    return _bound(tuple(method.frequencies(length).inv_freq.tolist()))


# Seconds where the bound is millions of tokens, and one answer asks for that of the same frequencies several times.
@lru_cache(maxsize=64)
def _bound(inv_freq: tuple[float, ...]) -> int:
    bound = context_bound(inv_freq)
    # None means no violation within the search, so the bound is at least its limit.
    return SEARCH_LIMIT if bound is None else bound
