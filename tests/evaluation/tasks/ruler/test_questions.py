"""Questions of SQuAD and HotpotQA are read as they are, and what is broken is named."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from ropewalk.data.read import hub as hub_access
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.ruler.questions import QuestionSet, read_hotpotqa, read_squad
from tests.evaluation.qa_cases import hotpotqa, squad


def write(path: Path, value: Any) -> str:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return str(path)


def naive_squad() -> tuple[list[str], list[tuple[str, list[str], str, set[str]]]]:
    documents, asked = set(), []
    for article in squad()["data"]:
        contexts = {each["context"] for each in article["paragraphs"]}
        documents |= contexts
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                if not qa["is_impossible"]:
                    texts = [each["text"] for each in qa["answers"]]
                    asked.append((qa["question"], texts, paragraph["context"], contexts))
    return sorted(documents), asked


def named(data: QuestionSet) -> list[tuple[str, list[str], list[str], set[str]]]:
    return [
        (
            each.query,
            list(each.answers),
            [data.documents[at] for at in each.gold],
            {data.documents[at] for at in each.more},
        )
        for each in data.questions
    ]


def test_squad_is_read_as_it_is(tmp_path: Path) -> None:
    data = read_squad(write(tmp_path / "dev.json", squad()))
    documents, asked = naive_squad()
    assert list(data.documents) == documents
    assert named(data) == [(q, a, [own], contexts - {own}) for q, a, own, contexts in asked]
    assert any(qa["is_impossible"] for each in squad()["data"] for p in each["paragraphs"] for qa in p["qas"])


def squad_rows() -> list[dict[str, Any]]:
    """The fields of the hub's ``rajpurkar/squad_v2``."""
    return [
        {
            "id": qa["id"],
            "title": article["title"],
            "context": paragraph["context"],
            "question": qa["question"],
            "answers": {
                "text": [] if qa["is_impossible"] else [each["text"] for each in qa["answers"]],
                "answer_start": [],
            },
        }
        for article in squad()["data"]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
    ]


def hotpotqa_rows() -> list[dict[str, Any]]:
    """The fields of the hub's ``hotpotqa/hotpot_qa``."""
    return [
        {
            "question": each["question"],
            "answer": each["answer"],
            "context": {
                "title": [title for title, _ in each["context"]],
                "sentences": [sentences for _, sentences in each["context"]],
            },
            "supporting_facts": {
                "title": [title for title, _ in each["supporting_facts"]],
                "sent_id": [sentence for _, sentence in each["supporting_facts"]],
            },
        }
        for each in hotpotqa()
    ]


def test_the_hubs_fields_give_the_same(tmp_path: Path) -> None:
    of_file = read_squad(write(tmp_path / "dev.json", squad()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(squad_rows()), tmp_path / "squad.parquet")
    lines = "\n".join(map(json.dumps, squad_rows()))
    for path in (str(tmp_path / "squad.parquet"), write(tmp_path / "squad.jsonl", lines)):
        found = read_squad(path)
        assert found.documents == of_file.documents
        assert named(found) == named(of_file)
    of_file = read_hotpotqa(write(tmp_path / "hotpot.json", hotpotqa()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(hotpotqa_rows()), tmp_path / "hotpot.parquet")
    assert read_hotpotqa(str(tmp_path / "hotpot.parquet")) == of_file


def test_hotpotqa_is_read_as_it_is(tmp_path: Path) -> None:
    data = read_hotpotqa(write(tmp_path / "hotpot.json", hotpotqa()))
    expected = [
        (
            each["question"],
            [each["answer"]],
            [f"{title}\n{''.join(sentences)}" for title, sentences in each["context"]],
            set(),
        )
        for each in hotpotqa()
    ]
    assert named(data) == expected
    assert list(data.documents) == sorted({document for _, _, own, _ in expected for document in own})


def test_a_file_is_read_once_and_digests_tell_files_apart(tmp_path: Path) -> None:
    path = write(tmp_path / "dev.json", squad())
    assert read_squad(path) is read_squad(path)
    again = read_squad(write(tmp_path / "again.json", squad()))
    assert again == read_squad(path)
    assert read_squad(write(tmp_path / "other.json", squad(7))).sha256 != again.sha256


PARAGRAPH = {"context": "c", "qas": [{"question": "q", "answers": [{"text": "a"}], "is_impossible": False}]}


def damaged(**changes: Any) -> dict[str, Any]:
    """SQuAD with one question, some fields of which are others; None leaves one out."""
    question = {k: v for k, v in {**PARAGRAPH["qas"][0], **changes}.items() if v is not None}
    return {"data": [{"title": "t", "paragraphs": [{"context": "c", "qas": [question]}]}]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ("5", "must contain a JSON object or list of questions, got a number"),
        ({"version": "v2.0"}, "must have a field 'data' of type list"),
        ({"data": []}, "no question with an answer"),
        ({"data": [{}]}, r"data\[0\] must have a field 'paragraphs'"),
        (
            {"data": [{"paragraphs": [{"qas": []}]}]},
            r"data\[0\].paragraphs\[0\] must have a field 'context' of type string",
        ),
        ({"data": [{"paragraphs": [3]}]}, r"paragraphs\[0\] must have a field 'context'"),
        (damaged(is_impossible=None), r"qas\[0\] must have a field 'is_impossible' of type boolean"),
        (damaged(question=None), r"qas\[0\] must have a field 'question'"),
        (damaged(answers="a"), r"qas\[0\] must have a field 'answers' of type list"),
        (damaged(answers=[{}]), r"answers must have a field 'text'"),
        (damaged(answers=[]), "question 'q' has no answer, or an empty one"),
        (damaged(answers=[{"text": ""}]), "question 'q' has no answer, or an empty one"),
        ([{"question": "q"}], "row 0 must have a field 'context'"),
        ([{"context": "c", "title": "t", "answers": {"text": [1]}}], "'text' must be a list of strings"),
    ],
)
def test_broken_squad_is_named_with_what_is_wrong(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path / "dev.json", content)
    with pytest.raises(RopewalkError, match=message) as caught:
        read_squad(path)
    assert str(caught.value).startswith(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": []}, "is not HotpotQA: it must be a list of questions"),
        ([], "no question with an answer"),
        ([{"question": "q"}], "question 0 must have a field 'answer'"),
        ([{"question": "q", "answer": "a"}], "question 0 must have a field 'context'"),
        ([{"question": "q", "answer": "a", "context": []}], "question 0 has no paragraphs in 'context'"),
        ([{"question": "q", "answer": "a", "context": ["ab"]}], "must be a title and a list of sentences"),
        (
            [{"question": "q", "answer": "a", "context": [["t", "s"]]}],
            "must be a title and a list of sentences",
        ),
        (
            [{"question": "q", "answer": "a", "context": [["t", [1]]]}],
            "must be a title and a list of sentences",
        ),
        (
            [{"question": "q", "answer": "", "context": [["t", ["s"]]]}],
            "question 'q' has no answer, or an empty one",
        ),
        (
            [{"question": "q", "answer": "a", "context": {"title": ["t"], "sentences": []}}],
            "question 0 has no paragraphs",
        ),
    ],
)
def test_broken_hotpotqa_is_named_with_what_is_wrong(tmp_path: Path, content: Any, message: str) -> None:
    path = write(tmp_path / "hotpot.json", content)
    with pytest.raises(RopewalkError, match=message) as caught:
        read_hotpotqa(path)
    assert str(caught.value).startswith(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    for read in (read_squad, read_hotpotqa):
        with pytest.raises(
            RopewalkError,
            match=r"the file '.*none.json' of questions does not exist; give an existing file, or 'hub' to load",
        ):
            read(str(tmp_path / "none.json"))
        with pytest.raises(RopewalkError, match=r"the file .* of questions does not exist"):
            read(str(tmp_path))


def test_the_hub_is_asked_for_the_published_data(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    from ropewalk.evaluation.tasks.ruler import questions

    calls = []

    def load(repository: str, config: str | None, split: str) -> list[dict[str, Any]]:
        calls.append((repository, config, split))
        return squad_rows() if "squad" in repository else hotpotqa_rows()

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub_access, "hub_reachable", lambda: True)
    for read in (questions._squad, questions._hotpotqa):
        read.cache_clear()
    try:
        assert len(read_squad("hub").questions) == len(naive_squad()[1])
        assert len(read_hotpotqa("hub").questions) == len(hotpotqa())
        assert read_squad("hub") is read_squad("hub")
    finally:
        for read in (questions._squad, questions._hotpotqa):
            read.cache_clear()
    assert calls == [
        ("rajpurkar/squad_v2", None, "validation"),
        ("hotpotqa/hotpot_qa", "distractor", "validation"),
    ]


def test_an_absent_hub_is_said_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(*asked: Any, **named: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub_access, "hub_reachable", lambda: False)
    with pytest.raises(
        RopewalkError,
        match=r"^cannot load rajpurkar/squad_v2 from the Hub: Couldn't reach the Hub; give a local file$",
    ):
        read_squad("hub")
