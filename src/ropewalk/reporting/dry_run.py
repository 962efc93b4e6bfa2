"""Show a planned run: what fits, how long it takes, what fills the memory, and what to look at."""

from __future__ import annotations

from collections.abc import Iterator

from ropewalk.dry_run.run import PlannedRun, PlannedStage
from ropewalk.io.lengths import format_length
from ropewalk.reporting.tables import Part, ResultTable
from ropewalk.training.simulation.memory import HOST_PARTS, MOMENTS, PARTS


def describe_planned_run(result: PlannedRun) -> Iterator[Part]:
    """The stages in one table, then memory, bytes and findings of each."""
    yield f"{result.model} on {result.ranks} x {result.device} ({result.device_bytes / 1e9:.3g} GB each)"
    yield ""
    yield _stages(result)
    for stage in result.stages:
        yield ""
        yield _memory(stage)
        yield ""
        yield from _findings(stage)
    yield ""
    yield "Assumptions"
    for line in result.assumptions:
        yield f"- {line}"


def _stages(result: PlannedRun) -> ResultTable:
    timed = any(stage.time is not None for stage in result.stages)
    priced = any(stage.time is not None and stage.time.cost is not None for stage in result.stages)
    header = ["stage", "context", "mesh", "fits", "peak"]
    header += ["step", "tokens/s", "MFU", "days/B tokens", "whole stage"] * timed + ["cost"] * priced
    rows = []
    for stage in result.stages:
        cells = [
            str(stage.number),
            format_length(stage.context),
            stage.mesh,
            "yes" if stage.fits else "no",
            _gb(stage.memory.peak),
        ]
        if stage.time is not None:
            cells += [
                _seconds(stage.time.seconds),
                f"{stage.time.tokens_per_second:,.0f}",
                f"{stage.time.utilisation:.0%}",
                f"{stage.time.days_per_billion_tokens:.2g}",
                f"{stage.time.hours:.3g} h" if stage.time.hours >= 1 else _seconds(3600 * stage.time.hours),
            ]
            cells += [_cost(stage.time.cost)] if stage.time.cost is not None else []
        rows.append(tuple(cells))
    return ResultTable(
        "Estimated memory of a device, and time",
        tuple(header),
        tuple(rows),
        text_columns=4,
        notes=(
            *(f"stage {stage.number}: {stage.documents}" for stage in result.stages),
            *(
                ["time and cost are those of the training steps, without packing, evaluations and export"]
                if timed
                else ()
            ),
        ),
    )


def _memory(stage: PlannedStage) -> ResultTable:
    moments = [name for name in MOMENTS if name in stage.memory.moments]
    # One unit for all cells; parts below half a percent of the peak are left out.
    unit, name_of_unit = (1e9, "GB") if stage.memory.peak >= 1e9 else (1e6, "MB")
    shown = [
        part
        for part in PARTS
        if any(stage.memory.moments[name][part] >= 0.005 * stage.memory.peak for name in moments)
    ]
    rows = [
        (part, *(f"{stage.memory.moments[name][part] / unit:,.1f}" for name in moments))
        for part in (*shown, "total")
    ]
    notes = [
        f"{_gb(stage.usable)} are usable; the peak is on rank {stage.rank}, in the {MOMENTS[stage.memory.moment]}"
    ]
    notes += [
        f"{part}: {meaning}" for part, meaning in PARTS.items() if part in shown and part in _TO_EXPLAIN
    ]
    if stage.memory.host:
        parts = ", ".join(f"{_gb(size)} {part}" for part, size in stage.memory.host.items())
        verdict = "of" if stage.host <= stage.host_usable else "more than the"
        notes.append(
            f"CPU memory of a machine: {_gb(stage.host)}, {verdict} {_gb(stage.host_usable)} that are usable; for each "
            f"device {parts}"
        )
        notes += [f"{part}: {HOST_PARTS[part]}" for part in stage.memory.host]
    return ResultTable(
        f"Stage {stage.number}: memory of a device at the highest point of each part of the step, {name_of_unit}",
        ("", *(MOMENTS[name] for name in moments)),
        tuple(rows),
        notes=tuple(notes),
    )


def _findings(stage: PlannedStage) -> Iterator[str]:
    where = f"stage {stage.number}"
    bound = _bound(stage)
    yield f"{where}: {bound}"
    sent = {name: size for name, size in stage.sent.items() if size}
    if sent:
        listed = ", ".join(f"{_gb(size)} {_SENT[name]}" for name, size in sent.items())
        states = stage.recurrent and ("ring" in sent or "ulysses" in sent)
        yield f"{where}: a GPU sends {listed}{' and of states' if states else ''} in a step"
    if stage.attention:
        yield f"{where}: {stage.attention}"
    finer = stage.finer
    if (
        finer is not None
        and finer.fits
        and finer.seconds
        and stage.time
        and finer.seconds < stage.time.seconds
    ):
        yield (
            f"{where}: auto took the mesh with the fewest ranks per row; with {finer.change}, which has room to keep "
            f"results of attention, a step takes {_seconds(finer.seconds)} instead of {_seconds(stage.time.seconds)}"
        )
    for change in stage.changes:
        if change.peak is None:
            yield f"{where}: {change.change} does not suit the recipe: {change.reason}"
        else:
            verdict = "fits" if change.fits else "does not fit"
            beside = f" and {_gb(change.host)} of CPU memory" if change.host else ""
            yield f"{where}: with {stage.including(change)} it {verdict} ({_gb(change.peak)}{beside})"
    for change in stage.spare:
        if change.fits:
            faster = ""
            if change.seconds is not None and stage.time is not None:
                less = round(100 * (1 - change.seconds / stage.time.seconds))
                faster = f", and a step takes {less} % less time" if less > 0 else ", but saves no time"
            yield (
                f"{where}: memory is free: {stage.including(change)} fits too ({_gb(change.peak or 0)}){faster}"
            )
    largest = stage.memory.largest[0]
    at = f" at {largest.place}" if largest.place else ""
    shape = " x ".join(map(str, largest.shape)) or "scratch memory"
    yield (
        f"{where}: the largest tensor at the peak is {_gb(largest.bytes)}, {shape} {largest.dtype}, made by "
        f"{largest.operator}{at}"
    )
    for tensor in stage.memory.full_logits:
        yield (
            f"{where}: warning: the logits of all tokens are held at once, {' x '.join(map(str, tensor.shape))} "
            f"{tensor.dtype} ({_gb(tensor.bytes)}), made by {tensor.operator} at {tensor.place or 'an unknown place'}"
        )
    if stage.device == "cpu":
        return
    inside = [wait for wait in stage.waits if wait.moment in ("forward", "backward")]
    for wait in inside:
        yield (
            f"{where}: warning: the host waits for the GPU {_times(wait.number)} in the {wait.moment}, at {wait.place}"
        )
    number = sum(wait.number for wait in stage.waits)
    if not inside:
        yield f"{where}: the host waits for the GPU {_times(number)} in a step, never within a forward or backward"


_KINDS = {
    "matmul": "matrix products",
    "attention": "attention",
    "recurrent": "kernels of recurrent layers",
    "other": "operators limited by memory bandwidth",
}

_TO_EXPLAIN = ("moments", "gathered", "reduction", "working")
"""Parts of the memory whose name alone does not say what they hold."""

_SENT = {
    "shards": "of parameters and gradients",
    "replicas": "to replicas",
    "ulysses": "in Ulysses exchanges",
    "ring": "of keys and values on the ring",
}


def _bound(stage: PlannedStage) -> str:
    operations = sum(stage.flops.values())
    shares = [f"attention is {stage.flops['attention'] / operations:.0%}"]
    if "recurrent" in stage.flops:
        shares.append(f"kernels of recurrent layers are {stage.flops['recurrent'] / operations:.1%}")
    counted = f"{' and '.join(shares)} of the step's {operations:.3g} operations"
    time = stage.time
    if time is None:
        return counted
    parts = {
        **{_KINDS[kind]: seconds for kind, seconds in time.kinds.items()},
        "communication within attention": time.exchange_seconds,
        "other communication that computation does not hide": time.exposed_seconds,
    }
    most = max(parts, key=lambda name: parts[name])
    listed = ", ".join(f"{name} {seconds / time.seconds:.0%}" for name, seconds in parts.items())
    return f"bound by {most} ({listed}); {counted}"


def _gb(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 600 else f"{seconds / 60:.3g} min"


def _cost(cost: float) -> str:
    """A sum of money: whole from 100 on, otherwise with two digits after the point."""
    if cost >= 100:
        return f"{cost:,.0f}"
    return f"{cost:.2f}" if cost >= 0.005 else "< 0.01"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
