"""Write docs/readers.md's tables, and docs/published-configs.csv: published configs through every reader.

python scripts/readers_page.py [--check]
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ropewalk.compatibility import READERS, Reading
from ropewalk.compatibility.table import checkpoint_of, readings_of

ROOT = Path(__file__).resolve().parents[1]
PAGE, TABLE = ROOT / "docs/readers.md", ROOT / "docs/published-configs.csv"
SOURCES = "<!-- sources: written by scripts/readers_page.py -->", "<!-- /sources -->"
Groups = dict[tuple[str, str], list[str]]
PUBLISHED = "<!-- published: written by scripts/readers_page.py -->", "<!-- /published -->"
WITHOUT_ROPE = ("nemotron-3-nano-30b-a3b",)
CELLS = {"same": "same", "with an option": "with an option", "long inputs only": "long only",
    "differs": "differs", "refuses": "refuses", "not known": "not known"}  # fmt: skip
WHY: Mapping[tuple[str, str], str] = {
    (
        "gpt_oss",
        "mlx-lm",
    ): "mlx-lm rounds the ends of yarn's ramp to whole pairs, although this config has truncate: false",
    (
        "internlm2",
        "sglang",
    ): "dynamic NTK chooses the base by the length of each input, but for every input, even one within the trained "
    "length, SGLang uses the base of the longest input that it serves",
    ("gemma4_text", "transformers-4"): "the model and its rope type came with transformers 5",
}
"""Why a program differs from transformers 5 or refuses, by type of model and key of the program."""
WHY_TWO_LISTS = {
    "input": "",
    "never": "the program uses the long factors for inputs of every length",
    "start": "the program chooses a list of factors once, when it starts, so a server for long inputs uses the long "
    "factors for short inputs too",
    "pass": "each forward pass has one list of factors, so a short input gets the long factors in a batch with a long "
    "input",
}
"""Why a program that reads longrope right is wrong for short inputs, by when it chooses between its two lists."""
WHY_LENGTH = {
    "linear": "max_position_embeddings already includes the factor, and the program multiplies it by the factor again",
    "dynamic": "the program multiplies max_position_embeddings by the factor",
    "yarn": "the program serves the original length × factor, but max_position_embeddings in this config is the "
    "original length",
    "longrope": "without an option, the program serves only inputs of up to the original length, for which the short "
    "factors are right",
}
"""Why a program serves another length than the config states, by method."""


def configs() -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Published configs with RoPE by name, as the tests have them."""
    for path in sorted((ROOT / "tests/configs").glob("*.json")):
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))
    more = json.loads((ROOT / "tests/planning/published.json").read_text(encoding="utf-8"))
    for name, entry in more.items():
        if name not in WITHOUT_ROPE:
            yield name, entry["config"]


def cell(reading: Reading, length: int) -> str:
    """The verdict, and the length that the program serves by itself where it is not the config's."""
    served = "" if reading.served in (None, length) else f", serves {reading.served:,}"
    return CELLS[reading.verdict] + served


def sources() -> str:
    """The table of programs with the files that were read."""
    rows = [f"| {each.program} | `{each.key}` | {each.source} |" for each in READERS]
    return "\n".join(
        ["| program | value of `--for` | files that the rules come from |", "| --- | --- | --- |", *rows]
    )


def published() -> tuple[str, str]:
    """Every difference, other length and gap of a published config with its reason, and the table of all configs.

    Raises:
        KeyError: if a difference or a length has no reason, so that none can be published.
    """
    # transformers 5 defines what a config means.
    others = [each for each in READERS if each.key != "transformers"]
    rows: list[list[str]] = []
    differences = []
    two_lists: Groups = defaultdict(list)
    lengths: Groups = defaultdict(list)
    unread: Groups = defaultdict(list)
    for name, raw in configs():
        checkpoint = checkpoint_of(raw, name)
        found = {each.key: each for each in readings_of(checkpoint, name)}
        cells = [cell(found[each.key], checkpoint.length) for each in others]
        rows.append([name, str(checkpoint.length), *cells])
        for each in others:
            reading = found[each.key]
            if reading.verdict == "not known":
                kind = checkpoint.model_type
                reason = reading.detail.replace(f" for {kind}", "").replace(f" of {kind}", "")
                unread[each.program, reason].append(name)
            elif reading.verdict == "long inputs only":
                # No command of mlx-lm makes it choose the short factors.
                chooses = "never" if reading.launch_short is None else each.chooses
                two_lists[name, WHY_TWO_LISTS[chooses]].append(each.program)
            elif reading.verdict != "same":
                why = WHY[checkpoint.model_type, each.key]
                differences.append(f"- {name} in {each.program}: {why} ({reading.detail})")
            if reading.served not in (None, checkpoint.length):
                (method,) = checkpoint.methods().values()
                lengths[f"{name} ({reading.served:,} tokens)", WHY_LENGTH[method.name]].append(each.program)
    differences += reasons(two_lists)
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(
        [["model", "tokens", *(each.program for each in others)], *rows]
    )
    parts = {
        "Programs that differ or refuse, and why:": differences,
        "Programs that serve another length than the config states (if no option sets the length), and why:": reasons(
            lengths
        ),
        "Not known, and why:": [
            f"- {len(names)} of the {len(rows)} configs in {program}: {why}"
            for (program, why), names in unread.items()
        ],
    }
    text = "\n".join(line for title, lines in parts.items() for line in ("", title, "", *lines))
    return text.strip(), table.getvalue()


def reasons(programs: Groups) -> list[str]:
    """One line for each reason and the programs that it holds for, with the models.

    Args:
        programs: names of programs by model and reason.
    """
    models: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (model, why), names in programs.items():
        models[", ".join(names), why].append(model)
    return [f"- {', '.join(found)} in {names}: {why}" for (names, why), found in models.items()]


def replaced(text: str, marks: tuple[str, str], content: str) -> str:
    """The text with other content between two marks."""
    before, rest = text.split(marks[0])
    return f"{before}{marks[0]}\n\n{content}\n\n{marks[1]}{rest.split(marks[1])[1]}"


def main() -> int:
    """Write the page and the table, or compare them."""
    text = PAGE.read_text(encoding="utf-8")
    reasons_why, table = published()
    wanted = {PAGE: replaced(replaced(text, SOURCES, sources()), PUBLISHED, reasons_why), TABLE: table}
    if "--check" in sys.argv[1:]:
        return 0 if all(path.read_text(encoding="utf-8") == each for path, each in wanted.items()) else 1
    for path, each in wanted.items():
        path.write_text(each, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
