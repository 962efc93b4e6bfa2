"""Two parts of HELMET that need no judge: RAG and re-ranking. A part is not HELMET's score.

The texts of the prompts, the numbers of passages by length, and the scores are the published ones. The questions and
the examples before them are drawn by our seed. Only the first line of an answer counts, because
HELMET ends it there. A context that is too long loses its end.

Source: Yen et al., arXiv:2410.02694; princeton-nlp/HELMET at 4526dfb, ``data.py``, ``utils.py`` and ``configs`` (MIT).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Form, LengthTooShort, Sample
from ropewalk.evaluation.tasks.benchmark_files import Row
from ropewalk.evaluation.tasks.published.helmet_files import (
    ORIGIN,
    SHOTS,
    digest_of,
    examples_of,
    key_of,
    keys_of,
    rows_of,
    stamp,
)
from ropewalk.evaluation.tasks.published.helmet_scores import ndcg_at_10, substring_match
from ropewalk.evaluation.tasks.published.rows import PublishedSettings, Question, cut_to
from ropewalk.evaluation.tasks.ruler.tasks import mean_of_all
from ropewalk.evaluation.tasks.suite import EVERY_ROW, BenchmarkSettings, GeneratedSuite

RAG, RERANK = "helmet_rag", "helmet_rerank"
LENGTHS = (8192, 16384, 32768, 65536, 131072)
QUESTIONS = 100
"""Questions that are asked if no number of samples is given, each with the right passage at several depths."""
BETWEEN = "\n\n"


@dataclass(frozen=True)
class Part:
    """What distinguishes the two parts with passages.

    Attributes:
        folder: where its files are.
        metric, room: name of the metric, and maximum number of tokens of an answer.
        passages: number of passages by length.
        introduction: beginning of the prompt.
        question, answer: what stands before the question, and before its answer.
    """

    folder: str
    metric: str
    room: int
    passages: tuple[int, ...]
    introduction: str
    question: str
    answer: str


PARTS: Mapping[str, Part] = {
    RAG: Part(
        "kilt",
        "helmet_substring",
        20,
        (50, 105, 220, 440, 1000),
        "Use the given documents to write a concise and short answer to the question. Write your answer in the "
        "following format:\nAnswer: [answer]\n\n",
        "Question: ",
        "Answer:",
    ),
    RERANK: Part(
        "msmarco",
        "helmet_ndcg",
        200,
        (50, 130, 285, 600, 1000),
        "You are provided with a list of documents, each indicated by their ID. Rank each document based on their "
        "relevance to the question in descending order from most relelvant to least relevant texts. Include all "
        "documents in the rankings. Write your answer using the unique IDs, with the following format:\nRanking: ID3 > "
        "ID1 > ID2\n\n",
        "Query: ",
        "Ranking:",
    ),
}
FILES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    RAG: {
        **{
            name: (
                f"{name}-dev-multikilt_1000_k{{}}_dep{depths}.jsonl",
                f"{name}-train-multikilt_1000_k3_dep{depths}.jsonl",
            )
            for name, depths in (("nq", 6), ("triviaqa", 6), ("hotpotqa", 3))
        },
        "popqa": ("popqa_test_1000_k{}_dep6.jsonl", "popqa_test_1000_k3_dep6.jsonl"),
    },
    RERANK: {"msmarco": ("test_reranking_data_k{}_dep3.jsonl", "test_reranking_data_k10_dep3.jsonl")},
}
"""By part and task: the file of a number of passages, and that of the examples."""


def rag_example(row: Row) -> tuple[str, str, str]:
    """The passages, the question and the answer of a row."""
    passages = [f"Document (Title: {each['title']}): {each['text']}" for each in row["ctxs"]]
    return BETWEEN.join(passages), row["question"], row["answers"][0]


def ranking_example(row: Row) -> tuple[str, str, str]:
    """The passages, the query and the right order of a row."""
    head = "[ID: {id}] Document (Title: {title}): " if "title" in row["ctxs"][0] else "[ID: {id}] Document: "
    passages = [head.format_map(each) + each["text"] for each in row["ctxs"]]
    order = sorted(row["ctxs"], key=lambda each: int(each["label"]), reverse=True)
    return BETWEEN.join(passages), row["query"], " > ".join(str(each["id"]) for each in order)


EXAMPLE: Mapping[str, Callable[[Row], tuple[str, str, str]]] = {RAG: rag_example, RERANK: ranking_example}


@dataclass(frozen=True)
class PassageTask:
    """Questions with retrieved passages, of which a file has as many as its length holds.

    Args:
        suite: ``helmet_rag`` or ``helmet_rerank``.
        name: name of the data set.
        path: folder of the files; None if the user has given none.
    """

    suite: str
    name: str
    path: Path | None

    @property
    def part(self) -> Part:
        """What distinguishes the part."""
        return PARTS[self.suite]

    @property
    def max_new_tokens(self) -> int:
        return self.part.room

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        files = [file for file in (self._file(k) for k in (*self.part.passages, None)) if file.is_file()]
        return {"files": {file.name: digest_of(file, *stamp(file)) for file in files}}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no files), or None."""
        if self.path is None:
            return (
                f"it needs --benchmark-data {self.suite}=PATH, the folder data/{self.part.folder} of {ORIGIN}"
            )
        if not self._file(None).is_file():
            return f"{self.path} has no {self._file(None).name}, the examples of {self.name}, of {ORIGIN}"
        return None

    def _file(self, passages: int | None) -> Path:
        assert self.path is not None
        test, examples = FILES[self.suite][self.name]
        return self.path / (examples if passages is None else test.format(passages))

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        """See :class:`~ropewalk.evaluation.samples.Task`; all depths of a question follow each other when drawn."""
        if length < LENGTHS[0]:
            raise LengthTooShort(self.name, length, LENGTHS[0])
        passages = self.part.passages[sum(each <= length for each in LENGTHS) - 1]
        file = self._file(passages)
        if not file.is_file():
            raise RopewalkError(
                f"{self.name} at {length} tokens needs {file}, which does not exist; unpack it from {ORIGIN}, or give "
                "other lengths"
            )
        return self._asked(file, encoder, length, count, seed)

    def _asked(
        self, file: Path, encoder: PromptEncoder, length: int, count: int, seed: int
    ) -> Iterator[Sample]:
        keys = keys_of(file, *stamp(file))
        drawn = sorted({key for key in keys if key is not None})
        random.Random(f"{seed}/{self.name}").shuffle(drawn)
        place = {key: number for number, key in enumerate(drawn)}
        lines = sorted((place[key], line) for line, key in enumerate(keys) if key is not None)
        if count < EVERY_ROW:
            lines = lines[:count]
        chosen = {line: number for number, line in lines if count < EVERY_ROW or number < QUESTIONS}
        form = Form(self.suite, self.name, self.part.metric, self.part.room)
        examples = examples_of(self._file(None), *stamp(self._file(None)))
        for line, row in rows_of(file, chosen):
            draw = random.Random(f"{seed}/{self.name}/{key_of(row)}")
            try:
                asked = self.question(row, examples, draw)
            except (KeyError, TypeError, ValueError) as error:
                raise RopewalkError(
                    f"row {line + 1} of {file}, or an example, is not one of HELMET ({error}); give {ORIGIN}"
                ) from error
            details = {**asked.details, "context": chosen[line]}
            kept, tokens, whole = cut_to(asked, encoder, length - self.part.room)
            if tokens + self.part.room > length:
                # Without any passage: the examples are long, counted with this tokenizer.
                raise LengthTooShort(self.name, length, tokens + self.part.room)
            if kept < len(asked.text):
                details["tokens_cut"] = whole - tokens
            yield form.sample(encoder, length, line, replace(asked.draft(kept), details=details), tokens)

    def question(self, row: Row, examples: Mapping[str, Row], draw: random.Random) -> Question:
        """The prompt of a row, with examples about other questions."""
        part, example = self.part, EXAMPLE[self.suite]
        passages, question, _ = example(row)
        others = draw.sample(sorted(examples.keys() - {key_of(row)}), SHOTS)
        shots = [
            f"{texts}{BETWEEN}{part.question}{asked}\n{part.answer} {answer}{BETWEEN}"
            for texts, asked, answer in (example(examples[key]) for key in others)
        ]
        details = {"groups": {"depth": row["depth"]}} if "depth" in row else {}
        if self.suite == RERANK:
            relevance = {
                str(each["id"]): int(each["label"]) for each in row["ctxs"] if int(each["label"]) > 0
            }
            references, details = tuple(relevance), {**details, "relevance": relevance}
        else:
            references = tuple(row["answers"])
        return Question(
            passages + BETWEEN,
            references,
            part.introduction + "".join(shots),
            f"{part.question}{question}\n",
            details,
            ending=BETWEEN,
            answer_prefix=part.answer,
        )


def _suite(name: str, title: str, titles: Mapping[str, str]) -> GeneratedSuite:
    def tasks(settings: BenchmarkSettings) -> Mapping[str, PassageTask]:
        path = settings.of(PublishedSettings).benchmark_data.get(name)
        return {task: PassageTask(name, task, path) for task in FILES[name]}

    return GeneratedSuite(
        name=name,
        title=f"{title} (a part of HELMET)",
        titles=titles,
        figure="by length",
        settings={"published": PublishedSettings},
        tasks=tasks,
        metrics={"helmet_substring": substring_match} if name == RAG else {"helmet_ndcg": ndcg_at_10},
        mean=(lambda results, selected: mean_of_all(results, len(FILES[RAG]))) if name == RAG else None,
        from_file=True,
    )


RAG_SUITE = _suite(RAG, "HELMET RAG", {})
RERANK_SUITE = _suite(RERANK, "HELMET re-ranking", {"msmarco": "HELMET re-ranking (a part of HELMET)"})
