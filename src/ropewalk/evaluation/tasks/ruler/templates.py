"""RULER's prompt templates, verbatim, with the beginnings of the answers.

Source: NVIDIA/RULER at c3f5e3b, as arXiv:2404.06654 reports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NOISE_LINE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The line that noise haystacks repeat."""


@dataclass(frozen=True)
class Template:
    """Template of a task; :meth:`text` and :meth:`prefix` fill in the fields in braces.

    Attributes:
        question: the task text.
        answer: the beginning of the answer, which the model continues.
    """

    question: str
    answer: str

    def text(self, **fields: object) -> str:
        """Return the task text."""
        return self.question.format(**fields)

    def prefix(self, **fields: object) -> str:
        """Return the beginning of the answer."""
        return self.answer.format(**fields)


NIAH = Template(
    "Some special magic {type} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n{context}\n"
    "What are all the special magic {type} for {query} mentioned in the provided text?",
    " The special magic {type} for {query} mentioned in the provided text are",
)
"""Template for several needles; ``type`` is a plural."""

NIAH_SINGLE = Template(
    "A special magic {type} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {type} afterwards.\n{context}\n"
    "What is the special magic {type} for {query} mentioned in the provided text?",
    " The special magic {type} for {query} mentioned in the provided text is",
)
"""Template for one query with one value; ``type`` is a singular."""

VT = Template(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{num} variables are assigned the value {query}, they are: ",
)

CWE = Template(
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
    "Question: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
)

FWE = Template(
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
)

QA = Template(
    "Answer the question based on the given documents. Only give me the answer and do not output any other "
    "words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the given "
    "documents. Only give me the answer and do not output any other words.\n\nQuestion: {query}",
    " Answer:",
)

_NEEDLE = "One of the special magic {type} for {key} is: {value}."


def needle_line(plural: str, key: str, value: str) -> str:
    """Return the sentence with a hidden value; ``plural`` is ``numbers`` or ``uuids``, even for a single needle."""
    return _NEEDLE.format(type=plural, key=key, value=value)


def niah_prompt(plural: str, queries: Sequence[str], values: int, context: str) -> tuple[str, str]:
    """Return the task text and the beginning of the answer of a needle task.

    Args:
        plural: kind of the hidden values, ``numbers`` or ``uuids``.
        queries: the requested keys, at least one.
        values: number of values per key; with one query and one value the template is in the singular.
        context: the haystack with its needles.
    """
    single = len(queries) * values == 1
    # The singular of numbers and uuids.
    template, kind = (NIAH_SINGLE, plural[:-1]) if single else (NIAH, plural)
    query = listed(queries)
    return template.text(type=kind, context=context, query=query), template.prefix(type=kind, query=query)


def listed(names: Sequence[str]) -> str:
    """Join names like ``a``, ``a, and b`` or ``a, b, and c``."""
    # With a comma for two names too, as in upstream's prompts.
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
