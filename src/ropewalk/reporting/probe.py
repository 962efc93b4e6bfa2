"""How a probe is shown: the loss under each RoPE setting, and what it does not say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from ropewalk.evaluation.probe import ProbedSetting, ProbeResult
from ropewalk.reporting.figures.rope import probe_figure
from ropewalk.reporting.primitives import Figure
from ropewalk.reporting.style import MISSING
from ropewalk.reporting.tables import Part, ResultTable, interval

CAVEAT = (
    "A low loss before training says which setting disturbs the model least: not which is best after training, nor "
    "that the model finds what lies far back."
)


def describe_probe(result: ProbeResult) -> Iterator[Part]:
    """A table of all settings, why some were not run, and which one starts best."""
    yield _table(result)
    for each in result.refused:
        yield ""
        yield f"{each.name} was not run: {each.reason}"
    yield ""
    yield _verdict(result.found)


def losses_figure(result: ProbeResult) -> Figure:
    """The losses of all settings that have a finite one."""
    found = result.found
    ends = [(r.loss, r.loss) if math.isnan(r.ci95[0]) else r.ci95 for r in found]
    drawn = [
        (r.name, r.loss, low, high)
        for r, (low, high) in zip(found, ends, strict=True)
        if math.isfinite(r.loss)
    ]
    # Ends that equal the loss would be drawn as an interval of no width.
    one_row = all(math.isnan(r.ci95[0]) for r in found)
    caption = "Mean loss of one row, which gives no interval; lower is better." if one_row else None
    title = f"{Path(result.model).name} at {result.target_length:,} tokens"
    return probe_figure(drawn, title, caption)


def _table(probed: ProbeResult) -> ResultTable:
    rows = probed.rows

    def cells(result: ProbedSetting) -> tuple[str, ...]:
        if result.method is None:
            return (result.name, MISSING, result.status, *[MISSING] * 5)
        return (
            result.name,
            f"{result.method.rope_theta:,.0f}",
            _nats(result.loss),
            interval(result.ci95, _nats),
            MISSING if result.beyond_loss is None else _nats(result.beyond_loss),
            _nats(result.difference),
            interval(result.difference_ci95, _nats),
            f"{probed.context_bound(result):,}",
        )

    return ResultTable(
        f"Loss before training in {rows} row{'s' if rows > 1 else ''} of {probed.target_length:,} tokens, nats a "
        "token, with 95 % interval over rows",
        (
            "setting",
            "rope_theta",
            "loss",
            "95 %",
            f"beyond {probed.trained_length:,}",
            "over best",
            "95 %",
            "context bound",
        ),
        tuple(cells(result) for result in (*probed.found, *probed.refused)),
    )


def _nats(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else MISSING


def _verdict(found: Sequence[ProbedSetting]) -> str:
    """Which setting starts best, whether that may be chance, and what it does not say."""
    best = found[0]
    if not math.isfinite(best.loss):
        return f"No setting has a finite loss. {CAVEAT}"
    if len(found) == 1:
        return f"{best.name} is the only setting that ran, with {best.loss:.3f} nats a token. {CAVEAT}"
    second = found[1]
    low = second.difference_ci95[0]
    start = f"{best.name} starts best, {second.difference:.3f} nats a token below {second.name}: "
    if math.isnan(low):
        return f"{start}whether that is chance cannot be said from one row. {CAVEAT}"
    return f"{start}{'more than chance between rows' if low > 0 else 'no more than chance may do'}. {CAVEAT}"
