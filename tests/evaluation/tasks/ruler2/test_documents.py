"""RULERv2's tasks with HotpotQA: prompts as published, and the documents that support an answer."""

import json
import re
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.evaluation.tasks.ruler.qa import QuestionTask
from ropewalk.evaluation.tasks.ruler2.documents import KINDS, DocumentTask
from tests.evaluation.qa_cases import hotpotqa
from tests.evaluation.tasks.ruler2.ruler2_cases import samples_of, settings_of

LENGTH = 5000
ROWS = hotpotqa(40)


def documents_of(sample: Sample) -> dict[str, str]:
    """The documents of a prompt by their numbers."""
    texts = sample.text.partition("\n\n")[2]
    return dict(re.findall(r"Document (\d{7}):\n(Title \d+\n.*?)\n\n", texts, re.DOTALL))


def supporting(sample: Sample) -> list[str]:
    """What the row says of the question, in the order of its paragraphs."""
    row = ROWS[sample.details["question"]]
    titles = {title for title, _ in row["supporting_facts"]}
    return [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"] if title in titles]


@pytest.mark.parametrize("task", KINDS)
def test_the_text_gives_the_answer(task: str, tmp_path: Path) -> None:
    samples = samples_of(settings_of(tmp_path), task, LENGTH, 12)
    assert len({sample.details["question"] for sample in samples}) == 12
    for sample in samples:
        found = documents_of(sample)
        assert len(found) == sample.details["texts"]
        row, right = ROWS[sample.details["question"]], supporting(sample)
        # All ten documents of the question are there.
        assert {f"{title}\n{''.join(each)}" for title, each in row["context"]} <= set(found.values())
        numbers = [number for text in right for number, each in found.items() if each == text]
        if task == "qa_basic":
            assert f"\n\nText: {right[0]}\nMost relevant" in sample.text
            assert sample.references == (numbers[0],)
        elif task == "qa_easy":
            assert sample.references == tuple(numbers)
        else:
            assert sample.references == (row["answer"],)
        needles = [sample.text[start:end] for start, end in sample.details["spans"]]
        wanted = right[:1] if task == "qa_basic" else right
        assert needles == [f"Document {number}:\n{text}" for number, text in found.items() if text in wanted]
        said = f"{needles[0]}\n\nThe answer is {sample.references[-1]}."
        assert METRICS[sample.metric](said, sample.references, sample.details) == 1
        # A document has at most 5 % of it.
        assert 0.93 < sample.fill <= 1


def test_prompts_are_the_published_ones(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    index = "Only give me the index without any document contents."
    forms = {
        "qa_basic": (
            "Below are some documents. I will give you a text at the end. Please find the document index of the "
            f"text. {index}",
            "Text: {text}\nMost relevant document index:",
        ),
        "qa_easy": (
            "Below are some documents. I will give you a question at the end. Please find the index of the most "
            f"relevant document that can help answer the question. {index}",
            "Question: {query}\nIndex of the most relevant document that can help answer the question:",
        ),
        "qa_medium": (
            "Below are some documents. I will ask you to answer a question based on the documents. Please answer the "
            "question.",
            "Please first find and copy paste the documents relevant to the following question and then answer it "
            "based on the documents you find.\n\nQuestion: {query}",
        ),
        "qa_hard": (
            "Below are some documents. I will ask you to answer a question based on the documents. Please answer the "
            "question.",
            "Please answer the following question based on the documents.\n\nQuestion: {query}",
        ),
    }
    assert forms.keys() == KINDS.keys()
    for task, (introduction, request) in forms.items():
        (sample,) = samples_of(settings, task, LENGTH, 1)
        listed = "\n\n".join(f"Document {number}:\n{text}" for number, text in documents_of(sample).items())
        query = ROWS[sample.details["question"]]["question"]
        end = request.format(text=supporting(sample)[0], query=query)
        assert sample.text == f"{introduction}\n\n{listed}\n\n{end}"


def test_a_file_without_supporting_facts_is_refused(tmp_path: Path) -> None:
    rows = [{key: value for key, value in row.items() if key != "supporting_facts"} for row in ROWS]
    path = tmp_path / "without.json"
    path.write_text(json.dumps(rows))
    with pytest.raises(RopewalkError, match="without supporting_facts"):
        DocumentTask("qa_basic", QuestionTask("qa", "hotpotqa", str(path))).unavailable()
