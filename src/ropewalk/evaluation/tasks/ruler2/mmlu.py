"""RULERv2's tasks with MMLU: copy, find or solve one of many numbered questions, from the user's copy of MMLU.

In the tasks of several values, the number that is asked for always has four texts; upstream's sometimes has fewer.

Source: NVIDIA-NeMo/Skills, ``dataset/ruler2/prepare_mmlu.py`` (Apache-2.0).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.samples import Draft, sample_random
from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.published.rows import file_rows, files_digest
from ropewalk.evaluation.tasks.ruler.qa import others_in_order
from ropewalk.evaluation.tasks.ruler2.numbered import BETWEEN, NUMBERS, Kind, NumberedTask

ORIGIN = "the folder all of https://huggingface.co/datasets/cais/mmlu"
UNAVAILABLE = f"it needs --benchmark-data ruler2=PATH, {ORIGIN}"
LETTERS = "ABCD"
TEST, TRAINING = "test", "auxiliary_train"
"""What the names of the files begin with."""

EXAMPLES = (
    "Here are some examples to help you understand the task:\n\n{}\n\n"
    "Here is the actual task you need to solve:\n\n"
)
SHOTS = 5
COPY = "Please copy the {order}Question {number} from the context"
CHOICES = "with an answer from A, B, C, D."
ORDINALS = ("1st", "2nd", "3rd", "4th")


@dataclass(frozen=True)
class MmluKind(Kind):
    """What distinguishes a task; its request has the fields ``number`` and ``order``.

    Attributes:
        values: texts of each number.
        shots: examples before the request.
        shot: an example after its request, with the fields ``number``, ``text`` and ``letter``.
        all_texts: whether all texts of the number are asked for.
    """

    values: int = 1
    shots: int = 0
    shot: str = ""
    all_texts: bool = False


ONE_COPY = "Below are some questions. I will ask you to copy one of them. Please copy and paste the question you find."
SOLVE = (
    "Below are some questions. I will ask you to solve one of them. Please solve the question you find and make sure "
    r"to put the answer (and only answer) inside \boxed\{\}."
)
KINDS: Mapping[str, MmluKind] = {
    "mk_niah_easy": MmluKind("ruler2", ONE_COPY, f"{COPY}."),
    "mk_niah_medium": MmluKind(
        "ruler2_letter",
        SOLVE,
        f"{COPY} and then solve it {CHOICES}",
        shots=SHOTS,
        shot="\nQuestion {number}: {text}\nSolution: \\boxed{{{letter}}}",
    ),
    "mk_niah_hard": MmluKind(
        "ruler2_letter",
        SOLVE,
        f"Please solve the Question {{number}} from the context {CHOICES}",
        shots=SHOTS,
        shot="\nSolution: \\boxed{{{letter}}}",
    ),
    "mv_niah_easy": MmluKind(
        "ruler2",
        "Below are some questions. I will ask you to copy some of them. Please copy and paste the questions you find.",
        "Please find and copy all the Question {number} from the context.",
        values=4,
        all_texts=True,
    ),
    "mv_niah_medium": MmluKind(
        "ruler2_last_paragraph",
        ONE_COPY,
        "Please first copy all the Question {number} from the context and then copy the {order}Question {number} at "
        "the end.",
        values=4,
        all_texts=True,
    ),
    "mv_niah_hard": MmluKind("ruler2", ONE_COPY, f"{COPY}.", values=4),
}


@dataclass(frozen=True)
class Item:
    """A question with its choices in one line, and the letter of the right one."""

    text: str
    letter: str


@dataclass(frozen=True)
class Mmlu:
    """The questions that are asked, those around them, and the digest of their files."""

    test: Sequence[Item]
    training: Sequence[Item]
    sha256: str


def read_mmlu(path: Path) -> Mmlu:
    """Read MMLU's test set and its auxiliary training set, once.

    Raises:
        RopewalkError: if a file of either is missing, or a row is not one of MMLU.
    """
    return _read(path, files_digest(path))


@lru_cache(maxsize=1)
def _read(path: Path, sha256: str) -> Mmlu:
    found: dict[str, list[Item]] = {TEST: [], TRAINING: []}
    for number, (name, row) in enumerate(file_rows(path), start=1):
        for part in found:
            if name.startswith(part):
                found[part].append(_item(row, f"row {number} of {path}"))
    for part, items in found.items():
        if not items:
            raise RopewalkError(f"{path} has no file whose name begins with {part}; give {ORIGIN}")
    return Mmlu(found[TEST], found[TRAINING], sha256)


def _item(row: Row, where: str) -> Item:
    question, choices, answer = row.get("question"), row.get("choices"), row.get("answer")
    if not (
        isinstance(question, str)
        and isinstance(choices, list)
        and len(choices) == len(LETTERS)
        and isinstance(answer, int)
        and 0 <= answer < len(LETTERS)
    ):
        raise RopewalkError(
            f"{where} is not one of MMLU: it needs a question, four choices and an answer from 0 to 3; give {ORIGIN}"
        )
    listed = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
    # Also the line ends, as upstream.
    return Item(re.sub(r"\s+", " ", "\n".join([question, *listed])), LETTERS[answer])


@dataclass(frozen=True)
class MmluTask(NumberedTask):
    """Copy or solve a question of MMLU's test set among those of its training set."""

    source: Path | None

    @property
    def kind(self) -> MmluKind:
        return KINDS[self.name]

    @property
    def fewest(self) -> int:
        """The other texts of the number, or the examples."""
        return max(self.kind.values - 1, self.kind.shots)

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        return {"mmlu_sha256": self._mmlu().sha256}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no files), or None.

        Raises:
            RopewalkError: if the files are not MMLU.
        """
        if self.source is None:
            return UNAVAILABLE
        self._mmlu()
        return None

    def questions(self) -> Sequence[Item]:
        return self._mmlu().test

    def _mmlu(self) -> Mmlu:
        assert self.source is not None
        return read_mmlu(self.source)

    def built(self, asked: int, units: int, key: tuple[int, int]) -> tuple[Draft, str]:
        seed, index = key
        data, kind = self._mmlu(), self.kind
        draw = sample_random(seed, f"{self.name}/texts", 0, index)
        others = islice(others_in_order((), (), len(data.training), draw), units)
        items = [data.test[asked], *(data.training[other] for other in others)]
        draw = sample_random(seed, self.name, 0, index)
        numbers = draw.sample(NUMBERS, -(-len(items) // kind.values))
        number_of = [numbers[at // kind.values] for at in range(len(items))]
        shots = [
            kind.request.format(order="", number=number_of[at])
            + kind.shot.format(number=number_of[at], text=items[at].text, letter=items[at].letter)
            for at in range(1, kind.shots + 1)
        ]
        example = EXAMPLES.format(BETWEEN.join(shots)) if shots else ""
        order = draw.sample(range(len(items)), len(items))
        alike = [at for at in order if number_of[at] == numbers[0]]
        nth = f"{ORDINALS[alike.index(0)]} (1 indexed) " if kind.values > 1 else ""
        request = kind.request.format(order=nth, number=numbers[0])
        texts = [f"Question {number_of[at]}: {items[at].text}" for at in order]
        right = [order.index(at) for at in (alike if kind.all_texts else [0])]
        prompt, spans = self.prompt(texts, right, example, request)
        copied = [items[at].text for at in alike]
        if kind.metric == "ruler2_letter":
            references = [items[0].letter]
            said = f"{items[0].text} \\boxed{{{items[0].letter}}}"
        else:
            references = copied if self.name == "mv_niah_easy" else [items[0].text]
            said = BETWEEN.join([*(copied if kind.all_texts else []), items[0].text])
        details = {"question": asked, "texts": len(items), "spans": spans}
        return Draft(prompt, "", tuple(references), details), said
