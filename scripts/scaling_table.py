"""Write the tables of expected memory, communication and speed into docs/scaling.md, and that of dry runs.

python scripts/scaling_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import format_length
from ropewalk.parallel import MeshShape
from ropewalk.planning import H100, ModelShape, ShardedRun, choose_mesh, estimate_memory, estimate_step

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- scaling: written by scripts/scaling_table.py -->", "<!-- /scaling -->"
PLANNED_BEGIN, PLANNED_END = "<!-- planned: written by scripts/scaling_table.py -->", "<!-- /planned -->"
PLANNED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "planned_runs.json"
MODELS = {
    "Llama 3 8B": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "Llama 3 70B": ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
}
LENGTHS = (2**17, 2**20, 2**22)
RANKS = (8, 16, 64, 128, 256, 512, 1024)
TOKENS_PER_STEP = 2**24
DOCUMENT_LENGTH = 2**13
SCALES = {"": 1.0, "GB": 1e9, "GB/s": 1e9, "TFLOP/s": 1e12, "µs": 1e-6}
COLUMNS = (
    "GPUs",
    "mesh",
    "states",
    "gathered",
    "layer inputs",
    "layer and ring",
    "**peak**",
    "CPU",
    "sent: FSDP",
    "sent: Ulysses",
    "sent: ring",
    "s a step",
    "**share of peak**",
    "tokens/s",
    f"tokens/s, {format_length(DOCUMENT_LENGTH)} documents",
)


def assumptions() -> str:
    """The machines as a table."""
    lines = ["| assumed | value | source |", "| --- | --- | --- |"]
    for each in fields(H100):
        unit = each.metadata["unit"]
        value = f"{getattr(H100, each.name) / SCALES[unit]:g} {unit}".strip()
        lines.append(f"| {each.metadata['meaning']} (`{each.name}`) | {value} | {each.metadata['source']} |")
    return "\n".join(lines)


def table(model: ModelShape, length: int) -> str:
    """One line a number of GPUs."""
    lines = [f"| {' | '.join(COLUMNS)} |", "| --: | --- " + "| --: " * (len(COLUMNS) - 2) + "|"]
    return "\n".join(lines + [f"| {' | '.join(line(model, length, ranks))} |" for ranks in RANKS])


def line(model: ModelShape, length: int, ranks: int) -> list[str]:
    """The mesh that is chosen, with offload where it does not fit without; or what would fit."""
    rows = TOKENS_PER_STEP // length
    mesh = remedy = None
    for offload in (False, True):
        try:
            mesh = choose_mesh(ShardedRun(model, MeshShape(), length, offload=offload), rows, ranks)
            break
        except RopewalkError as error:
            # The last part of the sentence says what would do; of the first try, which may name both ways.
            remedy = remedy or str(error).rsplit("; ", 1)[1].replace("ranks", "GPUs")
    if mesh is None:
        return [str(ranks), f"does not fit: {remedy}", *["–"] * (len(COLUMNS) - 2)]
    run = ShardedRun(model, mesh, length, offload=offload)
    held = estimate_memory(run)
    one = estimate_step(run, rows)
    packed = estimate_step(run, rows, document_length=DOCUMENT_LENGTH)
    sizes = (
        held.states,
        held.root + held.gathered,
        held.activations,
        held.layer + held.ring,
        held.peak,
        held.host,
    )
    sent = (one.sent.fsdp + one.sent.replicas, one.sent.ulysses, one.sent.ring)
    shown = [gigabytes(size) for size in sizes]
    shown[4] = f"**{shown[4]}**"
    return [
        str(ranks),
        f"{mesh}{', offload' if offload else ''}",
        *shown,
        *(gigabytes(size) for size in sent),
        f"{one.seconds:,.0f}",
        f"**{100 * one.model_flops_utilisation:.0f} %**",
        f"{one.tokens_per_second:,.0f}",
        f"{packed.tokens_per_second:,.0f}",
    ]


def gigabytes(size: int) -> str:
    """10^9 bytes, one digit below ten."""
    value = size / 1e9
    return "0" if size == 0 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def written() -> str:
    """All that stands between the marks."""
    parts = ["### What is assumed of the machines", assumptions()]
    for name, model in MODELS.items():
        for length in LENGTHS:
            parts += [f"### {name}, rows of {format_length(length)}", table(model, length)]
    return "\n\n".join(parts)


def planned() -> str:
    """One line for each dry run of ``benchmarks.planned_runs``."""
    lines = [
        "| model | rows of | GPUs | mesh | peak | at its peak | CPU | sent | s a step | share of peak | bound by |",
        "| --- | --: | --: | --- | --: | --- | --: | --: | --: | --: | --- |",
    ]
    for run in json.loads(PLANNED.read_text(encoding="utf-8"))["runs"].values():
        memory, time = run["memory"], run["time"]
        most = sorted(memory["parts"].items(), key=lambda part: -part[1])[:2]
        waits = {
            "computation": time["compute_seconds"],
            "exchanges of attention": time["exchange_seconds"],
            "FSDP and offload": time["exposed_seconds"],
        }
        bound = max(waits, key=lambda name: waits[name])
        attention = run["flops"]["attention"] / sum(run["flops"].values())
        cells = (
            run["model"],
            format_length(run["context"]),
            str(run["gpus"]),
            f"{run['mesh']}{', offload' if run['offload'] else ''}",
            f"**{gigabytes(memory['peak'])}**{'' if run['fits'] else _instead(run['changes'])}",
            ", ".join(f"{name} {gigabytes(size)}" for name, size in most),
            gigabytes(memory["host"]),
            gigabytes(sum(run["sent"].values())),
            f"{time['seconds']:,.0f}",
            f"{100 * time['utilisation']:.0f} %",
            f"{bound} {100 * waits[bound] / time['seconds']:.0f} % (attention {100 * attention:.0f} % of it)",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _instead(changes: list[dict[str, Any]]) -> str:
    """What fits instead, of the changes that a plan has tried."""
    fitting = next((change for change in changes if change["fits"]), None)
    if fitting is None:
        return ", does not fit"
    name = fitting["change"].replace("stages.0.offload_activations: true", "offload")
    return f", does not fit; {gigabytes(fitting['peak'])} with {name}"


def between(text: str, begin: str, end: str, content: str) -> str:
    """The page with other content between two marks."""
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    wanted = between(text, BEGIN, END, written())
    wanted = between(wanted, PLANNED_BEGIN, PLANNED_END, planned())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        sys.exit(f"the tables in {PAGE.name} are stale; run python scripts/scaling_table.py")


if __name__ == "__main__":
    main()
