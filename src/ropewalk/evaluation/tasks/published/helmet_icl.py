"""HELMET's in-context learning, on the user's copies of the five data sets: label a text by many labelled ones.

Prompt, balanced shots, permuted labels and score are HELMET's. Which texts are shots is drawn by our own seed, and
there are as many as fill the length; HELMET fixes their numbers by length.

Source: Yen et al., arXiv:2410.02694; princeton-nlp/HELMET at 4526dfb, ``data.py`` (MIT).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Draft, Drafts, Form, Sample, fitted_samples, sample_random
from ropewalk.evaluation.tasks.icl import PREFIX, label
from ropewalk.evaluation.tasks.published.rows import PublishedSettings, file_rows, files_digest
from ropewalk.evaluation.tasks.ruler.tasks import mean_of_all
from ropewalk.evaluation.tasks.suite import BenchmarkSettings, GeneratedSuite

NAME = "helmet_icl"
ORIGIN = (
    "a folder with folders trec (CogComp/trec), banking77 (PolyAI/banking77), clinc_oos (its part plus) and "
    "nlu_evaluation_data (xingkunliuxtracta/nlu_evaluation_data) of the Hub's files"
)
TRAIN = "train"
HELD_OUT = 10
"""One in so many rows is a question, in a data set without questions of its own; as in HELMET."""
INTRODUCTION = (
    'Use the provided mapping from the text to label to assign a label to the text. Only output "label: {label}" and '
    "nothing else. \n\n"
)


@dataclass(frozen=True)
class Source:
    """Where the texts of a task are.

    Attributes:
        folder: folder of the data set in that of the user.
        field: field of a row with its label, a number from 0.
        split: what the names of the files with questions begin with; empty if they are held out from the others.
    """

    folder: str
    field: str
    split: str


TASKS: Mapping[str, Source] = {
    "trec_coarse": Source("trec", "coarse_label", "test"),
    "trec_fine": Source("trec", "fine_label", "test"),
    "banking77": Source("banking77", "label", "test"),
    "clinic150": Source("clinc_oos", "intent", "validation"),
    "nlu": Source("nlu_evaluation_data", "label", ""),
}

Labelled = tuple[str, int]


@dataclass(frozen=True)
class Texts:
    """Labelled texts of a task: the shots by label, the questions, and the number of labels."""

    shots: Sequence[Sequence[Labelled]]
    questions: Sequence[Labelled]
    labels: int


@lru_cache(maxsize=len(TASKS))
def _read(folder: Path, source: Source, sha256: str) -> Texts:
    found: dict[str, list[Labelled]] = {TRAIN: [], source.split: []}
    for number, (file, row) in enumerate(file_rows(folder), start=1):
        for split, own in found.items():
            if split and file.startswith(split):
                text, of = row.get("text"), row.get(source.field)
                if not isinstance(text, str) or not isinstance(of, int) or of < 0:
                    raise RopewalkError(
                        f"row {number} of {folder} has no text with a number as {source.field}; give {ORIGIN}"
                    )
                own.append((text, of))
    shots, questions = found[TRAIN], found[source.split]
    if not source.split:
        chosen = {*random.Random("held out").sample(range(len(shots)), len(shots) // HELD_OUT)}
        questions = [each for at, each in enumerate(shots) if at in chosen]
        shots = [each for at, each in enumerate(shots) if at not in chosen]
    by_label: dict[int, list[Labelled]] = {}
    for each in shots:
        by_label.setdefault(each[1], []).append(each)
    # A text whose label no shot has could not be answered.
    questions = [each for each in questions if each[1] in by_label]
    if not questions:
        raise RopewalkError(
            f"{folder} has no texts with labels in files {TRAIN} and {source.split}; give {ORIGIN}"
        )
    return Texts([by_label[each] for each in sorted(by_label)], questions, 1 + max(by_label))


@dataclass(frozen=True)
class HelmetIcl:
    """Label a text by labelled ones; a unit is a shot.

    Args:
        name: one of ``TASKS``.
        path: the user's folder; None if there is none.
    """

    name: str
    path: Path | None

    suite = NAME
    max_new_tokens = 20

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"files_sha256": files_digest(self._folder), "labels": self._texts().labels}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no files), or None."""
        if self.path is None:
            return f"it needs --benchmark-data {NAME}=PATH, {ORIGIN}"
        return None if self._folder.is_dir() else f"{self.path} has no folder {TASKS[self.name].folder}"

    @property
    def _folder(self) -> Path:
        assert self.path is not None
        return self.path / TASKS[self.name].folder

    def _texts(self) -> Texts:
        return _read(self._folder, TASKS[self.name], files_digest(self._folder))

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`; there are fewer samples if there are fewer texts."""
        form = Form(self.suite, self.name, "label", self.max_new_tokens, least_fill=0.99)
        texts = self._texts()
        # As balanced as the shots: each round has a text of each label.
        asked = list(islice(rounds(_by_label(texts.questions), sample_random(seed, self.name, 0, 0)), count))

        def drafts_at(length: int) -> Drafts:
            def draft(index: int, units: int) -> Draft:
                draw = sample_random(seed, self.name, length, index)
                numbers = draw.sample(range(texts.labels), texts.labels)
                shots = islice(rounds(texts.shots, draw, endless=True), units)
                text, of = asked[index]
                context = "\n\n".join(f"{each}\n{PREFIX} {numbers[number]}" for each, number in shots)
                details = {"shots": units, "chance": 100 / texts.labels}
                return Draft(f"{INTRODUCTION}{context}\n\n{text}\n", PREFIX, (str(numbers[of]),), details)

            return draft

        return fitted_samples(form, encoder, length, len(asked), drafts_at, len(texts.shots))


def _by_label(texts: Sequence[Labelled]) -> Sequence[Sequence[Labelled]]:
    found: dict[int, list[Labelled]] = {}
    for each in texts:
        found.setdefault(each[1], []).append(each)
    return list(found.values())


def rounds(
    by_label: Sequence[Sequence[Labelled]], draw: random.Random, endless: bool = False
) -> Iterator[Labelled]:
    """Texts in rounds of one of each label, in random order; no text again before all of its label were there.

    Args:
        by_label: texts of each label.
        draw: random numbers.
        endless: begin again with the texts of a label when all were there; otherwise the label is left out.
    """
    left = [draw.sample(each, len(each)) for each in by_label]
    while any(left) or endless:
        order = draw.sample(range(len(left)), len(left))
        for at in order:
            if not left[at] and endless:
                left[at] = draw.sample(by_label[at], len(by_label[at]))
            if left[at]:
                yield left[at].pop()


def _tasks(settings: BenchmarkSettings) -> Mapping[str, HelmetIcl]:
    path = settings.of(PublishedSettings).benchmark_data.get(NAME)
    return {name: HelmetIcl(name, path) for name in TASKS}


SUITE = GeneratedSuite(
    name=NAME,
    title="HELMET ICL (a part of HELMET)",
    figure="by length",
    settings={"published": PublishedSettings},
    tasks=_tasks,
    metrics={"label": label},
    mean=lambda results, selected: mean_of_all(results, len(TASKS)),
    sharing=lambda settings: len(TASKS),
)
