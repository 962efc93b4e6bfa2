"""Show RoPE theory (bounds, bases, frequencies) and the loss of a model under each RoPE setting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from ropewalk.planning.bases import BasesResult, BoundResult, FrequenciesResult, ThetaResult
from ropewalk.planning.rules import CONTEXT_BOUND, SYMBOLS, tokens_text
from ropewalk.reporting.figures.drawing import Figure
from ropewalk.reporting.figures.rope import (
    decay_figure,
    feasible_bases_figure,
    margin_figure,
    periods_figure,
    probe_figure,
    slowest_pair_figure,
)
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import Part, ResultTable, interval
from ropewalk.rope import RopeMethod
from ropewalk.rope.theory import (
    SEARCH_LIMIT,
    FeasibleBases,
    attention_upper_bound,
    inv_freq_of_base,
    similarity_margin,
    slowest_angles,
)
from ropewalk.rope.theory.published import LOWER_BOUNDS, LOWER_BOUNDS_DIM

if TYPE_CHECKING:
    # Needs torch, which arithmetic with bases does not.
    from ropewalk.evaluation.rope_probe import ProbedSetting, ProbeResult

LISTED = 12
"""Largest number of intervals of feasible bases in a table."""


STANDS = "does not rotate"
"""Instead of the period of a pair whose frequency is 0."""
CAVEAT = (
    "A low loss before training shows which setting disturbs the model least. It does not show which one is best after "
    "training, or whether the model retrieves distant tokens."
)


def describe_bound(result: BoundResult) -> Iterator[Part]:
    """The context bound of each base, and the similarity margin where that of the requested one ends."""
    for base in result.bases:
        bound = result.bounds[base]
        far = f"more than {SEARCH_LIMIT:,}" if bound is None else f"{bound:,}"
        yield Text(f"base {base:,.10g}, rotary_dim {result.rotary_dim}: context bound {far} tokens")
    if result.first_violation is not None:
        yield Text(
            f"With base {result.rope_theta:,.10g}, a similar token gets less attention than a random one for the first "
            f"time at a distance of {result.first_violation:,} tokens: the similarity margin there is "
            f"B({result.first_violation}) = {result.margin_there:.3g}"
        )


def bound_figures(result: BoundResult) -> tuple[Figure, Figure]:
    """Draw the margin B(m) and the upper bound of attention, two figures to read together."""
    bounds = result.bounds
    reached = [bound for bound in bounds.values() if bound is not None]
    # Four times the bound shows how the margin goes on; 2^20 distances are as many as a figure can be drawn
    # from quickly.
    longest = min(max([4096, *(4 * bound for bound in reached)]), 2**20)
    every = np.arange(longest + 1)
    named = {
        f"base {base:,.10g}": (inv_freq_of_base(result.rotary_dim, base), bound)
        for base, bound in bounds.items()
    }
    margins = {n: (every, similarity_margin(f, every), b) for n, (f, b) in named.items()}
    # The figure's axis is logarithmic, so evenly spaced distances would be wasted on its right end.
    some = np.unique(np.geomspace(1, longest, 2000).astype(int))
    bounds_by_name = {n: (some, attention_upper_bound(f, some)) for n, (f, _) in named.items()}
    return margin_figure(margins), decay_figure(bounds_by_name)


def describe_bases(result: BasesResult) -> Iterator[Part]:
    """The infimum, the safe base, and the widest intervals of feasible bases."""
    found = result.found
    if found.infimum is None:
        more = (
            "a single pair has the same frequency at every base"
            if found.rotary_dim == 2
            else "raise --ceiling to search larger bases"
        )
        yield (
            f"No base up to {found.ceiling:g} reaches {found.length:,} tokens with rotary_dim {found.rotary_dim}; "
            f"{more}."
        )
        return
    yield Text(
        f"Bases that reach {found.length:,} tokens with rotary_dim {found.rotary_dim} (feasible bases)"
    )
    table = Table(show_header=False)
    table.add_row("infimum", f"{found.infimum:,.9g}: the smallest feasible base")
    count = len(found.feasible)
    table.add_row(
        "feasible intervals", f"{count:,}; the bases between them are not feasible" if count > 1 else "1"
    )
    if found.safe_base is None:
        table.add_row("safe base", f"none: the ceiling of {found.ceiling:g} is infeasible; raise --ceiling")
    else:
        table.add_row(
            "safe base", f"{found.safe_base:,.9g}: every base from here to {found.ceiling:g} is feasible"
        )
    yield table
    if result.safe_base_near_ceiling:
        yield Text("The safe base is close to the ceiling of the search: raise --ceiling.")
    # Bases span orders of magnitude, so the width of an interval is a ratio.
    widest = sorted(found.feasible, key=lambda ends: math.log(ends[1] / ends[0]), reverse=True)[:LISTED]
    of = f"the {len(widest)} widest of {len(found.feasible):,}" if len(found.feasible) > LISTED else "all"
    intervals = Table(title=f"feasible intervals, {of}", title_justify="left")
    for column in ("from base", "to base", "width"):
        intervals.add_column(column, justify="right")
    for low, high in sorted(widest):
        intervals.add_row(f"{low:,.9g}", f"{high:,.9g}", f"{100 * (high / low - 1):,.3g} %")
    yield intervals
    yield (
        "A base is feasible if similar tokens get at least as much attention as random ones at every distance up to "
        f"{found.length:,} tokens"
    )


def bases_figure(result: BasesResult, shorter: Sequence[FeasibleBases]) -> Figure:
    """Draw the feasible bases of a length and of shorter ones.

    Args:
        result: feasible bases of the length.
        shorter: feasible bases of shorter lengths, from :func:`ropewalk.planning.bases.bases_for_halves`.
    """
    maps = [*shorter, result.found]
    lengths, rotary_dim = [each.length for each in maps], result.found.rotary_dim
    # The published bounds hold for one rotary dimension only.
    published = LOWER_BOUNDS if rotary_dim == LOWER_BOUNDS_DIM else {}
    return feasible_bases_figure(
        lengths,
        [each.feasible for each in maps],
        [each.safe_base for each in maps],
        {each: published[each] for each in lengths if each in published},
        result.ceiling,
        title=f"RoPE bases that reach a context length (rotary_dim {rotary_dim})",
    )


def describe_theta(result: ThetaResult) -> Iterator[Part]:
    """The base, its context bound, and the formula, source and caveat of its rule."""
    before, origin = result.before, result.origin
    covers = "covers" if result.reaches_target else "does not cover"
    yield (
        f"rope_theta {result.after.rope_theta:,.10g} for {result.target_length:,} tokens, from the rule {result.rule}"
    )
    if result.reason is not None:
        yield f"recommended: {result.reason}"
    yield f"the context bound of {tokens_text(result.context_bound)} {covers} the target"
    yield (
        f"critical dimension: {result.critical_dimension} of {before.rotary_dim} dimensions complete a turn within "
        f"{result.trained_length:,} tokens with base {before.rope_theta:,.10g}"
    )
    yield CONTEXT_BOUND
    yield f"formula  {origin.formula}"
    yield f"source   {origin.source}"
    yield f"caveat   {origin.caveat}"
    yield SYMBOLS


def theta_figure(result: ThetaResult) -> Figure:
    """Draw the angle of the slowest pair under the old and the new base."""
    target = result.target_length
    positions = np.linspace(0, target, 1000)
    series = {
        f"base {method.rope_theta:,.10g}": (
            positions,
            slowest_angles(method.frequencies().inv_freq, positions),
        )
        for method in (result.before, result.after)
    }
    return slowest_pair_figure(series, result.trained_length, target)


def describe_frequencies(result: FrequenciesResult) -> Iterator[Part]:
    """The method, and the frequency, period and number of turns of each pair."""
    trained, target = result.trained_length, result.target_length
    inv_freq, attention_factor = result.frequencies
    yield (
        f"{result.name}, base {result.after.rope_theta:,.10g}, attention factor {attention_factor:.6g}, "
        f"context bound {tokens_text(result.context_bound)}"
    )
    yield CONTEXT_BOUND
    table = Table()
    for column in (
        "pair",
        "inv_freq (rad/token)",
        "period (tokens)",
        f"turns in {trained:,}",
        f"turns in {target:,}",
    ):
        table.add_column(column, justify="right")
    for pair, theta in enumerate(inv_freq.tolist()):
        turns = (f"{length * theta / (2 * math.pi):,.3g}" for length in (trained, target))
        period = f"{2 * math.pi / theta:,.6g}" if theta else STANDS
        table.add_row(str(pair), f"{theta:.9g}", period, *turns)
    yield table


def turning_periods(method: RopeMethod, length: int) -> np.ndarray:
    """Periods in tokens of the pairs that turn, for sequences of ``length`` tokens."""
    inv_freq = method.frequencies(length).inv_freq
    # Some methods give the slowest pairs a frequency of 0, which has no period.
    periods: np.ndarray = 2 * np.pi / inv_freq[inv_freq > 0].numpy()
    return periods


def frequencies_figure(result: FrequenciesResult) -> Figure:
    """Draw the period of each pair as trained and for the target."""
    trained, target = result.trained_length, result.target_length
    series = {
        "as trained": turning_periods(result.before, trained),
        f"{result.after.name} for the target": turning_periods(result.after, target),
    }
    return periods_figure(series, trained, target)


def describe_probe(result: ProbeResult) -> Iterator[Part]:
    """Table of all settings, why some did not run, and which one has the lowest loss."""
    yield _table(result)
    for each in result.refused:
        yield ""
        yield f"{each.name} did not run: {each.reason}"
    yield ""
    yield _verdict(result.found)


def losses_figure(result: ProbeResult) -> Figure:
    """Draw the losses of all settings whose loss is finite."""
    found = result.found
    # Without an interval, both of its ends are the loss itself.
    ends = [(r.loss, r.loss) if math.isnan(r.ci95[0]) else r.ci95 for r in found]
    plotted = [
        (r.name, r.loss, low, high)
        for r, (low, high) in zip(found, ends, strict=True)
        if math.isfinite(r.loss)
    ]
    # The default caption would mention intervals, which a single sequence does not give.
    one_row = all(math.isnan(r.ci95[0]) for r in found)
    caption = "Mean loss of one sequence, which gives no interval; lower is better." if one_row else None
    title = f"{Path(result.model).name} at {result.target_length:,} tokens"
    return probe_figure(plotted, title, caption)


def _table(probed: ProbeResult) -> ResultTable:
    rows = probed.rows

    def cells(result: ProbedSetting) -> tuple[str, ...]:
        if result.method is None:
            return (result.name, MISSING, result.status, *[MISSING] * 5)
        return (
            result.name,
            f"{result.method.rope_theta:,.0f}" if result.method.rotates else MISSING,
            _nats(result.loss),
            interval(result.ci95, _nats),
            MISSING if result.beyond_loss is None else _nats(result.beyond_loss),
            _nats(result.difference),
            interval(result.difference_ci95, _nats),
            MISSING if (bound := probed.context_bound(result)) is None else f"{bound:,}",
        )

    return ResultTable(
        f"Loss before training in nats per token, over {rows} sequence{'s' if rows > 1 else ''} of "
        f"{probed.target_length:,} tokens, with 95 % interval over sequences",
        (
            "setting",
            "rope_theta",
            "loss",
            "95 %",
            f"beyond {probed.trained_length:,}",
            "above best",
            "95 %",
            "context bound",
        ),
        tuple(cells(result) for result in (*probed.found, *probed.refused)),
        notes=(
            f"beyond {probed.trained_length:,}: loss of the tokens after the first {probed.trained_length:,}",
            "above best: loss minus the lowest loss",
            CONTEXT_BOUND,
        ),
    )


def _nats(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else MISSING


def _verdict(found: Sequence[ProbedSetting]) -> str:
    """Name the setting with the lowest loss, whether the difference may be chance, and the caveat."""
    best = found[0]
    if not math.isfinite(best.loss):
        return f"No setting has a finite loss. {CAVEAT}"
    if len(found) == 1:
        return f"{best.name} is the only setting that ran, with {best.loss:.3f} nats per token. {CAVEAT}"
    second = found[1]
    low = second.difference_ci95[0]
    start = f"{best.name} has the lowest loss, {second.difference:.3f} nats per token below {second.name}; "
    if math.isnan(low):
        return f"{start}one sequence cannot show whether that is chance. {CAVEAT}"
    verdict = "significant across sequences" if low > 0 else "not significant across sequences"
    return f"{start}the difference is {verdict}. {CAVEAT}"
