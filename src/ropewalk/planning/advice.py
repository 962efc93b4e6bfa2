"""Recommend RoPE settings and training stages for a target length, with the reasons and the caveats."""

from __future__ import annotations

import math
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
from ropewalk.planning.stages import ATTEND_NO_FURTHER, PlannedStage, is_unscaled, kept_stages, plan_stages
from ropewalk.rope import Default, LongRope, Proportional, RopeMethod, Yarn, bound_at
from ropewalk.rope.methods.base import ORIGINAL
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
from ropewalk.rope.theory.rules import CURRENT, FLOOR_DIM, covers, meant_thousands


@dataclass(frozen=True)
class Advice:
    """Advice on how to reach a target length.

    Attributes:
        trained_length, target_length: tokens.
        current_bound: context bound of the unchanged checkpoint at the target length, tokens.
        refusals: why ``ropewalk extend`` does not train the model at that length. Each completes a sentence that
            begins with "it". Empty if the model can be trained.
        first: changes that the checkpoint needs before training, each an imperative without a full stop. Usually
            empty.
        lift: limits of the checkpoint's attention that the recipe must lift.
        lifted: advice for the model without its attention windows, if every layer's window is shorter than the target.
        chosen: the recommended setting. None if nothing needs to change or no setting can be recommended.
        recommendation: how the base was chosen, for an unscaled checkpoint.
        stages: training stages up to the target length.
        action: what to do, in one sentence.
        reasons: why, one sentence each.
        caveats: what the numbers do not promise, one sentence each.
        published: bases of published models with about this context length.
        settings: the setting that each rule gives. Empty if nothing needs to change or the base does not matter.
        feasible: bases whose similarity margin stays non-negative up to the target. None unless requested.
        exposure_now: exposure of each rotary pair at the target length with the present frequencies.
        exposure_then: exposure of each rotary pair with the recommended setting.
    """

    trained_length: int
    target_length: int
    current_bound: int
    refusals: Sequence[str]
    first: Sequence[str]
    lift: Sequence[str]
    lifted: Advice | None
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
        """JSON values; exposures are lists with one object per rotary pair."""
        then = self.exposure_then
        return {
            "trained_length": self.trained_length,
            "target_length": self.target_length,
            "context_bound_now": self.current_bound,
            "refusals": list(self.refusals),
            "first": list(self.first),
            "lift": list(self.lift),
            "lifted": None if self.lifted is None else self.lifted.in_short(),
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

    def in_short(self) -> dict[str, Any]:
        """JSON values of the recommendation, its stages and its reasons alone."""
        return {
            "recommended": None if self.chosen is None else self.chosen.rule,
            "stages": [stage.to_json() for stage in self.stages],
            "action": self.action,
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True)
class Checkpoint:
    """Properties of a checkpoint's layers that change the advice.

    Attributes:
        refusals: why the model cannot be trained at the target length. If there are any, no setting is recommended.
        first: changes that the checkpoint needs before training, each an imperative without a full stop.
        lift: limits of the checkpoint's attention that the recipe must lift.
        head_dim: dimensions of a query or key head. None if RoPE rotates all of them.
        windows: attention window in tokens that limits every layer and that the recipe may lift; None otherwise.
        seen: largest distance in tokens that attention saw in training. None if that is the trained length.
        limits_context: whether at least one layer with RoPE attends to the whole context.
        stays: a clause that says why RoPE must stay unchanged. None if it may change.
        length_from: where the trained length comes from, as words after "from".
    """

    refusals: Sequence[str] = ()
    first: Sequence[str] = ()
    lift: Sequence[str] = ()
    head_dim: int | None = None
    windows: int | None = None
    seen: int | None = None
    limits_context: bool = True
    stays: str | None = None
    length_from: str = "the config"


def advise(
    current: RopeMethod, trained_length: int, target_length: int, checkpoint: Checkpoint | None = None
) -> Advice:
    """Recommend a setting for a target length: the one that ``ropewalk extend`` uses if the recipe names none.

    An unscaled checkpoint gets the base of :func:`ropewalk.rope.theory.recommended_theta`. A scaled checkpoint keeps
    its own method and gets a larger factor.

    Args:
        current: RoPE method that the checkpoint was trained with.
        trained_length, target_length: tokens.
        checkpoint: properties of its layers; None for a decoder whose layers all have RoPE and full attention.
    """
    about = checkpoint or Checkpoint()
    trained, seen = current.frequencies(trained_length).inv_freq, about.seen or trained_length
    # Frequencies may depend on the length (dynamic NTK, longrope), so each length gets its own.
    now = exposure(trained, seen, current.frequencies(target_length).inv_freq, target_length)
    bound = bound_at(current, max(trained_length, target_length))
    fits = target_length <= trained_length
    refusals = () if fits else tuple(about.refusals)
    stays, because = about.stays, ATTEND_NO_FURTHER
    # Asked of the turning pairs alone: one that stands still has a period of infinity and is never complete.
    if stays is None and isinstance(current, Proportional) and all(pair.complete for pair in _turning(now)):
        stays, because = (
            _all_turned(now, seen),
            "every pair that rotates has turned through all angles in training",
        )
    chosen = recommendation = then = lifted = None
    stages: list[PlannedStage] = []
    why: list[str] = []
    if fits:
        pass
    elif stays is not None:
        stages = kept_stages(current, trained_length, target_length, because)
        why = [f"{stays[0].upper()}{stays[1:]}."]
    elif not refusals:
        stages, chosen, recommendation, why = _plan(current, trained_length, target_length, about.head_dim)
    elif about.windows is not None:
        # Training showed no distance beyond the window, however long the documents were.
        seen = min(trained_length, about.windows)
        # With its windows lifted, the model starts over: the advice for it stands beside the refusal, as an
        # alternative.
        without = Checkpoint(
            lift=("windows",), head_dim=about.head_dim, seen=seen, length_from=about.length_from
        )
        lifted = advise(current, trained_length, target_length, without)
    # An unchanged setting would only repeat the exposure of the checkpoint.
    if chosen is not None and chosen.method is not None and chosen.rule != CURRENT:
        then = exposure(trained, seen, chosen.method.frequencies(target_length).inv_freq, target_length)
    # Without a layer whose RoPE limits the context, the base does not matter and there is nothing to compare.
    compared = not fits and about.limits_context and stays is None
    if compared:
        why += _need(now, then, bound, seen, target_length)
    return Advice(
        trained_length,
        target_length,
        bound,
        refusals,
        () if fits else tuple(about.first),
        () if fits or refusals else tuple(about.lift),
        lifted,
        chosen,
        recommendation,
        tuple(stages),
        action=_action(
            chosen, stages, current, trained_length, target_length, refusals, about.first, stays is not None
        ),
        reasons=tuple(why),
        caveats=(*(() if fits or refusals else (_NECESSARY,)), _STATED.format(about.length_from)),
        published=published_near(target_length) if compared and is_unscaled(current) else (),
        settings=compare_settings(current, trained_length, target_length) if compared else (),
        feasible=None,
        exposure_now=now,
        exposure_then=then,
    )


def explained(advice: Advice, rotary_dim: int, progress: Progress | None = None) -> Advice:
    """Add a map of the bases that reach the target. Advice that compares no settings is returned unchanged.

    Args:
        advice: for the target length.
        rotary_dim: number of rotated dimensions per head.
        progress: progress callback; the map takes seconds at 128K and a minute or more at 1M.
    """
    if not advice.settings:
        return advice
    return replace(advice, feasible=feasible_summary(rotary_dim, advice.target_length, progress))


_MOST_DOUBLINGS = 24
_FAR = 3.0
"""Ratio to the published bases above which the advice mentions the difference: the spread of the published bases."""

_NECESSARY = (
    "After training, measure retrieval (passkey) at the target length: the theory gives no guarantee, and a low "
    "perplexity alone does not show that the model uses the context."
)
_STATED = "The trained length comes from {}; the model may have been trained on shorter documents."


def _plan(
    current: RopeMethod, trained_length: int, target_length: int, head_dim: int | None
) -> tuple[list[PlannedStage], Setting | None, Recommendation | None, list[str]]:
    """Return the stages, the setting of the last stage, how its base was chosen, and the reasons."""
    # No formula gives rescale factors for another length; the action is then to search them.
    if isinstance(current, LongRope):
        return [], None, None, []
    try:
        stages = plan_stages(current, trained_length, target_length)
    except RopewalkError as error:
        return [], None, None, [f"The checkpoint's own method cannot be extended: {error}."]
    # The last stage trains at the target length, so its setting is the recommendation.
    method = stages[-1].method
    if not is_unscaled(current):
        chosen = setting_of(current.name, current, method, target_length)
        return stages, chosen, None, _own_method(chosen, current, target_length, head_dim)
    found = recommended_base(current, trained_length, target_length)
    chosen = setting_of(found.rule, current, method, target_length)
    text = f"{found.reason[0].upper()}{found.reason[1:]}."
    reach = _reach(chosen, current, head_dim)
    if found.rule == CURRENT:
        return stages, chosen, found, [text, reach]
    covered = []
    if covers(current.rotary_dim, current.rope_theta, target_length):
        covered = [
            f"The present base, {current.rope_theta:,.0f}, covers the target too. A larger base keeps the slow pairs "
            "within the angles seen in training but lowers the resolution at short distances; compare the two with "
            "`ropewalk rope probe`."
        ]
    practice = _practice(found.rope_theta, target_length)
    return stages, chosen, found, [text, *practice, reach, *covered]


def _practice(base: float, target_length: int) -> list[str]:
    """Compare the recommended base with those of published models of about that context length."""
    near = published_near(target_length)
    if not near:
        return []
    low, high = near[0], near[-1]
    middle = statistics.median(each.new_theta for each in near)
    text = f"Published models for about {target_length:,} tokens use "
    if low.new_theta < high.new_theta:
        text += (
            f"bases from {low.new_theta:,.0f} ({low.model}) to {high.new_theta:,.0f} ({high.model}); the median of "
            f"{len(near)} is {middle:,.0f}"
        )
    else:
        text += f"base {low.new_theta:,.0f} ({', '.join(dict.fromkeys(each.model for each in near))})"
    # Practice is no rule: a base far outside it is worth a comparison, not a refusal.
    if base > _FAR * high.new_theta:
        text += (
            f"; the recommended base is {base / high.new_theta:.1f} times the largest of them, so compare it with "
            f"theta={high.new_theta:g} (`ropewalk rope probe`)"
        )
    elif base < low.new_theta / _FAR:
        text += f"; the smallest of them is {low.new_theta / base:.1f} times the recommended base"
    elif base > _FAR * middle:
        text += (
            f"; the recommended base is {base / middle:.1f} times the median, because this checkpoint starts from a "
            "large base"
        )
    return [f"{text}."]


def _reach(chosen: Setting, current: RopeMethod, head_dim: int | None) -> str:
    """State the context bound of the recommended base and, if it falls short of the target, how much that matters."""
    if chosen.reaches_target:
        return f"Its context bound of {chosen.reach} covers the target."
    return _no_argument(chosen, current, head_dim) or (
        f"Its context bound is {chosen.reach}, although a smaller base covers the target: there are gaps between the "
        "bases that cover it (see --explain). Published models work beyond their bound."
    )


def _no_argument(chosen: Setting, current: RopeMethod, head_dim: int | None) -> str | None:
    """Say why a context bound below the target does not speak against the setting; None if it does."""
    rotated = current.rotary_dim
    # Unrotated dimensions add a constant to the margin; from half of the head on, it outweighs the rest at
    # any distance.
    if head_dim is not None and head_dim - rotated >= rotated:
        return (
            f"The context bound of the {rotated} rotated dimensions is {chosen.reach}. This does not speak against the "
            f"setting: the other {head_dim - rotated} dimensions of a head do not depend on distance, and with them "
            "similar tokens get at least as much attention as random ones at any distance."
        )
    if rotated < FLOOR_DIM:
        return (
            f"With this model's {rotated} rotary dimensions its context bound is {chosen.reach}. That does not speak "
            f"against it: below {FLOOR_DIM} rotary dimensions, the bound demands bases far larger than any model is "
            "trained with (docs/theory.md)."
        )
    return None


def _own_method(own: Setting, current: RopeMethod, target_length: int, head_dim: int | None) -> list[str]:
    assert own.method is not None
    why = [
        f"The checkpoint was trained with {own.rule} scaling, so it keeps {own.rule}{_counted(own.method, current)}."
    ]
    if isinstance(current, Yarn) and current.attention_factor == 1:
        why.append(
            "Its config states attention_factor 1, which turns off yarn's attention temperature at any length, so "
            "that stays."
        )
    if not own.reaches_target:
        why.append(
            _no_argument(own, current, head_dim)
            or f"Its context bound of {own.reach} does not cover the target: expect weaker retrieval beyond it."
            + _larger_base(current, target_length)
        )
    return why


def _counted(method: RopeMethod, current: RopeMethod) -> str:
    """Name the new factor and the one it replaces. Both count from the original length; they do not multiply."""
    factor = getattr(method, "factor", None)
    if factor is None:
        return ""
    text = f" and gets a larger factor: {factor:g} instead of {getattr(current, 'factor', 1):g}"
    if method.extended_length() is not None:
        text += f", both relative to the original {getattr(method, ORIGINAL):,} tokens"
    before, after = current.frequencies().attention_factor, method.frequencies().attention_factor
    return (
        text if before == after else f"{text}; the attention factor changes from {before:.4g} to {after:.4g}"
    )


def _larger_base(current: RopeMethod, target_length: int) -> str:
    """Suggest a base that covers the target under the present scaling, from a coarse search; empty if none does."""
    # In quarters of a doubling from the present base up, so that the smallest base that covers the target is named.
    for step in range(1, 4 * _MOST_DOUBLINGS + 1):
        # Rounded to two digits because neighbouring steps differ by 19 %.
        base = float(f"{current.rope_theta * 2 ** (step / 4):.1e}")
        method = replace(current, rope_theta=base)
        # None means that no margin up to the target is negative.
        if context_bound(method.frequencies(target_length).inv_freq, limit=target_length) is None:
            bound = bound_at(method, target_length)
            return (
                f" With the present scaling, a base of {base:,.0f} would cover it (theta={base:g}, context bound "
                f"{tokens_text(bound)}); compare the two with `ropewalk rope probe`."
            )
    return ""


def _action(
    chosen: Setting | None,
    stages: Sequence[PlannedStage],
    current: RopeMethod,
    trained_length: int,
    target_length: int,
    refusals: Sequence[str],
    first: Sequence[str],
    stays: bool,
) -> str:
    if target_length <= trained_length:
        return (
            f"Change nothing: the model is trained for {trained_length:,} tokens, and the target of "
            f"{target_length:,} fits{meant_thousands(trained_length, target_length) or '.'}"
        )
    if refusals:
        return f"ropewalk extend does not train this model at {target_length:,} tokens: it {'; it '.join(refusals)}."
    text = _setting_action(chosen, stages, current, target_length, stays)
    return " ".join([*(f"First {order}." for order in first), text])


def _setting_action(
    chosen: Setting | None,
    stages: Sequence[PlannedStage],
    current: RopeMethod,
    target_length: int,
    stays: bool,
) -> str:
    contexts = [f"{stage.context:,}" for stage in stages]
    if len(contexts) > 1:
        steps = f"{', '.join(contexts[:-1])} and then {contexts[-1]} tokens"
        training = f"train in {len(contexts)} stages: at {steps}."
    else:
        training = f"train at {target_length:,} tokens."
    if stays:
        return f"Leave RoPE unchanged, and {training}"
    if chosen is None or chosen.method is None:
        if isinstance(current, LongRope):
            return (
                f"Search new rescale factors for {target_length:,} tokens with `ropewalk search`: the factors of a "
                "longrope checkpoint are valid for one length, and no formula gives those for another."
            )
        return f"There is no recommendation for {target_length:,} tokens."
    if chosen.rule == CURRENT:
        return f"Keep rope_theta at {chosen.method.rope_theta:,.0f}, and {training}"
    method = chosen.method
    factor = getattr(method, "factor", None)
    if isinstance(method, Default):
        what = f"Set rope_theta to {method.rope_theta:,.0f}"
    elif factor is None:
        # Only a checkpoint's own method is recommended without a factor.
        what = f"Keep {method.name} (base {method.rope_theta:,.0f})"
    else:
        what = f"Set {method.name} with factor {factor:g} (base {method.rope_theta:,.0f})"
    return f"{what}{' in the last stage,' if len(contexts) > 1 else ''} and {training}"


def _need(
    now: Sequence[PairExposure],
    then: Sequence[PairExposure] | None,
    bound: int,
    trained: int,
    target: int,
) -> list[str]:
    turning = _turning(now)
    incomplete = sum(not pair.complete for pair in turning)
    kind = "rotary pairs" if len(turning) == len(now) else "pairs that rotate"
    new = sum(pair.new_angles > 0 for pair in now)
    after = "" if then is None else f" ({sum(pair.new_angles > 0 for pair in then)} with the new setting)"
    return [
        f"The unchanged checkpoint has a context bound of {tokens_text(bound)}. In training, {incomplete} of its "
        f"{len(turning)} {kind} did not complete a turn within {trained:,} "
        f"tokens; at {target:,} tokens, {new} pairs would reach angles not seen in training{after}.",
    ]


def _turning(pairs: Sequence[PairExposure]) -> list[PairExposure]:
    """The pairs that rotate: a part of a head's dimensions may not depend on the distance."""
    return [pair for pair in pairs if math.isfinite(pair.trained_period)]


def _all_turned(pairs: Sequence[PairExposure], seen: int) -> str:
    """Why no larger base is needed, as a clause."""
    turning = _turning(pairs)
    slowest = max(pair.trained_period for pair in turning)
    still = len(pairs) - len(turning)
    others = f"the other {still} pairs of a head do not depend on the distance, and " if still else ""
    return (
        f"the slowest of the {len(turning)} pairs that rotate turns once in {slowest:,.0f} tokens, so training on "
        f"{seen:,} tokens has shown every angle; {others}no base limits the context"
    )
