"""Read SQuAD v2 and HotpotQA as RULER does: questions, answers, and documents to answer from.

This package distributes neither. The user gives a local file, or ``hub`` to load the dataset from the Hub.
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
from ropewalk.data.read.records import kind_name
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.benchmark_files import read_rows
from ropewalk.io.digests import digest
from ropewalk.io.files import parse_json

HUB = "hub"
"""Given instead of a path to load the dataset from the Hugging Face Hub."""


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        query: text of the question.
        answers: answers of all annotators, at least one.
        gold: indices of the question's own documents, of which one or more contain the answer.
        more: indices of other documents of the same article, which are the hardest distractors.
        supporting: those of ``gold`` that the answer needs; empty if the dataset does not say it.
    """

    query: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    more: tuple[int, ...] = ()
    supporting: tuple[int, ...] = ()


@dataclass(frozen=True)
class QuestionSet:
    """All answerable questions of a dataset, in its order.

    Attributes:
        documents: distinct documents, in alphabetical order.
        questions: questions, at least one.
        sha256: digest of documents and questions, without ``supporting``.
    """

    documents: tuple[str, ...]
    questions: tuple[Question, ...]
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        questions = [[each.query, each.answers, each.gold, each.more] for each in self.questions]
        # The dataclass is frozen, and this field follows from the others.
        object.__setattr__(self, "sha256", digest([self.documents, questions]))


def read_squad(path: str) -> QuestionSet:
    """Read the answerable questions of SQuAD v2's dev set, with a document for each paragraph. Each path is read once.

    Args:
        path: path of ``dev-v2.0.json``, of the Hub's Parquet file, or of rows with the same fields; or ``hub``.

    Raises:
        RopewalkError: if the file does not exist or has another format; the message says what is wrong and where.
    """
    return _read(_squad, path)


def read_hotpotqa(path: str) -> QuestionSet:
    """Read the questions of HotpotQA's dev set with distractors; a document is a paragraph with its title above it.

    Args:
        path: path of ``hotpot_dev_distractor_v1.json``, of the Hub's Parquet file, or of rows with the same fields; or
            ``hub``.

    Raises:
        RopewalkError: if the file does not exist or has another format; the message says what is wrong and where.
    """
    return _read(_hotpotqa, path)


def _read(reader: Callable[[str], QuestionSet], path: str) -> QuestionSet:
    if path == HUB:
        return reader(path)
    file = Path(path).expanduser()
    if not file.is_file():
        raise RopewalkError(
            f"the file {path!r} of questions does not exist; give an existing file, or {HUB!r} to load the questions "
            "from the Hub"
        )
    # As text, because the readers are cached by it.
    return reader(str(file))


@dataclass(frozen=True)
class _RawQuestion:
    """A question of SQuAD before its documents have indices."""

    article: int
    document: str
    query: str
    answers: tuple[str, ...]


@lru_cache(maxsize=2)
def _squad(path: str) -> QuestionSet:
    value = _rows(path, "rajpurkar/squad_v2", None)
    articles, raw = _squad_file(value, path) if isinstance(value, dict) else _squad_rows(value, path)
    index = _indices(document for article in articles for document in article)
    numbered = [[index[document] for document in article] for article in articles]
    questions = []
    for each in raw:
        gold = index[each.document]
        more = tuple(number for number in numbered[each.article] if number != gold)
        questions.append(Question(each.query, each.answers, (gold,), more))
    return _question_set(path, index, questions)


def _squad_file(value: Any, path: str) -> tuple[list[list[str]], list[_RawQuestion]]:
    """Return each article's documents and the answerable questions of SQuAD's own file."""
    articles: list[list[str]] = []
    found = []
    for number, article in enumerate(_get(value, "data", list, path)):
        where = f"{path}: data[{number}]"
        articles.append([])
        for at, paragraph in enumerate(_get(article, "paragraphs", list, where)):
            place = f"{where}.paragraphs[{at}]"
            document = _get(paragraph, "context", str, place)
            articles[-1].append(document)
            for nth, entry in enumerate(_get(paragraph, "qas", list, place)):
                here = f"{place}.qas[{nth}]"
                if not _get(entry, "is_impossible", bool, here):
                    answers = _get(entry, "answers", list, here)
                    texts = tuple(_get(each, "text", str, f"{here}.answers") for each in answers)
                    found.append(_RawQuestion(number, document, _get(entry, "question", str, here), texts))
    return articles, found


def _squad_rows(rows: Sequence[Any], path: str) -> tuple[list[list[str]], list[_RawQuestion]]:
    """Return each article's documents and the answerable questions of the Hub's rows, which have one question each."""
    # Ordered sets: many rows share a document, and documents keep their order.
    articles: dict[str, dict[str, None]] = {}
    found = []
    for at, row in enumerate(rows):
        where = f"{path}: row {at}"
        document, title = _get(row, "context", str, where), _get(row, "title", str, where)
        articles.setdefault(title, {})[document] = None
        answers = _texts(_get(row, "answers", dict, where), "text", where)
        if answers:
            # Articles are numbered in the order of their first rows.
            number = list(articles).index(title)
            found.append(_RawQuestion(number, document, _get(row, "question", str, where), tuple(answers)))
    return [list(documents) for documents in articles.values()], found


@lru_cache(maxsize=2)
def _hotpotqa(path: str) -> QuestionSet:
    value = _rows(path, "hotpotqa/hotpot_qa", "distractor")
    if isinstance(value, dict):
        raise RopewalkError(f"{path} is not HotpotQA: it must be a list of questions, got a JSON object")
    found: list[tuple[str, str, list[str], set[str]]] = []
    for i, row in enumerate(value):
        where = f"{path}: question {i}"
        query, answer = _get(row, "question", str, where), _get(row, "answer", str, where)
        found.append((query, answer, _paragraphs(row, where), _supporting_titles(row)))
    index = _indices(document for _, _, documents, _ in found for document in documents)
    return _question_set(
        path,
        index,
        [
            Question(
                query,
                (answer,),
                tuple(index[document] for document in documents),
                supporting=tuple(
                    index[document] for document in documents if document.partition("\n")[0] in titles
                ),
            )
            for query, answer, documents, titles in found
        ],
    )


def _supporting_titles(row: Any) -> set[str]:
    """Titles in ``[title, sentence]`` pairs (original file) or a column (Hub); none if the row has no such field."""
    facts = row.get("supporting_facts")
    if isinstance(facts, dict):
        return set(_texts(facts, "title", "supporting_facts"))
    return {fact[0] for fact in facts or () if isinstance(fact, list) and fact}


def _paragraphs(row: Any, where: str) -> list[str]:
    """Return a question's paragraphs from ``[title, sentences]`` pairs (original file) or two columns (Hub)."""
    context = row.get("context") if isinstance(row, dict) else None
    if isinstance(context, dict):
        titles = _texts(context, "title", where)
        bodies = _get(context, "sentences", list, where)
        # Columns of different lengths are damaged; no pairs are refused below.
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
        # HotpotQA's sentences bring the space before them along.
        made.append(f"{pair[0]}\n{''.join(pair[1])}")
    return made


def _indices(documents: Iterable[str]) -> dict[str, int]:
    # Sorted, so that the order of a set, which changes from process to process, does not matter.
    return {document: index for index, document in enumerate(sorted(set(documents)))}


def _question_set(path: str, index: Mapping[str, int], questions: Sequence[Question]) -> QuestionSet:
    if not questions:
        raise RopewalkError(f"{path} has no question with an answer")
    wordless = next((each.query for each in questions if not each.answers or "" in each.answers), None)
    if wordless is not None:
        raise RopewalkError(f"{path}: the question {wordless!r} has no answer, or an empty one")
    return QuestionSet(tuple(index), tuple(questions))


def _rows(path: str, repository: str, config: str | None) -> Any:
    """Return the contents of a file, as an object or rows, or the Hub's rows."""
    if path == HUB:
        return _hub_rows(repository, config)
    file = Path(path)
    if split_suffix(file)[0] != ".json":
        return read_rows(file)
    try:
        value = parse_json(read_text(file))
    except json.JSONDecodeError as error:
        raise RopewalkError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict | list):
        raise RopewalkError(f"{path} must contain a JSON object or list of questions, got {kind_name(value)}")
    return value


def _hub_rows(repository: str, config: str | None) -> list[Any]:
    import datasets
    import pyarrow

    from ropewalk.data.read.hub import hub_reachable, offline

    try:
        # Without a connection, the dataset may still be in the local cache.
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
            f"cannot load {repository} from the Hub: {lines[0] if lines else type(error).__name__}; give a local file"
        ) from error


def _get(value: Any, key: str, kind: type, where: str) -> Any:
    """Return a required field, or raise if it is missing or has another type."""
    found = value.get(key) if isinstance(value, dict) else None
    if not isinstance(found, kind):
        raise RopewalkError(f"{where} must have a field {key!r} of type {_KINDS[kind]}")
    return found


_KINDS = {list: "list", dict: "object", str: "string", bool: "boolean"}


def _texts(value: Any, key: str, where: str) -> list[str]:
    found: list[str] = _get(value, key, list, where)
    if not all(isinstance(each, str) for each in found):
        raise RopewalkError(f"{where}: {key!r} must be a list of strings")
    return found
