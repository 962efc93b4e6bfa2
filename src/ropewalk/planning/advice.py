"""A recommendation in plain words: what to set for a target length, why, and what it does not promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.planning.settings import Setting, bound_at, compare_settings
from ropewalk.planning.stages import PlannedStage, plan_stages
from ropewalk.rope import Default, DynamicNtk, LongRope, Ntk, RopeMethod
from ropewalk.rope.theory import SAFE_CEILING, SEARCH_LIMIT, PairExposure, exposure
from ropewalk.rope.theory.bases import Progress


@dataclass(frozen=True)
class Advice:
    """What to do to reach a target length.

    Attributes:
        trained_length, target_length: tokens.
        current_bound: context bound of the checkpoint as it is, tokens.
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
    ceiling: float = SAFE_CEILING,
    progress: Progress | None = None,
) -> Advice:
    """Compare all settings for a target length and recommend one.

    An unscaled checkpoint is recommended the base of the critical-dimension law where its context bound covers
    the target, else the larger base of the lower bound. A scaled one goes on with its own method.

    Args:
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens.
        ceiling, progress: of the rule lower-bound, which takes seconds to a minute.
    """
    trained = current.frequencies(trained_length).inv_freq
    now = exposure(trained, trained_length, current.frequencies(target_length).inv_freq, target_length)
    bound = bound_at(current, trained_length)
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
    chosen, why = _choose(settings, current, target_length)
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
        reasons=(*_need(now, bound, trained_length, target_length), *why, *_novelty(now, then)),
        caveats=(*([] if chosen is None else [f"About the rule: {chosen.caveat}."]), _NECESSARY, _STATED),
        exposure_now=now,
        exposure_then=then,
    )


_NECESSARY = (
    "The bound is a necessary condition from theory (arXiv:2405.14591), not a promise: after training, measure "
    "retrieval (passkey) at the target length; a low perplexity alone proves nothing."
)
_STATED = "The trained length is what the config states; a model may have been trained on shorter texts than it states."


def _choose(
    settings: Sequence[Setting], current: RopeMethod, target_length: int
) -> tuple[Setting | None, list[str]]:
    by_rule = {setting.rule: setting for setting in settings}
    if isinstance(current, LongRope):
        return None, []
    if not isinstance(current, Default | DynamicNtk | Ntk):
        return _own_method(by_rule[current.name])
    law, safe = by_rule["critical-dimension"], by_rule["lower-bound"]
    if law.method is not None and law.reaches_target:
        return law, [
            f"The new base turns each slow pair no further over {target_length:,} tokens than the old one did over the "
            f"trained length, and its context bound of {_tokens(law.context_bound)} covers the target."
        ]
    if safe.method is None:
        return (None if law.method is None else law), [f"The lower bound gives no base: {safe.reason}."]
    short = []
    if law.method is not None:
        short.append(
            f"The scaling law's base of {law.method.rope_theta:,.0f} reaches only {_tokens(law.context_bound)}, so the "
            f"larger base of the lower bound is taken: from it up to {SAFE_CEILING:.0e} every base covers the target."
        )
    return safe, short


def _own_method(own: Setting) -> tuple[Setting | None, list[str]]:
    if own.method is None:
        return None, [f"The checkpoint's own method does not go on: {own.reason}."]
    why = [
        f"The checkpoint is {own.rule}-scaled and its weights know those frequencies, so it goes on with {own.rule} "
        "and a larger factor."
    ]
    if not own.reaches_target:
        why.append(
            f"Its context bound of {_tokens(own.context_bound)} does not cover the target: expect retrieval to weaken "
            "beyond it. A larger base under the same scaling raises the bound (theta=VALUE in ropewalk rope probe)."
        )
    return own, why


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


def _need(now: Sequence[PairExposure], bound: int, trained: int, target: int) -> list[str]:
    incomplete = sum(not pair.complete for pair in now)
    new = sum(pair.new_angles > 0 for pair in now)
    return [
        f"As it is, {incomplete} of {len(now)} rotary pairs never completed a turn in {trained:,} tokens, and {new} "
        f"would meet angles at {target:,} tokens that training never showed.",
        f"As it is, a similar token stays more attractive than a random one only up to {_tokens(bound)} (its context "
        "bound).",
    ]


def _novelty(now: Sequence[PairExposure], then: Sequence[PairExposure] | None) -> list[str]:
    if then is None:
        return []
    before, after = (sum(pair.new_angles > 0 for pair in pairs) for pairs in (now, then))
    return [f"With the recommended setting {after} pairs meet new angles; as it is, {before} would."]


def _tokens(count: int | None) -> str:
    if count is None or count >= SEARCH_LIMIT:
        return f"more than {SEARCH_LIMIT:,} tokens"
    return f"{count:,} tokens"
