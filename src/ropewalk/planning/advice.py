"""A recommendation in plain words: what to set for a target length, why, and what it does not promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.planning.settings import Setting, bound_at, compare_settings, tokens_text
from ropewalk.planning.stages import PlannedStage, plan_stages
from ropewalk.rope import Default, DynamicNtk, LongRope, Ntk, RopeMethod
from ropewalk.rope.theory import PairExposure, exposure
from ropewalk.rope.theory.bases import Progress


@dataclass(frozen=True)
class Advice:
    """What to do to reach a target length.

    Attributes:
        trained_length, target_length: tokens.
        current_bound: context bound of the checkpoint as it is, at the target length, tokens.
        settings: every rule's setting.
        chosen: the recommended one; None where nothing needs to change or nothing can be recommended.
        stages: how to get there.
        action: what to do, one sentence.
        reasons: why, a sentence each.
        caveats: what the numbers do not promise, a sentence each.
        exposure_now: each pair at the target length with the frequencies as they are.
        exposure_then: the same with the recommended setting.
    """

    trained_length: int
    target_length: int
    current_bound: int
    settings: Sequence[Setting]
    chosen: Setting | None
    stages: Sequence[PlannedStage]
    action: str
    reasons: Sequence[str]
    caveats: Sequence[str]
    exposure_now: Sequence[PairExposure] = field(repr=False)
    exposure_then: Sequence[PairExposure] | None = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """JSON values; exposures as lists of objects, one a pair."""
        return {
            "trained_length": self.trained_length,
            "target_length": self.target_length,
            "context_bound_now": self.current_bound,
            "settings": [setting.to_json() for setting in self.settings],
            "recommended": None if self.chosen is None else self.chosen.rule,
            "stages": [stage.to_json() for stage in self.stages],
            "action": self.action,
            "reasons": list(self.reasons),
            "caveats": list(self.caveats),
            "exposure_now": [vars(pair) for pair in self.exposure_now],
            "exposure_then": None
            if self.exposure_then is None
            else [vars(pair) for pair in self.exposure_then],
        }


def advise(
    current: RopeMethod,
    trained_length: int,
    target_length: int,
    ceiling: float | None = None,
    progress: Progress | None = None,
    partial: bool = False,
) -> Advice:
    """Compare all settings for a target length and recommend one.

    An unscaled checkpoint is recommended the base of the critical-dimension law where its context bound covers
    the target, else the larger base of the lower bound. A scaled one goes on with its own method.

    Args:
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens.
        ceiling, progress: of the rule lower-bound, which takes seconds to a minute.
        partial: whether only a part of a head is rotated.
    """
    trained = current.frequencies(trained_length).inv_freq
    now = exposure(trained, trained_length, current.frequencies(target_length).inv_freq, target_length)
    bound = bound_at(current, max(trained_length, target_length))
    if target_length <= trained_length:
        return Advice(
            trained_length,
            target_length,
            bound,
            settings=(),
            chosen=None,
            stages=(),
            action=f"Change nothing: the model is trained for {trained_length:,} tokens, and {target_length:,} fit.",
            reasons=(),
            caveats=(_STATED,),
            exposure_now=now,
            exposure_then=None,
        )
    settings = compare_settings(current, trained_length, target_length, ceiling, progress)
    chosen, why = _choose(settings, current, target_length, partial)
    stages: list[PlannedStage] = []
    then = None
    if chosen is not None and chosen.method is not None:
        try:
            stages = plan_stages(
                current, trained_length, target_length, chosen.rule, ceiling, final=chosen.method
            )
        except RopewalkError as error:
            why = [*why, f"No stages are given: {error}."]
        new = chosen.method.frequencies(target_length).inv_freq
        then = exposure(trained, trained_length, new, target_length)
    return Advice(
        trained_length,
        target_length,
        bound,
        settings,
        chosen,
        stages,
        action=_action(chosen, stages, current, target_length),
        reasons=(*_need(now, bound, trained_length, target_length, partial), *why, *_novelty(now, then)),
        caveats=(*([] if chosen is None else [f"About the rule: {chosen.caveat}."]), _NECESSARY, _STATED),
        exposure_now=now,
        exposure_then=then,
    )


_MOST_DOUBLINGS = 24

_NECESSARY = (
    "The bound is a necessary condition from theory (arXiv:2405.14591), not a promise: after training, measure "
    "retrieval (passkey) at the target length; a low perplexity alone proves nothing."
)
_STATED = "The trained length is what the config states; a model may have been trained on shorter texts than it states."


def _choose(
    settings: Sequence[Setting], current: RopeMethod, target_length: int, partial: bool
) -> tuple[Setting | None, list[str]]:
    by_rule = {setting.rule: setting for setting in settings}
    if isinstance(current, LongRope):
        return None, []
    if not isinstance(current, Default | DynamicNtk | Ntk):
        return _own_method(by_rule[current.name], current, target_length)
    law, safe = by_rule["critical-dimension"], by_rule["lower-bound"]
    if law.method is not None and law.reaches_target:
        return law, [
            f"The new base turns each slow pair no further over {target_length:,} tokens than the old one did over the "
            f"trained length, and its context bound of {law.reach} covers the target."
        ]
    if partial and law.method is not None:
        return law, [
            f"The new base turns each slow pair no further over {target_length:,} tokens than the old one did over the "
            f"trained length. Its context bound of {law.reach} counts the rotated dimensions alone, so it "
            "is no argument against it."
        ]
    if safe.method is None:
        return (None if law.method is None else law), [f"The lower bound gives no base: {safe.reason}."]
    short = []
    if law.method is not None:
        short.append(
            f"The scaling law's base of {law.method.rope_theta:,.0f} reaches only {law.reach}, so the "
            "larger base of the lower bound is taken: every base looked at from there on covers the target."
        )
    return safe, short


def _own_method(own: Setting, current: RopeMethod, target_length: int) -> tuple[Setting | None, list[str]]:
    if own.method is None:
        return None, [f"The checkpoint's own method does not go on: {own.reason}."]
    why = [
        f"The checkpoint is {own.rule}-scaled and its weights know those frequencies, so it goes on with {own.rule} "
        "and a larger factor."
    ]
    if not own.reaches_target:
        why.append(
            f"Its context bound of {own.reach} does not cover the target: expect retrieval to weaken "
            "beyond it." + _larger_base(current, target_length)
        )
    return own, why


def _larger_base(current: RopeMethod, target_length: int) -> str:
    """A base that covers the target under the present scaling, from a coarse search; empty where there is none."""
    for step in range(1, 4 * _MOST_DOUBLINGS + 1):
        # Two digits: the search is no finer.
        base = float(f"{current.rope_theta * 2 ** (step / 4):.1e}")
        bound = bound_at(replace(current, rope_theta=base), target_length)
        if bound >= target_length:
            return (
                f" With the present scaling a base of {base:,.0f} would cover it (theta={base:g}, bound "
                f"{tokens_text(bound)}); compare the two with ropewalk rope probe."
            )
    return ""


def _action(
    chosen: Setting | None, stages: Sequence[PlannedStage], current: RopeMethod, target_length: int
) -> str:
    if chosen is None or chosen.method is None:
        if isinstance(current, LongRope):
            return (
                f"Search new factors for {target_length:,} tokens: a longrope checkpoint has factors for one length, "
                "and no formula gives those of another."
            )
        return (
            f"Nothing can be recommended for {target_length:,} tokens; each rule says why it does not apply."
        )
    method = chosen.method
    if isinstance(method, Default):
        what = f"Set rope_theta to {method.rope_theta:,.0f}"
    else:
        what = (
            f"Set {method.name} with factor {getattr(method, 'factor', 1):g} (base {method.rope_theta:,.0f})"
        )
    contexts = [f"{stage.context:,}" for stage in stages]
    if len(contexts) > 1:
        steps = f"{', '.join(contexts[:-1])} and then {contexts[-1]} tokens"
        return f"{what} in the end, and train in {len(contexts)} stages: at {steps}."
    return f"{what} and train at {target_length:,} tokens."


def _need(now: Sequence[PairExposure], bound: int, trained: int, target: int, partial: bool) -> list[str]:
    incomplete = sum(not pair.complete for pair in now)
    new = sum(pair.new_angles > 0 for pair in now)
    return [
        f"As it is, {incomplete} of {len(now)} rotary pairs never completed a turn in {trained:,} tokens, and {new} "
        f"would meet angles at {target:,} tokens that training never showed.",
        f"As it is, a similar token stays more attractive than a random one only up to {tokens_text(bound)} (its "
        f"context bound{', of the rotated dimensions alone' if partial else ''}).",
    ]


def _novelty(now: Sequence[PairExposure], then: Sequence[PairExposure] | None) -> list[str]:
    if then is None:
        return []
    before, after = (sum(pair.new_angles > 0 for pair in pairs) for pairs in (now, then))
    return [f"With the recommended setting {after} pairs meet new angles; as it is, {before} would."]
