"""LongProc: answers of up to 8,000 tokens, each of which follows a procedure step by step.

The prompts are made from the user's copy of the benchmark's ``data`` folder, and its ``prompts.yaml``. Two of the six
data sets are not here: ``pseudo_to_code``, because its score compiles and runs what the model wrote, which ropewalk
never does; and ``travel_planning``, because its prompts and scores need search logs that only a program of the authors
writes.

Source: Ye et al., arXiv:2501.05414; princeton-pli/LongProc at 78e873a, ``longproc`` and ``example_usage.py``
(Apache-2.0).
"""

from __future__ import annotations

import csv
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import yaml

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.samples import NO_DETAILS
from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.published.longproc_countdown import (
    EXAMPLES,
    search,
    search_log,
    solved,
    tagged,
)
from ropewalk.evaluation.tasks.published.rows import PublishedSettings, PublishedTask, Question
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, GeneratedSuite

NAME = "longproc"
ORIGIN = "the folder data of https://github.com/princeton-pli/LongProc"
ROOM = {"0.5k": 1024, "2k": 3072, "8k": 9216}
"""Tokens of an answer, by the size in the names of files."""


def _countdown(row: Row, folder: Path) -> tuple[dict[str, Any], str]:
    shown = (
        f"# Example\nNumbers: {[*nums]}\nTarget: {goal}\n\n{search_log(nums, goal)}"
        for nums, goal in EXAMPLES
    )
    fields = {"nums": row["nums"], "target": row["target"], "demonstration": "\n\n".join(shown)}
    return fields, search_log(row["nums"], row["target"])


def _html_to_tsv(row: Row, folder: Path) -> tuple[dict[str, Any], str]:
    # By its name alone: a row must not lead out of the folder.
    page = folder / "webpage" / Path(row["html_path"]).name
    if not page.is_file():
        raise ValueError(f"there is no page {page}")
    return {**row, "html_str": page.read_text("utf-8")}, row["gt"]


def _path_traversal(row: Row, folder: Path) -> tuple[dict[str, Any], str]:
    start, end = row["question_repr"]
    return {"city_context": row["context_nl"], "src_city": start, "dst_city": end}, row["answer_nl"]


def _tom_tracking(row: Row, folder: Path) -> tuple[dict[str, Any], str]:
    return {"story": row["story"], "question": row["question"]}, row["solution"]


READ: Mapping[str, Callable[[Row, Path], tuple[dict[str, Any], str]]] = {
    "countdown": _countdown,
    "path_traversal": _path_traversal,
    "tom_tracking": _tom_tracking,
    "html_to_tsv": _html_to_tsv,
}
"""The fields of the prompt and the right answer, by data set."""


def question(row: Row, file: str, dataset: str, folder: Path | None) -> Question:
    """The question of a row."""
    assert folder is not None
    path = folder / "prompts.yaml"
    if not path.is_file():
        raise RopewalkError(f"{folder} has no prompts.yaml; give {ORIGIN}")
    fields, answer = READ[dataset](row, folder)
    details = {name: row[name] for name in ("nums", "target")} if dataset == "countdown" else {}
    return Question(_template(path, path.stat().st_mtime_ns).format(**fields), (answer,), details=details)


@lru_cache
def _template(path: Path, modified: int) -> str:
    return str(yaml.safe_load(path.read_text("utf-8"))["USER_PROMPT"])


def route(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the route is the right one, else 0 (path_traversal)."""
    return float(tagged(answer, "Route") == references[0].strip())


def route_part(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """Share of the route up to its first wrong line, which counts as right, as published (path_traversal)."""
    if (said := tagged(answer, "Route")) is None:
        return 0.0
    right = references[0].strip().split("\n")
    lines = list(zip(said.split("\n"), right, strict=False))
    wrong = next((place for place, (one, other) in enumerate(lines) if one != other), len(lines) - 1)
    return (wrong + 1) / len(right)


_NOT_SAID = re.compile(r"\b(a|an|the|on|in|at|step|thinks?|believes?|is|are|of|location|knows?|belief)\b")


def _beliefs(text: str) -> list[str]:
    lines = "\n".join(each for each in text.splitlines() if each.strip().startswith("-")).strip().split("\n")
    plain = (line.lower().translate(_NO_PUNCTUATION) for line in lines if line.startswith("-"))
    return [said for line in plain if (said := " ".join(_NOT_SAID.sub(" ", line).split()))]


_NO_PUNCTUATION = dict.fromkeys(map(ord, string.punctuation + "’"))


def beliefs(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the lines with a hyphen say the same as the right ones, else 0 (tom_tracking)."""
    return float(_beliefs(answer) == _beliefs(references[0]))


def beliefs_part(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """Share of the lines with a hyphen before the first wrong one (tom_tracking)."""
    said, right = _beliefs(answer), _beliefs(references[0])
    same = [one == other for one, other in zip(said, right, strict=False)]
    return 1.0 if said == right else [*same, False].index(False) / len(right)


def table(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """F1 of the rows of a table, in any order, without case, punctuation, articles and blanks (html_to_tsv)."""
    fenced = re.search(r"```tsv([\s\S]*)```", answer)
    said = fenced[1] if fenced else answer.split("```tsv")[1] if "```tsv" in answer else answer
    try:
        rows, right = _table(said), _table(references[0])
    except (csv.Error, IndexError):
        return 0.0
    if not rows or len(rows[0]) != len(right[0]):
        return 0.0
    precision, recall = (
        sum(row in other for row in one) / len(one) for one, other in ((rows, right), (right, rows))
    )
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _table(text: str) -> list[tuple[str, ...]]:
    header, *rows = csv.reader(text.strip().split("\n"), delimiter="\t")
    if len(set(header)) < len(header):
        raise IndexError("columns of the same name")
    # The last line may be an incomplete row, or what follows the table.
    if len(rows[-1]) != len(header):
        rows.pop()
    return [tuple(map(_plain, row if len(row) == len(header) else ["N/A"] * len(header))) for row in rows]


def _plain(cell: str) -> str:
    without = cell.lower().translate(dict.fromkeys(map(ord, string.punctuation)))
    return "".join(re.sub(r"\b(a|an|the)\b", " ", without).split())


SCORED = {"countdown": solved, "path_traversal": route, "tom_tracking": beliefs, "html_to_tsv": table}
PARTS = {"countdown": search, "path_traversal": route_part, "tom_tracking": beliefs_part}


def _tasks(settings: BenchmarkSettings) -> Mapping[str, PublishedTask]:
    path = settings.of(PublishedSettings).benchmark_data.get(NAME)
    return dict(_each(path))


def _each(path: Path | None) -> Iterator[tuple[str, PublishedTask]]:
    for dataset, metric in SCORED.items():
        # Either the folder of all data sets, or that of this one.
        folder = None if path is None else path / dataset if (path / dataset).is_dir() else path
        for size, room in ROOM.items():
            name = f"{dataset}_{size}"
            asks = partial(question, dataset=dataset, folder=folder)
            yield (
                name,
                PublishedTask(
                    *(NAME, name, f"{NAME}_{metric.__name__}", room, ORIGIN, asks, folder),
                    documents="**/*ml",
                    files=(name,),
                ),
            )


SUITE = GeneratedSuite(
    name=NAME,
    title="LongProc",
    figure="tasks",
    settings={"published": PublishedSettings},
    tasks=_tasks,
    metrics={f"{NAME}_{each.__name__}": each for each in (*SCORED.values(), *PARTS.values())},
    further={f"{NAME}_{SCORED[name].__name__}": (f"{NAME}_{each.__name__}",) for name, each in PARTS.items()},
    from_file=True,
)
