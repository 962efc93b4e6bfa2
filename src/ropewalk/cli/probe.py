"""``ropewalk rope probe``: which RoPE settings disturb a checkpoint least at a longer context, without training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ropewalk.cli.options import JsonFlag, PlotFile
from ropewalk.cli.output import notes, print_json, print_whole, results
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.rows import rows_of
from ropewalk.evaluation.settings import ProbeSettings

if TYPE_CHECKING:
    from ropewalk.evaluation import ProbeResult
    from ropewalk.reporting import ResultTable

CAVEAT = (
    "A low loss before training says which setting disturbs the model least: not which is best after training, nor "
    "that the model finds what lies far back."
)


def probe_command(
    model: Annotated[str, Field(description="A checkpoint's folder, a Hub id, or embedded.")],
    settings: ProbeSettings,
    *,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure the loss of some text under each RoPE setting, with no training: the same weights, the same rows."""
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.data import load_tokenizer
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.evaluation import candidate_methods
    from ropewalk.evaluation.probe import probe
    from ropewalk.models.load import choose_device, load_model, read_config
    from ropewalk.rope import check_candidate
    from ropewalk.versions import software_versions

    target = settings.to
    for name in settings.rules:
        check_candidate(name)
    path = resolve_model(model)
    config = read_config(path)
    length = settings.from_length or config.trained_length
    if target < length:
        raise RopewalkError(f"--to {target} is shorter than the {length} tokens the model is trained for")
    current = config.one_rope("one setting for all of them would change layers that are not meant")
    methods, refused = candidate_methods(settings.rules, current, length, target)
    where = choose_device(settings.device)
    measured_on = rows_of(settings.text, load_tokenizer(path), target, settings.rows)
    loaded = load_model(path, dtype=settings.dtype, device=where)
    with ConsoleReporter(notes).bar("probe", len(methods) * len(measured_on)) as advance:
        found = probe(loaded, methods, measured_on, length, lambda done, total: advance(done, "rows"))
    if as_json:
        print_json(
            {
                "model": model,
                "trained_length": length,
                "target_length": target,
                "text": settings.text,
                "rows": len(measured_on),
                "dtype": str(loaded.dtype).removeprefix("torch."),
                "device": str(loaded.device),
                "results": [
                    {**result.to_json(), "context_bound": _bound(result, target)}
                    for result in (*found, *refused)
                ],
                "best": found[0].name,
                "versions": software_versions(),
            }
        )
    else:
        print_whole(_table([*found, *refused], length, target, len(measured_on)).rich())
        for line in (*(f"{result.name} was not run: {result.reason}" for result in refused), _verdict(found)):
            results().print()
            results().say(line)
    # After the result: a picture that cannot be written must not take it away.
    if plot is not None:
        _draw(found, plot, f"{'embedded' if model == 'embedded' else Path(path).name} at {target:,} tokens")
        if not as_json:
            results().print()
            results().say(f"picture {plot}")


def _bound(result: ProbeResult, target: int) -> int | None:
    from ropewalk.planning.rules import bound_at

    return None if result.method is None else bound_at(result.method, target)


def _table(found: Sequence[ProbeResult], trained: int, target: int, rows: int) -> ResultTable:
    from ropewalk.reporting import ResultTable
    from ropewalk.reporting.style import MISSING
    from ropewalk.reporting.tables import interval

    def cells(result: ProbeResult) -> tuple[str, ...]:
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
            f"{_bound(result, target):,}",
        )

    return ResultTable(
        f"Loss before training in {rows} row{'s' if rows > 1 else ''} of {target:,} tokens, nats a token, with 95 % "
        "interval over rows",
        (
            "setting",
            "rope_theta",
            "loss",
            "95 %",
            f"beyond {trained:,}",
            "over best",
            "95 %",
            "context bound",
        ),
        tuple(cells(result) for result in found),
    )


def _nats(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def _verdict(found: Sequence[ProbeResult]) -> str:
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


def _draw(found: Sequence[ProbeResult], path: Path, title: str) -> None:
    from ropewalk.reporting import draw
    from ropewalk.reporting.figures.rope import probe_figure

    ends = [(r.loss, r.loss) if math.isnan(r.ci95[0]) else r.ci95 for r in found]
    drawn = [
        (r.name, r.loss, low, high)
        for r, (low, high) in zip(found, ends, strict=True)
        if math.isfinite(r.loss)
    ]
    # Ends that equal the loss would be drawn as an interval of no width.
    one_row = all(math.isnan(r.ci95[0]) for r in found)
    caption = "Mean loss of one row, which gives no interval; lower is better." if one_row else None
    draw(probe_figure(drawn, title, caption), path)
