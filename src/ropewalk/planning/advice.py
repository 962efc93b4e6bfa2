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
from ropewalk.planning.stages import PlannedStage, is_unscaled, kept_stages, plan_stages
from ropewalk.rope import Default, LongRope, RopeMethod, bound_at
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
from ropewalk.rope.theory.rules import CURRENT, FLOOR_DIM, covers


@dataclass(frozen=True)
class Advice:
    """What to do to reach a target length.

    Attributes:
        trained_length, target_length: tokens.
        current_bound: context bound of the checkpoint as it is, at the target length, tokens.
        refusals: why ``ropewalk extend`` does not train the model at that length, each the rest of a sentence on the
            model; none where it does.
        first: what to do to the checkpoint before that, each an order without its full stop; nothing for most.
        lift: limits of the checkpoint's attention that the recipe must lift.
        lifted: advice on the model without its windows, where every layer has one shorter than the target.
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
        """JSON values; exposures as lists of objects, one a pair."""
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
        """JSON values of what to do alone."""
        return {
            "recommended": None if self.chosen is None else self.chosen.rule,
            "stages": [stage.to_json() for stage in self.stages],
            "action": self.action,
            "reasons": list(self.reasons),
        }


@dataclass(frozen=True)
class Checkpoint:
    """What advice must know of a checkpoint beyond its RoPE and its length.

    Attributes:
        refusals: why the model cannot be trained at the target length, if it cannot: no setting is recommended then.
        first: as of :class:`Advice`.
        lift: as of :class:`Advice`.
        head_dim: dimensions of a head's queries and keys; None where all are rotated.
        windows: the tokens that every layer is limited to, where lifting the windows is a choice; else None.
        seen: the largest distance in tokens that attention has seen, where that is less than the trained length.
        limits_context: whether some layer both has RoPE and sees everything before it.
        stays: why RoPE is to stay as it is, a clause; None where it is to change.
    """

    refusals: Sequence[str] = ()
    first: Sequence[str] = ()
    lift: Sequence[str] = ()
    head_dim: int | None = None
    windows: int | None = None
    seen: int | None = None
    limits_context: bool = True
    stays: str | None = None


def advise(
    current: RopeMethod, trained_length: int, target_length: int, checkpoint: Checkpoint | None = None
) -> Advice:
    """Recommend a setting for a target length, as ``ropewalk extend`` takes it where a recipe names none.

    An unscaled checkpoint gets the base of :func:`ropewalk.rope.theory.recommended_theta`; a scaled one goes on with
    its own method.

    Args:
        current: the method the checkpoint was trained with.
        trained_length, target_length: tokens.
        checkpoint: what its layers say; those of a plain decoder if None.
    """
    about = checkpoint or Checkpoint()
    trained, seen = current.frequencies(trained_length).inv_freq, about.seen or trained_length
    now = exposure(trained, seen, current.frequencies(target_length).inv_freq, target_length)
    bound = bound_at(current, max(trained_length, target_length))
    fits = target_length <= trained_length
    refusals = () if fits else tuple(about.refusals)
    chosen = recommendation = then = lifted = None
    stages: list[PlannedStage] = []
    why: list[str] = []
    if fits:
        pass
    elif about.stays is not None:
        stages = kept_stages(current, trained_length, target_length)
        why = [f"{about.stays[0].upper()}{about.stays[1:]}."]
    elif not refusals:
        stages, chosen, recommendation, why = _plan(current, trained_length, target_length, about.head_dim)
    elif about.windows is not None:
        # Attention has seen no distance beyond the window, whatever length the texts had.
        seen = min(trained_length, about.windows)
        without = Checkpoint(lift=("windows",), head_dim=about.head_dim, seen=seen)
        lifted = advise(current, trained_length, target_length, without)
    if chosen is not None and chosen.method is not None and chosen.rule != CURRENT:
        then = exposure(trained, seen, chosen.method.frequencies(target_length).inv_freq, target_length)
    compared = not fits and about.limits_context
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
        action=_action(chosen, stages, current, trained_length, target_length, refusals, about),
        reasons=tuple(why),
        caveats=(_STATED,) if fits or refusals else (_NECESSARY, _STATED),
        published=published_near(target_length) if compared and is_unscaled(current) else (),
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
    current: RopeMethod, trained_length: int, target_length: int, head_dim: int | None
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
        return stages, chosen, None, _own_method(chosen, current, target_length, head_dim)
    found = recommended_base(current, trained_length, target_length)
    chosen = setting_of(found.rule, current, method, target_length)
    said = f"{found.reason[0].upper()}{found.reason[1:]}."
    reach = _reach(chosen, current, head_dim)
    if found.rule == CURRENT:
        return stages, chosen, found, [said, reach]
    covered = []
    if covers(current.rotary_dim, current.rope_theta, target_length):
        covered = [
            f"The present base, {current.rope_theta:,.0f}, covers the target too: a larger one spares the slow pairs "
            "angles that training never showed, and costs resolution at short distances; compare the two with ropewalk "
            "rope probe."
        ]
    practice = _practice(found.rope_theta, target_length)
    return stages, chosen, found, [said, *practice, reach, *covered]


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
        said += (
            f"; this base is {base / high.new_theta:.1f} times the largest of them, so compare it with "
            f"theta={high.new_theta:g} (ropewalk rope probe)"
        )
    elif base < low.new_theta / _FAR:
        said += f"; this base is {low.new_theta / base:.1f} times smaller than the smallest of them"
    elif base > _FAR * middle:
        said += f"; this base is {base / middle:.1f} times the median, because this checkpoint begins with a large one"
    return [f"{said}."]


def _reach(chosen: Setting, current: RopeMethod, head_dim: int | None) -> str:
    """The context bound of the recommended base, and what it is worth where it does not cover the target."""
    if chosen.reaches_target:
        return f"Its context bound of {chosen.reach} covers the target."
    return _no_argument(chosen, current, head_dim) or (
        f"Its context bound is {chosen.reach}: above the smallest base that covers the target, single distances fail "
        "again (--explain). Published models work beyond their bound."
    )


def _no_argument(chosen: Setting, current: RopeMethod, head_dim: int | None) -> str | None:
    """Why the context bound of a setting that falls short is no argument against it; None where it is one."""
    rotated = current.rotary_dim
    if head_dim is not None and head_dim - rotated >= rotated:
        return (
            f"The bound of the {rotated} rotated dimensions alone is {chosen.reach}, but the other "
            f"{head_dim - rotated} of a head compare tokens alike at every distance, so the margin of the whole head "
            "never becomes negative: the bound is no argument against this setting."
        )
    if rotated < FLOOR_DIM:
        return (
            f"With the {rotated} rotary dimensions of this model its context bound is {chosen.reach}. With "
            f"fewer than {FLOOR_DIM} the bound asks for bases that nobody trains with (docs/theory.md), so it is no "
            "argument against this one."
        )
    return None


def _own_method(own: Setting, current: RopeMethod, target_length: int, head_dim: int | None) -> list[str]:
    assert own.method is not None
    why = [
        f"The checkpoint is {own.rule}-scaled and its weights know those frequencies, so it goes on with {own.rule} "
        f"and a larger factor{_counted(own.method, current)}."
    ]
    if not own.reaches_target:
        why.append(
            _no_argument(own, current, head_dim)
            or f"Its context bound of {own.reach} does not cover the target: expect retrieval to weaken "
            "beyond it."
            + _larger_base(current, target_length)
        )
    return why


def _counted(method: RopeMethod, current: RopeMethod) -> str:
    """The factor and the one that it replaces; it is never on top of that."""
    factor = getattr(method, "factor", None)
    if factor is None:
        return ""
    said = f": {factor:g} in place of {getattr(current, 'factor', 1):g}"
    if method.extended_length() is not None:
        said += f", both counted from the original {getattr(method, ORIGINAL):,} tokens"
    before, after = current.frequencies().attention_factor, method.frequencies().attention_factor
    return said if before == after else f"{said}; its attention factor goes from {before:.4g} to {after:.4g}"


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
    about: Checkpoint,
) -> str:
    if target_length <= trained_length:
        return (
            f"Change nothing: the model is trained for {trained_length:,} tokens, and {target_length:,} fit."
        )
    if refusals:
        return f"ropewalk extend does not train this model at {target_length:,} tokens: it {'; it '.join(refusals)}."
    said = _setting_action(chosen, stages, current, target_length, about.stays is not None)
    return " ".join([*(f"First {order}." for order in about.first), said])


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
        return f"Leave RoPE as it is, and {training}"
    if chosen is None or chosen.method is None:
        if isinstance(current, LongRope):
            return (
                f"Search new factors for {target_length:,} tokens (ropewalk search): a longrope checkpoint has factors "
                "for one length, and no formula gives those of another."
            )
        return f"Nothing can be recommended for {target_length:,} tokens."
    if chosen.rule == CURRENT:
        return f"Keep rope_theta at {chosen.method.rope_theta:,.0f}, and {training}"
    method = chosen.method
    if isinstance(method, Default):
        what = f"Set rope_theta to {method.rope_theta:,.0f}"
    else:
        what = (
            f"Set {method.name} with factor {getattr(method, 'factor', 1):g} (base {method.rope_theta:,.0f})"
        )
    return f"{what}{' in the end,' if len(contexts) > 1 else ''} and {training}"


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
