"""SQuAD v2 and HotpotQA as RULER reads them: questions, what answers them, and documents to answer from.

Neither may be handed on here. A user names a file of their own, or ``hub`` to have it loaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ropewalk.data.read.files import read_text, split_suffix
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.benchmark_files import read_rows
from ropewalk.io.digests import digest
from ropewalk.io.files import parse_json

HUB = "hub"
"""In place of a path: the data set of the Hugging Face hub."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        query: what is asked.
        answers: what all annotators answered, at least one.
        gold: indices of the documents that the question comes with; one of them or several hold the answer.
        more: indices of other documents of the same article, which are the nearest to be taken for it.
    """

    query: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    more: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """All answerable questions of a data set, in its order.

    Attributes:
        documents: distinct, in alphabetical order.
        questions: at least one.
        sha256: of both.
    """

    documents: tuple[str, ...]
    questions: tuple[Question, ...]
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        asked = [[each.query, each.answers, each.gold, each.more] for each in self.questions]
        object.__setattr__(self, "sha256", digest([self.documents, asked]))


def read_squad(path: str) -> QuestionSet:
    """The answerable questions of SQuAD v2's dev set; each paragraph is a document. Read once a path.

    Args:
        path: of ``dev-v2.0.json``, of the hub's Parquet file or rows of its fields, or ``hub``.

    Raises:
        RopewalkError: if the file is not there or is no such data set; the message says what is wrong where.
    """
    return _read(_squad, path)


def read_hotpotqa(path: str) -> QuestionSet:
    """The questions of HotpotQA's dev set with distractors; each paragraph is a document, its title above it.

    Args:
        path: of ``hotpot_dev_distractor_v1.json``, of the hub's Parquet file or rows of its fields, or ``hub``.

    Raises:
        RopewalkError: if the file is not there or is no such data set; the message says what is wrong where.
    """
    return _read(_hotpotqa, path)


def _read(reader: Callable[[str], QuestionSet], path: str) -> QuestionSet:
    if path == HUB:
        return reader(path)
    file = Path(path).expanduser()
    if not file.is_file():
        raise RopewalkError(f"there is no file {path!r} with questions; name one, or {HUB}")
    return reader(str(file))


@dataclass(frozen=True)
class _Asked:
    """A question of SQuAD before documents have numbers; without answers it cannot be answered."""

    article: int
    document: str
    query: str
    answers: tuple[str, ...]


@lru_cache(maxsize=2)
def _squad(path: str) -> QuestionSet:
    value = _rows(path, "rajpurkar/squad_v2", None)
    articles, asked = _squad_file(value, path) if isinstance(value, dict) else _squad_rows(value, path)
    index = _indices(document for article in articles for document in article)
    numbered = [[index[document] for document in article] for article in articles]
    questions = []
    for each in asked:
        gold = index[each.document]
        more = tuple(number for number in numbered[each.article] if number != gold)
        questions.append(Question(each.query, each.answers, (gold,), more))
    return _question_set(path, index, questions)


def _squad_file(value: Any, path: str) -> tuple[list[list[str]], list[_Asked]]:
    """Each article's documents, and the answerable questions, of SQuAD's own file."""
    articles: list[list[str]] = []
    found = []
    for number, article in enumerate(_get(value, "data", list, path)):
        where = f"{path}: data[{number}]"
        articles.append([])
        for at, paragraph in enumerate(_get(article, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{at}]"
            document = _get(paragraph, "context", str, place)
            articles[-1].append(document)
            for nth, asked in enumerate(_get(paragraph, "qas", list, place)):
                here = f"{place}.qas[{nth}]"
                if not _get(asked, "is_impossible", bool, here):
                    answers = _get(asked, "answers", list, here)
                    texts = tuple(_get(each, "text", str, f"{here}.answers") for each in answers)
                    found.append(_Asked(number, document, _get(asked, "question", str, here), texts))
    return articles, found


def _squad_rows(rows: Sequence[Any], path: str) -> tuple[list[list[str]], list[_Asked]]:
    """The same of the hub's rows, one a question."""
    articles: dict[str, dict[str, None]] = {}
    found = []
    for at, row in enumerate(rows):
        where = f"{path}: row {at}"
        document, title = _get(row, "context", str, where), _get(row, "title", str, where)
        articles.setdefault(title, {})[document] = None
        answers = _texts(_get(row, "answers", dict, where), "text", where)
        if answers:
            number = list(articles).index(title)
            found.append(_Asked(number, document, _get(row, "question", str, where), tuple(answers)))
    return [list(documents) for documents in articles.values()], found


@lru_cache(maxsize=2)
def _hotpotqa(path: str) -> QuestionSet:
    value = _rows(path, "hotpotqa/hotpot_qa", "distractor")
    if isinstance(value, dict):
        raise RopewalkError(f"{path} is no HotpotQA: it must be a list of questions, and is one object")
    found: list[tuple[str, str, list[str]]] = []
    for i, row in enumerate(value):
        where = f"{path}: question {i}"
        query, answer = _get(row, "question", str, where), _get(row, "answer", str, where)
        found.append((query, answer, _paragraphs(row, where)))
    index = _indices(document for _, _, documents in found for document in documents)
    return _question_set(
        path,
        index,
        [
            Question(query, (answer,), tuple(index[document] for document in documents))
            for query, answer, documents in found
        ],
    )


def _paragraphs(row: Any, where: str) -> list[str]:
    """A question's paragraphs: ``[title, sentences]`` in the original, two columns on the hub."""
    context = row.get("context") if isinstance(row, dict) else None
    if isinstance(context, dict):
        titles = _texts(context, "title", where)
        bodies = _get(context, "sentences", list, where)
        pairs = list(zip(titles, bodies, strict=False)) if len(titles) == len(bodies) else []
    else:
        pairs = [
            tuple(each) if isinstance(each, list) else each for each in _get(row, "context", list, where)
        ]
    if not pairs:
        raise RopewalkError(f"{where} has no paragraphs in 'context'")
    made = []
    for pair in pairs:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], list)
            and all(isinstance(sentence, str) for sentence in pair[1])
        ):
            raise RopewalkError(f"{where}: a paragraph of 'context' must be a title and a list of sentences")
        made.append(f"{pair[0]}\n{''.join(pair[1])}")
    return made


def _indices(documents: Iterable[str]) -> dict[str, int]:
    return {document: index for index, document in enumerate(sorted(set(documents)))}


def _question_set(path: str, index: Mapping[str, int], questions: Sequence[Question]) -> QuestionSet:
    if not questions:
        raise RopewalkError(f"{path} holds no question that has an answer")
    wordless = next((each.query for each in questions if not each.answers or "" in each.answers), None)
    if wordless is not None:
        raise RopewalkError(f"{path}: the question {wordless!r} has an empty answer, or none")
    return QuestionSet(tuple(index), tuple(questions))


def _rows(path: str, repository: str, config: str | None) -> Any:
    """What a file holds, an object or rows; or the hub's rows."""
    if path == HUB:
        return _hub_rows(repository, config)
    file = Path(path)
    if split_suffix(file)[0] != ".json":
        return read_rows(file)
    try:
        value = parse_json(read_text(file))
    except json.JSONDecodeError as error:
        raise RopewalkError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict | list):
        raise RopewalkError(f"{path} holds no questions: it is neither an object nor a list")
    return value


def _hub_rows(repository: str, config: str | None) -> list[Any]:
    import datasets
    import pyarrow

    from ropewalk.data.read.hub import hub_reachable, offline

    try:
        # Without the hub, what it once gave may still be on disk.
        with nullcontext() if hub_reachable() else offline():
            return list(datasets.load_dataset(repository, config, split="validation"))
    except (
        datasets.exceptions.DatasetsError,
        OSError,
        ValueError,
        RuntimeError,
        pyarrow.ArrowException,
    ) as error:
        lines = str(error).strip().splitlines()
        raise RopewalkError(
            f"cannot load {repository} from the hub: {lines[0] if lines else type(error).__name__}; give a file"
        ) from error


def _get(value: Any, key: str, kind: type, where: str) -> Any:
    """A field of a kind that must be there."""
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise RopewalkError(f"{where} has no {key!r} of the kind {_KINDS[kind]}")
    return found


_KINDS = {list: "list", dict: "object", str: "text", bool: "true or false"}


def _texts(value: Any, key: str, where: str) -> list[str]:
    found: list[str] = _get(value, key, list, where)
    if not all(isinstance(each, str) for each in found):
        raise RopewalkError(f"{where}: {key!r} must be a list of texts")
    return found
