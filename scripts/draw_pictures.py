"""Draw the pictures of docs/: three diagrams as SVG, and figures of the package's own results as PNG.

python scripts/draw_pictures.py [--check] [--checkpoint stories260k --text stories.jsonl]

Diagrams (the attention patterns, a run on disk, and the rooms of the package) take their colours from the reader's
colour scheme, on a background of their own; numbers say the same in grey. Figures of an audit and of a search are drawn
where a checkpoint is given: the pages show stories260K and 2048 stories of its own. The demo's run draws demo.png, as
perplexity.png. ``--check`` looks at the diagrams alone, because fonts and versions of matplotlib decide the bytes of a
figure.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from ropewalk import PackedLayout
from ropewalk.attention.choices import Pattern, Positions
from ropewalk.attention.layout import NO_DOCUMENT
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.score_rows import score_rows
from ropewalk.reporting.figures.drawing import Figure, draw
from ropewalk.reporting.figures.evaluation import needle_figure
from ropewalk.reporting.figures.rope import feasible_bases_figure

DOCS = Path(__file__).resolve().parents[1] / "docs"
IMAGES = DOCS / "images"
WIDTH = 400
"""Of a picture, as wide as a narrow screen: its smallest letters can be read there."""
STYLE = """\
text { font-family: system-ui, sans-serif; font-size: 11px; fill: var(--ink); }
.small { font-size: 8px; } .title { font-weight: 600; font-size: 12px; } .code { font-family: monospace; }
.middle { text-anchor: middle; } .card { fill: var(--card); } .box { fill: none; stroke: var(--line); }
.line { stroke: var(--line); } .unseen { fill: none; stroke: var(--faint); stroke-width: 0.5; }
.anchor { fill: var(--ink); } .on-anchor { fill: var(--card); }
.d0 { fill: var(--d0); } .d1 { fill: var(--d1); } .d2 { fill: var(--d2); }
svg { --card: #ffffff; --ink: #222222; --line: #888888; --faint: #cccccc; --d0: #8fbbe0; --d1: #f0a868; --d2: #5fbf9f; }
@media (prefers-color-scheme: dark) {
svg { --card: #1b1e26; --ink: #eeeeee; --line: #8a8f9a; --faint: #4a4f5a; --d0: #3c6fa0; --d1: #a05a1a; --d2: #1f7d62; }
}"""

LENGTHS = (4, 3, 5)
CELL = 13


class Panel(NamedTuple):
    """One pattern: its name, what it needs to be said, and the row that it is drawn from."""

    title: str
    pattern: Pattern
    positions: Positions
    anchor_length: int


PANELS = (
    Panel("full", "full", "continuous", 0),
    Panel("intra-document", "intra_document", "continuous", 0),
    Panel("position reset", "intra_document", "reset", 0),
    Panel("anchor", "anchor", "continuous", 1),
)


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{f" class={kind!r}" if kind else ""}>{escape(words)}</text>'.replace(
        "'", '"'
    )


def picture(height: int, title: str, parts: Iterator[str]) -> str:
    """A whole SVG on a card of its own."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img">\n<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n'
        f'<rect class="card" width="{WIDTH}" height="{height}" rx="6"/>\n{body}\n</svg>\n'
    )


def cell(x: float, y: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{CELL - 1}" height="{CELL - 1}"/>'


def strip(x: float, y: float, layout: PackedLayout) -> Iterator[str]:
    """The row itself: a cell a token, with the number of its document, or A for the anchor."""
    for place, document in enumerate(layout.document_ids.tolist()):
        anchor = document == NO_DOCUMENT
        yield cell(x + place * CELL, y, "anchor" if anchor else f"d{document}")
        letter = "A" if anchor else str(document + 1)
        kind = "small middle on-anchor" if anchor else "small middle"
        yield text(x + place * CELL + CELL / 2 - 0.5, y + 9, letter, kind)


def panel(x: float, y: float, which: Panel) -> Iterator[str]:
    """Queries from top to bottom, keys from left to right; what a query sees has the colour of the key's document."""
    layout = PackedLayout.from_lengths(LENGTHS, which.pattern, which.anchor_length, which.positions)
    documents = layout.document_ids.tolist()
    yield text(x, y, which.title, "title")
    yield from strip(x, y + 8, layout)
    for place, position in enumerate(layout.position_ids.tolist()):
        yield text(x + place * CELL + CELL / 2 - 0.5, y + 31, str(position), "small middle")
    for query, seen in enumerate(layout.dense_mask().tolist()):
        for key, visible in enumerate(seen):
            kind = "unseen"
            if visible:
                kind = "anchor" if documents[key] == NO_DOCUMENT else f"d{documents[key]}"
            yield cell(x + key * CELL, y + 37 + query * CELL, kind)


def patterns() -> Iterator[str]:
    for number, which in enumerate(PANELS):
        yield from panel(18 + number % 2 * 194, 26 + number // 2 * 236, which)


RUN = (
    (
        "Before the first step",
        (
            ("recipe.yaml", "the recipe, every value written out"),
            ("versions.json", "software and machine"),
            ("data/tokens/", "tokenised documents"),
            ("data/<digest>/", "packed rows, their manifest"),
            ("rows.json", "where the rows of the run are"),
            ("evaluation-before.json", "results of the original model"),
        ),
    ),
    (
        "While it trains",
        (
            ("factors-stage1.json", "what a search has found"),
            ("rope-choices.json", "what rope: auto has chosen"),
            ("metrics.jsonl", "one line per step"),
            ("checkpoints/", "where --resume continues"),
        ),
    ),
    (
        "After the last step",
        (
            ("model/", "the result, for transformers"),
            ("evaluation-after.json", "results of the extended model"),
            ("summary.json", "the whole run, for programs"),
            ("report.html, *.png", "the whole run, as a page"),
        ),
    ),
    ("If training continues after that", (("earlier/", "results that were replaced"),)),
)
"""Files of a run's folder, in the order that they appear."""
LINE = 18


def run_on_disk() -> Iterator[str]:
    y = 12
    for number, (when, files) in enumerate(RUN):
        height = 26 + LINE * len(files)
        if number:
            yield f'<path class="line" fill="none" d="M200 {y - 14} v10 m-4 -4 l4 4 l4 -4"/>'
        yield f'<rect class="box" x="12" y="{y}" width="{WIDTH - 24}" height="{height}" rx="4"/>'
        yield text(22, y + 17, when, "title")
        for place, (name, what) in enumerate(files):
            yield text(22, y + 36 + place * LINE, name, "code")
            yield text(190, y + 36 + place * LINE, what)
        y += height + 18


def height_of_run() -> int:
    return 12 + sum(26 + LINE * len(files) + 18 for _, files in RUN) - 6


PACKAGE = DOCS.parent / "src" / "ropewalk"
BAND, ROOM_GAP = 40, 8
"""Height of a layer of rooms, and the space between two rooms in it."""


def rooms() -> dict[str, set[str]]:
    """Each room of the package, and the rooms that its modules import."""
    names = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    found: dict[str, set[str]] = {name: set() for name in names}
    for name in names:
        for path in (PACKAGE / name).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ropewalk."):
                    found[name].add(str(node.module).split(".")[1])
        found[name] &= names - {name}
    return found


def layers() -> list[list[str]]:
    """The rooms in layers, top first: each room lies above every room that it imports, as low as that allows."""
    imported, level = rooms(), dict[str, int]()
    while len(level) < len(imported):
        for name in sorted(imported.keys() - level.keys()):
            if imported[name] <= level.keys():
                level[name] = 1 + max((level[each] for each in imported[name]), default=0)
    return [sorted(n for n in level if level[n] == each) for each in range(max(level.values()), 0, -1)]


def rooms_in_layers() -> Iterator[str]:
    yield text(18, 20, "A subpackage imports only subpackages of lower layers.", "title")
    for number, layer in enumerate(layers()):
        y = 32 + number * BAND
        width = (WIDTH - 36 - ROOM_GAP * (len(layer) - 1)) / len(layer)
        for place, name in enumerate(layer):
            x = 18 + place * (width + ROOM_GAP)
            yield f'<rect class="box" x="{x:g}" y="{y}" width="{width:g}" height="{BAND - 12}" rx="4"/>'
            yield text(x + width / 2, y + 18, f"{name}/", "code middle")


PICTURES = {
    "patterns.svg": lambda: picture(480, "Packed rows under four attention patterns", patterns()),
    "run-on-disk.svg": lambda: picture(height_of_run(), "The folder of a run", run_on_disk()),
    "rooms.svg": lambda: picture(
        34 + BAND * len(layers()), "The subpackages of ropewalk, in layers of imports", rooms_in_layers()
    ),
}


NEEDLE = {
    256: (20, 20, 20, 20, 20, 20, 20, 20, 20, 20, 20),
    512: (3, 1, 7, 11, 16, 20, 19, 19, 20, 20, 19),
    1024: (0, 0, 0, 1, 0, 0, 0, 6, 20, 15, 20),
}
"""Correct answers of 20 at depths from 0 to 100 % in steps of 10, by length: the evaluation of docs/evaluation.md."""
NEEDLE_SAMPLES = 20
CEILING = 1e12
"""Largest base of docs/bases.json."""
AUDITED = ("drift", "ablation", "mitigations", "tokens")
"""Figures of an audit that docs/precision.md shows."""


def needle() -> Figure:
    results = []
    for length, correct in NEEDLE.items():
        depths = [
            {"depth": place / (len(correct) - 1), "n": NEEDLE_SAMPLES, "score": 100 * count / NEEDLE_SAMPLES}
            for place, count in enumerate(correct)
        ]
        score = sum(each["score"] for each in depths) / len(depths)
        count = NEEDLE_SAMPLES * len(correct)
        details = {"depths": depths}
        # The grid shows scores without intervals.
        results.append(
            TaskResult("needle", "teacher_forced", length, count, score, (score, score), details=details)
        )
    return needle_figure(score_rows({"": results}), "embedded:retrieval: needle, teacher-forced")


def bases() -> Figure:
    records = json.loads((DOCS / "bases.json").read_text(encoding="utf-8"))
    return feasible_bases_figure(
        [each["length"] for each in records],
        [[(low, high) for low, high in each["feasible"]] for each in records],
        [each["safe_base"] for each in records],
        {each["length"]: each["published"] for each in records},
        CEILING,
        "RoPE bases that reach a context length (rotary_dim 128)",
    )


def ropewalk(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "ropewalk", *map(str, words)], check=True)


def draw_figures(checkpoint: Path | None, text: Path | None) -> None:
    """Draw the figures, each with the command that its page shows."""
    draw(needle(), IMAGES / "eval-needle.png")
    draw(bases(), IMAGES / "bases.png")
    with TemporaryDirectory() as name:
        folder = Path(name)
        margin = folder / "margin.png"
        bound = ("rope", "bound", "--rope-theta", "10000", "--rotary-dim", "128", "--compare", "5e5,1e6")
        ropewalk(*bound, "--plot", margin)
        shutil.copyfile(margin, IMAGES / margin.name)
        if checkpoint is None or text is None:
            return
        search = ("search", checkpoint, "--text", text, "--to", "2048", "--budget", "300")
        ropewalk(*search, "--out", folder / "factors.json", "--plot", IMAGES / "search.png")
        # Times differ from run to run: the page's table gives those of a quiet machine.
        ropewalk("audit", checkpoint, "--text", text, "--samples", "16", "--plot", folder)
        for each in AUDITED:
            shutil.copyfile(folder / f"{each}.png", IMAGES / f"audit-{each}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/.")
    parser.add_argument("--check", action="store_true", help="only say whether a diagram is stale")
    parser.add_argument("--checkpoint", type=Path, help="stories260K's folder")
    parser.add_argument("--text", type=Path, help="its stories, a JSON object a line")
    chosen = parser.parse_args()
    if (chosen.checkpoint is None) != (chosen.text is None):
        parser.error("--checkpoint and --text go together")
    for name, picture_of in PICTURES.items():
        wanted, path = picture_of(), IMAGES / name
        if not chosen.check:
            path.write_text(wanted, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != wanted:
            sys.exit(f"{name} is stale; run python scripts/draw_pictures.py")
    if not chosen.check:
        draw_figures(chosen.checkpoint, chosen.text)


if __name__ == "__main__":
    main()
