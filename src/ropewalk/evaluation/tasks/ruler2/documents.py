"""RULERv2's tasks with HotpotQA: find the documents of a question among others, or answer it from them.

Source: NVIDIA-NeMo/Skills, ``dataset/ruler2/prepare_qa.py`` (Apache-2.0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.samples import Draft, sample_random
from ropewalk.evaluation.tasks.ruler.qa import QuestionTask, others_in_order
from ropewalk.evaluation.tasks.ruler.questions import Question, QuestionSet
from ropewalk.evaluation.tasks.ruler2.numbered import BETWEEN, NUMBERS, Kind, NumberedTask
from ropewalk.io.digests import digest

ANSWER_DOCUMENTS = (
    "Below are some documents. I will ask you to answer a question based on the documents. "
    "Please answer the question."
)
INDEX_ONLY = "Only give me the index without any document contents."
KINDS: Mapping[str, Kind] = {
    "qa_basic": Kind(
        "ruler2_best",
        "Below are some documents. I will give you a text at the end. Please find the document index of the text. "
        + INDEX_ONLY,
        "Text: {text}\nMost relevant document index:",
    ),
    "qa_easy": Kind(
        "ruler2_best",
        "Below are some documents. I will give you a question at the end. Please find the index of the most relevant "
        f"document that can help answer the question. {INDEX_ONLY}",
        "Question: {question}\nIndex of the most relevant document that can help answer the question:",
    ),
    "qa_medium": Kind(
        "ruler2_best",
        ANSWER_DOCUMENTS,
        "Please first find and copy paste the documents relevant to the following question and then answer it based "
        "on the documents you find.\n\nQuestion: {question}",
    ),
    "qa_hard": Kind(
        "ruler2_best",
        ANSWER_DOCUMENTS,
        "Please answer the following question based on the documents.\n\nQuestion: {question}",
    ),
}


@dataclass(frozen=True)
class DocumentTask(NumberedTask):
    """Find the documents of a question of HotpotQA among others, or answer it from them."""

    source: QuestionTask

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def settings(self) -> Mapping[str, Any]:
        """See :class:`~ropewalk.evaluation.samples.Task`."""
        data = self._data()
        return {"questions": digest([data.sha256, [each.supporting for each in data.questions]])}

    def unavailable(self) -> str | None:
        """Return why the task cannot run here (no file), or None.

        Raises:
            RopewalkError: if the file is not HotpotQA, or does not say which documents support an answer.
        """
        reason = self.source.unavailable()
        if reason is None and not all(each.supporting for each in self.questions()):
            raise RopewalkError(
                "the file of HotpotQA has questions without supporting_facts, which name the documents to find; give "
                "hotpot_dev_distractor_v1.json as published"
            )
        return reason

    def questions(self) -> Sequence[Question]:
        return self._data().questions

    def _data(self) -> QuestionSet:
        return self.source.questions()

    def built(self, asked: int, units: int, key: tuple[int, int]) -> tuple[Draft, str]:
        seed, index = key
        data, kind = self._data(), self.kind
        question = data.questions[asked]
        draw = sample_random(seed, f"{self.name}/texts", 0, index)
        others = islice(others_in_order(question.gold, (), len(data.documents), draw), units)
        supporting = question.supporting
        documents = [*supporting, *(each for each in question.gold if each not in supporting), *others]
        draw = sample_random(seed, self.name, 0, index)
        numbers = draw.sample(NUMBERS, len(documents))
        order = draw.sample(range(len(documents)), len(documents))
        texts = [f"Document {numbers[at]}:\n{data.documents[documents[at]]}" for at in order]
        first = data.documents[supporting[0]]
        request = kind.request.format(text=first, question=question.query)
        right = [order.index(at) for at in range(1 if self.name == "qa_basic" else len(supporting))]
        prompt, spans = self.prompt(texts, right, "", request)
        references = (
            tuple(str(numbers[at]) for at in range(len(right)))
            if self.name in ("qa_basic", "qa_easy")
            else question.answers
        )
        copied = [texts[at] for at in right] if self.name == "qa_medium" else []
        details = {"question": asked, "texts": len(documents), "spans": spans}
        return Draft(prompt, "", references, details), BETWEEN.join([*copied, references[0]])
