"""The settings that one would compare for a target length, each by the name of its rule."""

from __future__ import annotations

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_theta
from ropewalk.rope.methods import Default, DynamicNtk, Ntk, RopeMethod
from ropewalk.rope.target import method_for_target
from ropewalk.rope.theory.bases import Progress
from ropewalk.rope.theory.rules import RULES, check_rule, theta_by_rule

CURRENT = "current"
GIVEN = "theta="
FACTOR_METHODS = ("linear", "yarn", "llama3")
CANDIDATES = (CURRENT, *RULES, *FACTOR_METHODS)
"""Every name that :func:`candidate` knows, besides ``theta=VALUE``."""


def candidate(
    name: str,
    current: RopeMethod,
    trained_length: int,
    target_length: int,
    ceiling: float | None = None,
    progress: Progress | None = None,
) -> RopeMethod:
    """The method that a checkpoint would get for a target length under a rule.

    Args:
        name: ``current`` (nothing changes), one of :data:`~ropewalk.rope.theory.RULES` (a new base), ``linear``,
            ``yarn`` or ``llama3`` (a factor), or ``theta=5e6`` (that base).
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens.
        ceiling, progress: of the rule lower-bound.

    Raises:
        RopewalkError: if the name is unknown, or the rule has no meaning for this checkpoint; the message says
            what has.
    """
    if name == CURRENT:
        return current
    if name.startswith(GIVEN):
        return method_for_target(
            "theta", current, trained_length, target_length, rope_theta=_base(name.removeprefix(GIVEN))
        )
    if name in FACTOR_METHODS:
        return method_for_target(name, current, trained_length, target_length)
    check_candidate(name)
    if not isinstance(current, Default | DynamicNtk | Ntk):
        raise RopewalkError(
            f"a base by rule is derived for unscaled RoPE, and this checkpoint is {current.name}-scaled; choose "
            f"{current.name} to scale further, or theta=VALUE"
        )
    base = current.as_default().rope_theta if isinstance(current, Ntk) else current.rope_theta
    theta = theta_by_rule(name, current.rotary_dim, base, trained_length, target_length, ceiling, progress)
    return Default(current.rotary_dim, theta)


def check_candidate(name: str) -> None:
    """Raise for a name that :func:`candidate` does not know."""
    if name.startswith(GIVEN):
        _base(name.removeprefix(GIVEN))
    elif name not in (CURRENT, *FACTOR_METHODS):
        try:
            check_rule(name)
        except RopewalkError as error:
            raise RopewalkError(
                f"{error}; besides the rules there are {', '.join((CURRENT, *FACTOR_METHODS))} and theta=VALUE"
            ) from None


def _base(text: str) -> float:
    try:
        base = float(text)
    except ValueError:
        raise RopewalkError(f"theta={text} gives no number; write theta=5e6") from None
    check_theta(base)
    return base
