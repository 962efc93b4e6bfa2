"""A recommendation in plain words: what to set for a target length, why, and what it does not promise."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.planning.rules import (
    FeasibleSummary,
    Setting,
    compare_settings,
    feasible_summary,
    setting_of,
    tokens_text,
)
from ropewalk.planning.stages import PlannedStage, is_unscaled, plan_stages
from ropewalk.rope import Default, LongRope, RopeMethod, bound_at
from ropewalk.rope.target import recommended_base
from ropewalk.rope.theory import (
    Extension,
    PairExposure,
    Recommendation,
    context_bound,
    exposure,
    published_near,
)
from ropewalk.rope.theory.bases import Progress
from ropewalk.rope.theory.rules import FLOOR_DIM


@dataclass(frozen=True)
class Advice:
    """What to do to reach a target length.

    Attributes:
        trained_length, target_length: tokens.
        current_bound: context bound of the checkpoint as it is, at the target length, tokens.
        refusals: why ``ropewalk extend`` does not train the model at that length, each the rest of a sentence on the
            model; none where it does.
        chosen: the recommended setting; None where nothing needs to change or nothing can be recommended.
        recommendation: the decision on the base, for an unscaled checkpoint.
        stages: how to get there.
        action: what to do, one sentence.
        reasons: why, a sentence each.
        caveats: what the numbers do not promise, a sentence each.
        published: what published models took at about that length.
        settings: every rule's setting; none where nothing needs to change, or no base has a meaning.
        feasible: which bases reach the target by the similarity margin, if that was to be explained.
        exposure_now: each pair at the target length with the frequencies as they are.
        exposure_then: the same with the recommended setting.
    """

    trained_length: int
    target_length: int
    current_bound: int
    refusals: Sequence[str]
    chosen: Setting | None
    recommendation: Recommendation | None
    stages: Sequence[PlannedStage]
    action: str
    reasons: Sequence[str]
    caveats: Sequence[str]
    published: Sequence[Extension]
    settings: Sequence[Setting]
    feasible: FeasibleSummary | None
    exposure_now: Sequence[PairExposure] = field(repr=False)
    exposure_then: Sequence[PairExposure] | None = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """JSON values; exposures as lists of objects, one a pair."""
        then = self.exposure_then
        return {
            "trained_length": self.trained_length,
            "target_length": self.target_length,
            "context_bound_now": self.current_bound,
            "refusals": list(self.refusals),
            "recommended": None if self.chosen is None else self.chosen.rule,
            "recommendation": None if self.recommendation is None else asdict(self.recommendation),
            "stages": [stage.to_json() for stage in self.stages],
            "action": self.action,
            "reasons": list(self.reasons),
            "caveats": list(self.caveats),
            "published": [asdict(each) for each in self.published],
            "settings": [setting.to_json() for setting in self.settings],
            "feasible": None if self.feasible is None else asdict(self.feasible),
            "exposure_now": [vars(pair) for pair in self.exposure_now],
            "exposure_then": None if then is None else [vars(pair) for pair in then],
        }


def advise(
    current: RopeMethod,
    trained_length: int,
    target_length: int,
    refusals: Sequence[str] = (),
    plannable: bool = True,
) -> Advice:
    """Recommend a setting for a target length, as ``ropewalk extend`` takes it where a recipe names none.

    An unscaled checkpoint gets the base of :func:`ropewalk.rope.theory.recommended_theta`; a scaled one goes on with
    its own method.

    Args:
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens.
        refusals: why the model cannot be trained at that length, if it cannot: no setting is recommended then.
        plannable: whether a base has a meaning for the target length at all.
    """
    trained = current.frequencies(trained_length).inv_freq
    now = exposure(trained, trained_length, current.frequencies(target_length).inv_freq, target_length)
    bound = bound_at(current, max(trained_length, target_length))
    fits = target_length <= trained_length
    chosen = recommendation = then = None
    stages: list[PlannedStage] = []
    why: list[str] = []
    if not fits and not refusals:
        stages, chosen, recommendation, why = _plan(current, trained_length, target_length)
    if chosen is not None and chosen.method is not None:
        then = exposure(
            trained, trained_length, chosen.method.frequencies(target_length).inv_freq, target_length
        )
    compared = not fits and plannable
    unscaled = not fits and plannable and is_unscaled(current)
    return Advice(
        trained_length,
        target_length,
        bound,
        () if fits else tuple(refusals),
        chosen,
        recommendation,
        tuple(stages),
        action=_action(chosen, stages, current, trained_length, target_length, refusals),
        reasons=() if fits else (*why, *_need(now, then, bound, trained_length, target_length)),
        caveats=(_STATED,) if fits or refusals else (_NECESSARY, _STATED),
        published=published_near(target_length) if unscaled else (),
        settings=compare_settings(current, trained_length, target_length) if compared else (),
        feasible=None,
        exposure_now=now,
        exposure_then=then,
    )


def explained(advice: Advice, rotary_dim: int, progress: Progress | None = None) -> Advice:
    """The same advice with a map of the bases that reach the target, where settings are compared at all.

    Args:
        advice: on the target length.
        rotary_dim: rotated dimensions of a head.
        progress: of the map, which takes seconds to half a minute.
    """
    if not advice.settings:
        return advice
    return replace(advice, feasible=feasible_summary(rotary_dim, advice.target_length, progress))


_MOST_DOUBLINGS = 24
_FAR = 3.0
"""Factor between the recommended base and published ones from which it is said: the spread of published bases."""

_NECESSARY = (
    "After training, measure retrieval (passkey) at the target length: the theory promises nothing, and a low "
    "perplexity alone proves nothing."
)
_STATED = "The trained length is what the config states; a model may have been trained on shorter texts than it states."


def _plan(
    current: RopeMethod, trained_length: int, target_length: int
) -> tuple[list[PlannedStage], Setting | None, Recommendation | None, list[str]]:
    """Stages, the setting of the last one, the decision behind it, and why."""
    if isinstance(current, LongRope):
        return [], None, None, []
    try:
        stages = plan_stages(current, trained_length, target_length)
    except RopewalkError as error:
        return [], None, None, [f"The checkpoint's own method does not go on: {error}."]
    method = stages[-1].method
    if not is_unscaled(current):
        chosen = setting_of(current.name, current, method, target_length)
        return stages, chosen, None, _own_method(chosen, current, target_length)
    found = recommended_base(current, trained_length, target_length)
    chosen = setting_of(found.rule, current, method, target_length)
    said = f"{found.reason[0].upper()}{found.reason[1:]}."
    return (
        stages,
        chosen,
        found,
        [said, *_practice(found.rope_theta, target_length), _reach(chosen, current, target_length)],
    )


def _practice(base: float, target_length: int) -> list[str]:
    """What published models took at about that length, and whether the recommended base is far from it."""
    near = published_near(target_length)
    if not near:
        return []
    low, high = near[0], near[-1]
    middle = statistics.median(each.new_theta for each in near)
    said = (
        f"Published models at about {target_length:,} tokens took {low.new_theta:,.0f} ({low.model}) to "
        f"{high.new_theta:,.0f} ({high.model}); the median of these {len(near)} is {middle:,.0f}"
    )
    if base > _FAR * high.new_theta:
        said += f"; this base is {base / high.new_theta:.1f} times the largest of them"
    elif base < low.new_theta / _FAR:
        said += f"; this base is {low.new_theta / base:.1f} times smaller than the smallest of them"
    elif base > _FAR * middle:
        said += f"; this base is {base / middle:.1f} times the median, because this checkpoint begins with a large one"
    return [f"{said}."]


def _reach(chosen: Setting, current: RopeMethod, target_length: int) -> str:
    """The context bound of the recommended base, and what it is worth where it does not cover the target."""
    if chosen.reaches_target:
        return f"Its context bound of {chosen.reach} covers the target."
    if current.rotary_dim < FLOOR_DIM:
        return (
            f"With the {current.rotary_dim} rotary dimensions of this model its context bound is {chosen.reach}. With "
            f"fewer than {FLOOR_DIM} the bound asks for bases that nobody trains with (docs/theory.md), so it is no "
            "argument against this one."
        )
    return (
        f"Its context bound is {chosen.reach}: above the smallest base that covers the target, single distances fail "
        "again (--explain). Published models work beyond their bound."
    )


def _own_method(own: Setting, current: RopeMethod, target_length: int) -> list[str]:
    why = [
        f"The checkpoint is {own.rule}-scaled and its weights know those frequencies, so it goes on with {own.rule} "
        "and a larger factor."
    ]
    if not own.reaches_target:
        why.append(
            f"Its context bound of {own.reach} does not cover the target: expect retrieval to weaken "
            "beyond it." + _larger_base(current, target_length)
        )
    return why


def _larger_base(current: RopeMethod, target_length: int) -> str:
    """A base that covers the target under the present scaling, from a coarse search; empty where there is none."""
    for step in range(1, 4 * _MOST_DOUBLINGS + 1):
        # Two digits: the search is no finer.
        base = float(f"{current.rope_theta * 2 ** (step / 4):.1e}")
        method = replace(current, rope_theta=base)
        if context_bound(method.frequencies(target_length).inv_freq, limit=target_length) is None:
            bound = bound_at(method, target_length)
            return (
                f" With the present scaling a base of {base:,.0f} would cover it (theta={base:g}, bound "
                f"{tokens_text(bound)}); compare the two with ropewalk rope probe."
            )
    return ""


def _action(
    chosen: Setting | None,
    stages: Sequence[PlannedStage],
    current: RopeMethod,
    trained_length: int,
    target_length: int,
    refusals: Sequence[str],
) -> str:
    if target_length <= trained_length:
        return (
            f"Change nothing: the model is trained for {trained_length:,} tokens, and {target_length:,} fit."
        )
    if refusals:
        return f"ropewalk extend does not train this model at {target_length:,} tokens: it {'; it '.join(refusals)}."
    if chosen is None or chosen.method is None:
        if isinstance(current, LongRope):
            return (
                f"Search new factors for {target_length:,} tokens (ropewalk search): a longrope checkpoint has factors "
                "for one length, and no formula gives those of another."
            )
        return f"Nothing can be recommended for {target_length:,} tokens."
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


def _need(
    now: Sequence[PairExposure],
    then: Sequence[PairExposure] | None,
    bound: int,
    trained: int,
    target: int,
) -> list[str]:
    incomplete = sum(not pair.complete for pair in now)
    new = sum(pair.new_angles > 0 for pair in now)
    after = (
        "" if then is None else f"; with the new setting {sum(pair.new_angles > 0 for pair in then)} would"
    )
    return [
        f"As it is, its context bound is {tokens_text(bound)}; {incomplete} of {len(now)} rotary pairs never "
        f"completed a turn in {trained:,} tokens, and at {target:,} tokens {new} would meet angles that training "
        f"never showed{after}.",
    ]
