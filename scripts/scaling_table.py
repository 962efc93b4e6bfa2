"""Write the tables of dry runs into docs/scaling.md: by mesh, beside published runs, and beside TRL's long rows.

python scripts/scaling_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from ropewalk.attention.speeds import SPEEDS
from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import format_length
from ropewalk.parallel import MeshShape
from ropewalk.planning import H100, ModelShape, ShardedRun, choose_mesh, estimate_memory

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- scaling: written by scripts/scaling_table.py -->", "<!-- /scaling -->"
PLANNED_BEGIN, PLANNED_END = "<!-- planned: written by scripts/scaling_table.py -->", "<!-- /planned -->"
FEWEST_BEGIN, FEWEST_END = "<!-- fewest: written by scripts/scaling_table.py -->", "<!-- /fewest -->"
PUBLIC_BEGIN, PUBLIC_END = "<!-- public: written by scripts/scaling_table.py -->", "<!-- /public -->"
PLANNED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "planned_runs.json"
MODELS = {
    "Llama 3.1 8B": ModelShape(32, 4096, 14336, 32, 8, 128, 128256),
    "Llama 3.1 70B": ModelShape(80, 8192, 28672, 64, 8, 128, 128256),
}
TOKENS_PER_STEP = 2**24
RANKS = (8, 16, 64, 128, 256, 512, 1024)
SCALES = {"": 1.0, "GB": 1e9, "GB/s": 1e9, "TFLOP/s": 1e12, "TB/s": 1e12, "µs": 1e-6}
SAME = ("model", "context", "mesh", "offload")
"""What a run and the one with short documents have in common."""
STATES = ("parameters", "gradients", "moments")
NAMES = """The names in parentheses are fields of the class `Cluster` in `ropewalk.planning`. `ropewalk plan` has
options for five of them: `--gpus-per-node`, `--memory-gb`, `--host-memory-gb`, `--matmul-efficiency` and
`--memory-efficiency`. Attention kernels have a table of their own, `ropewalk.attention.speeds`;
`--attention-efficiency` gives another share."""
COLUMNS = (
    "GPUs",
    "mesh",
    "states",
    "gathered",
    "layer inputs",
    "in work",
    "**peak**",
    "`auto` expects",
    "CPU",
    "sent: FSDP",
    "sent: Ulysses",
    "sent: ring",
    "tokens/s",
    "**share of peak**",
    "bound by",
    "tokens/s, 8k documents",
)
FEWEST_COLUMNS = (
    "model",
    "tokens per row",
    "GPUs",
    "mesh",
    "peak, GB",
    "too few GPUs",
    "with offload: GPUs",
    "with offload: mesh",
    "with offload: peak, GB",
    "with offload: too few GPUs",
)
PUBLIC_COLUMNS = (
    "model",
    "tokens per row",
    "mesh",
    "TRL: s",
    "GB",
    "run again: s",
    "/ TRL",
    "GB",
    "CPU of a node, GB",
    "kept: s",
    "/ TRL",
    "GB",
    "CPU of a node, GB",
)
BESIDE_COLUMNS = (
    "compared with",
    "model",
    "tokens per row",
    "GPUs",
    "mesh",
    "peak per GPU, GB",
    "states per GPU, GB",
    "seconds per step",
    "tokens/s of all GPUs",
)


def assumptions() -> str:
    """The machines as a table."""
    lines = ["| assumed | value | source |", "| --- | --- | --- |"]
    for each in fields(H100):
        if "unit" not in each.metadata:
            continue
        unit = each.metadata["unit"]
        value = f"{getattr(H100, each.name) / SCALES[unit]:g} {unit}".strip()
        lines.append(f"| {each.metadata['meaning']} (`{each.name}`) | {value} | {each.metadata['source']} |")
    for kernel, (share, source) in ((name, known[H100.generation]) for name, known in SPEEDS.items()):
        lines.append(
            f"| share of the peak speed that attention reaches with `{kernel}` | {share:g} | {source} |"
        )
    return "\n".join(lines)


@cache
def runs(*tables: str) -> list[dict[str, Any]]:
    """The dry runs of ``benchmarks.planned_runs`` for these tables."""
    found: dict[str, Any] = json.loads(PLANNED.read_text(encoding="utf-8"))["runs"]
    return [run for run in found.values() if run["table"] in tables]


def table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table; of its columns, those up to the first mesh are text."""
    text = columns.index("mesh") + 1
    rule = ["---"] * text + ["--:"] * (len(columns) - text)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (columns, rule, *lines))


def lines_of(name: str, length: int, found: list[dict[str, Any]]) -> Iterator[Sequence[str]]:
    """One line for each dry run, and for each number of GPUs for which ``auto`` finds no mesh."""
    model = MODELS[name]
    lines = {run["gpus"]: line(model, run) for run in found}
    for ranks in RANKS:
        remedy = without_mesh(model, length, ranks)
        if ranks not in lines and remedy:
            lines[ranks] = [str(ranks), f"does not fit: {remedy}", *["–"] * (len(COLUMNS) - 2)]
    return (lines[ranks] for ranks in sorted(lines))


def without_mesh(model: ModelShape, length: int, ranks: int) -> str:
    """What ``auto`` suggests where it finds no mesh even with offload; empty if it finds one."""
    remedy = ""
    for offload in (False, True):
        run = ShardedRun(model, MeshShape(), length, offload=offload)
        try:
            choose_mesh(run, TOKENS_PER_STEP // length, ranks)
        except RopewalkError as error:
            # The last part of the sentence says what would do; of the first try, which may name both ways.
            remedy = remedy or str(error).rsplit("; ", 1)[1].replace("ranks", "GPUs")
        else:
            return ""
    return remedy


def line(model: ModelShape, run: dict[str, Any]) -> list[str]:
    """A dry run, beside what the formulas expect of its mesh."""
    memory, parts, sent = run["memory"], run["memory"]["parts"], run["sent"]
    shape = ShardedRun(model, mesh_of(run["mesh"]), run["context"], offload=run["offload"])
    (packed,) = (each for each in runs("documents") if all(each[key] == run[key] for key in SAME))
    sizes = (
        sum(parts[part] for part in STATES),
        parts["gathered"] + parts["reduction"],
        parts["activations"],
        parts["working"] + parts["logits"],
        memory["peak"],
        estimate_memory(shape).peak,
        host_bytes(memory["host"]),
        sent["shards"] + sent["replicas"],
        sent["ulysses"],
        sent["ring"],
    )
    shown = [gigabytes(size) for size in sizes]
    shown[4] = f"**{shown[4]}**{'' if run['fits'] else instead(run['changes'])}"
    return [
        str(run["gpus"]),
        f"{run['mesh']}{', offload' if run['offload'] else ''}",
        *shown,
        f"{run['time']['tokens_per_second']:,.0f}",
        f"**{100 * run['time']['utilisation']:.0f} %**",
        bound(run),
        f"{packed['time']['tokens_per_second']:,.0f}",
    ]


def host_bytes(host: int | dict[str, int]) -> int:
    """CPU memory of a plan; some give only the sum."""
    return host if isinstance(host, int) else sum(host.values())


def mesh_of(words: str) -> MeshShape:
    """A mesh from its degrees in words, as in ``2 ring x 8 sequence``."""
    degrees = (each.split() for each in words.split(" x "))
    return MeshShape(**{name: int(degree) for degree, name in degrees})


def bound(run: dict[str, Any]) -> str:
    """What takes most of a step's time, with its share."""
    time, flops = run["time"], run["flops"]
    if "kinds" in time:
        parts = time["kinds"]
    else:
        attention = flops["attention"] / 0.35
        share = attention / (attention + flops["dense"] / 0.55)
        parts = {"attention": time["compute_seconds"] * share}
        parts |= {"matmul": time["compute_seconds"] - parts["attention"], "other": 0}
    seconds = {
        "attention": parts["attention"],
        "other products": parts["matmul"],
        "memory bandwidth": parts["other"],
        "exchanges": time["exchange_seconds"],
        "FSDP and offload": time["exposed_seconds"],
    }
    most = max(seconds, key=lambda name: seconds[name])
    return f"{most} {100 * seconds[most] / time['seconds']:.0f} %"


def gigabytes(size: int) -> str:
    """10^9 bytes, one digit below ten."""
    value = size / 1e9
    return "0" if size == 0 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def written() -> str:
    """The machines, and a table for each model and length that dry runs were made of."""
    parts = ["### What is assumed of the machines", NAMES, assumptions()]
    meshes: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for run in runs("meshes"):
        meshes.setdefault((run["model"], run["context"]), []).append(run)
    for (name, length), found in sorted(
        meshes.items(), key=lambda each: (list(MODELS).index(each[0][0]), each[0][1])
    ):
        parts += [
            f"### {name}, rows of {format_length(length)}",
            table(COLUMNS, lines_of(name, length, found)),
        ]
    return "\n\n".join(parts)


def fewest() -> str:
    """The fewest GPUs of all dry runs that hold a row, without offload and with it, and the most that do not."""
    tried = runs("meshes", "fewest")
    lines = []
    for name in MODELS:
        for length in sorted({run["context"] for run in tried if run["model"] == name}):
            cells: list[str] = []
            for offload in (False, True):
                found = [
                    run
                    for run in tried
                    if (run["model"], run["context"], run["offload"]) == (name, length, offload)
                ]
                best = min((run for run in found if run["fits"]), key=lambda run: run["gpus"], default=None)
                fewer = [run["gpus"] for run in found if best is None or run["gpus"] < best["gpus"]]
                cells += (
                    ["–", "–", "–"]
                    if best is None
                    else [f"**{best['gpus']}**", best["mesh"], gigabytes(best["memory"]["peak"])]
                )
                cells.append(str(max(fewer)) if fewer else "–")
            lines.append((name, format_length(length), *cells))
    return table(FEWEST_COLUMNS, lines)


def published() -> str:
    """The dry runs that stand beside published ones."""
    lines = []
    for run in sorted(runs("published"), key=lambda run: (run["beside"], run["context"])):
        memory, time = run["memory"], run["time"]
        settings = ", offload" * run["offload"] + ", all logits at once" * run["all_logits"]
        lines.append(
            (
                run["beside"],
                run["model"],
                row_length(run["context"]),
                f"{run['gpus']} x {run['gpu'].upper()}",
                f"{run['mesh']}{settings}",
                f"**{memory['peak'] / 1e9:.1f}**",
                gigabytes(sum(memory["parts"][part] for part in STATES)),
                f"{time['seconds']:,.0f}",
                f"{time['tokens_per_second']:,.0f}",
            )
        )
    return table(BESIDE_COLUMNS, lines)


def public() -> str:
    """TRL's long rows: its figures, and the plans with attention run again and with its results kept."""
    pairs: dict[tuple[str, int, str], dict[bool, dict[str, Any]]] = {}
    for run in runs("public"):
        mesh = run["mesh"] + ", optimizer on the CPU" * ("offload_optimizer" in run["settings"])
        kept = run["settings"].get("keep_attention", False)
        pairs.setdefault((run["model"], run["context"], mesh), {})[kept] = run
    lines = []
    for (name, length, mesh), found in sorted(pairs.items(), key=lambda each: (each[0][1], each[0][0])):
        seconds, size = next(iter(found.values()))["published"]
        known = "–" if size is None else gigabytes(size)
        plans = (cell for kept in (False, True) for cell in beside_trl(found.get(kept), seconds))
        lines.append((name, row_length(length), mesh, f"{seconds:,.0f}", known, *plans))
    return table(PUBLIC_COLUMNS, lines)


def beside_trl(run: dict[str, Any] | None, published: float) -> Sequence[str]:
    """Seconds, their share of the published ones, and GB of a GPU and of a node's CPUs."""
    if run is None:
        return ["–"] * 4
    seconds = run["time"]["seconds"]
    host = gigabytes(run["host"]) + ("" if run["host"] <= run["host_usable"] else ", does not fit")
    return f"{seconds:,.0f}", f"**{seconds / published:.2f}**", gigabytes(run["memory"]["peak"]), host


def row_length(tokens: int) -> str:
    """A length as in a recipe, with commas if it is no multiple of 1,024."""
    words = format_length(tokens)
    return f"{tokens:,}" if words.isdigit() else words


def instead(changes: list[dict[str, Any]]) -> str:
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
    wanted = between(wanted, PLANNED_BEGIN, PLANNED_END, published())
    wanted = between(wanted, FEWEST_BEGIN, FEWEST_END, fewest())
    wanted = between(wanted, PUBLIC_BEGIN, PUBLIC_END, public())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        sys.exit(f"the tables in {PAGE.name} are stale; run python scripts/scaling_table.py")


if __name__ == "__main__":
    main()
