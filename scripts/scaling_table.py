"""Write the tables of dry runs into docs/scaling.md: the fewest GPUs, beside published runs, beside TRL's long rows.

python scripts/scaling_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from ropewalk.attention.speeds import SPEEDS
from ropewalk.io.lengths import format_length
from ropewalk.planning import H100

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scaling.md"
BEGIN, END = "<!-- scaling: written by scripts/scaling_table.py -->", "<!-- /scaling -->"
PLANNED_BEGIN, PLANNED_END = "<!-- planned: written by scripts/scaling_table.py -->", "<!-- /planned -->"
FEWEST_BEGIN, FEWEST_END = "<!-- fewest: written by scripts/scaling_table.py -->", "<!-- /fewest -->"
PUBLIC_BEGIN, PUBLIC_END = "<!-- public: written by scripts/scaling_table.py -->", "<!-- /public -->"
PLANNED = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "planned_runs.json"
MODELS = ("Llama 3.1 8B", "Llama 3.1 70B")
SCALES = {"": 1.0, "GB": 1e9, "GB/s": 1e9, "TFLOP/s": 1e12, "TB/s": 1e12, "µs": 1e-6}
STATES = ("parameters", "gradients", "moments")
NAMES = """The names in parentheses are fields of the class `Cluster` in `ropewalk.planning`. `ropewalk plan` has
options for five of them: `--gpus-per-node`, `--memory-gb`, `--host-memory-gb`, `--matmul-efficiency` and
`--memory-efficiency`. Attention kernels have a table of their own, `ropewalk.attention.speeds`;
`--attention-efficiency` gives another share."""
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
    lines = [NAMES, "", "| assumed | value | source |", "| --- | --- | --- |"]
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


def gigabytes(size: int) -> str:
    """10^9 bytes, one digit below ten."""
    value = size / 1e9
    return "0" if size == 0 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


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


def between(text: str, begin: str, end: str, content: str) -> str:
    """The page with other content between two marks."""
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{content}\n\n{end}{after}"


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    wanted = between(text, BEGIN, END, assumptions())
    wanted = between(wanted, PLANNED_BEGIN, PLANNED_END, published())
    wanted = between(wanted, FEWEST_BEGIN, FEWEST_END, fewest())
    wanted = between(wanted, PUBLIC_BEGIN, PUBLIC_END, public())
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(wanted, encoding="utf-8")
    elif wanted != text:
        sys.exit(f"the tables in {PAGE.name} are stale; run python scripts/scaling_table.py")


if __name__ == "__main__":
    main()
