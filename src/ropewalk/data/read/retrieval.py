"""Documents that train retrieval: needles, pass keys and chains of variables, each with questions and their answers.

They are worded like the prompts of the benchmarks (RULER's niah and vt, and passkey retrieval), with keys, numbers and
names drawn anew. A document contains the answer to each of its questions once, anywhere before them, so that a model
learns from them to look back over any distance that fits in a document. ``embedded:retrieval-documents`` are such
documents, and ``scripts/train_retrieval_model.py`` trained the checkpoint ``embedded:retrieval`` on more of them.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle, islice, pairwise

from ropewalk.data.read.documents import Document
from ropewalk.data.read.embedded import embedded_documents

SOURCE_RETRIEVAL = "retrieval"
DOCUMENTS = 1200
SHORTEST, LONGEST = 128, 2048
"""Least and most tokens of a document, roughly, with the tokenizer of the embedded retrieval checkpoint."""

NOISE_SENTENCES = (
    "The grass is green.",
    "The sky is blue.",
    "The sun is yellow.",
    "Here we go.",
    "There and back again.",
)
NOISE_LINE = " ".join(NOISE_SENTENCES)

PASSKEY_TASK = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
NEEDLE_TASK = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards."
)
CHAIN_TASK = "Memorize and track the chain(s) of variable assignment hidden in the following text."


@dataclass(frozen=True)
class Exam:
    """A text, and questions with their answers; the text and the first question are a benchmark's prompt."""

    context: str
    questions: tuple[tuple[str, str], ...]

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield the parts of the document in order, and whether each is an answer."""
        before = self.context
        for question, answer in self.questions:
            yield before + question, False
            yield answer, True
            before = "\n"

    @property
    def text(self) -> str:
        """The whole document."""
        return "".join(text for text, _ in self.pieces())


@dataclass(frozen=True)
class ExamWriter:
    """Draws exams.

    Attributes:
        rng: decides everything.
        words: pairs of these are keys, ``first-second``.
    """

    rng: random.Random
    words: tuple[Sequence[str], Sequence[str]]

    def passkey(self, sentences: int) -> Exam:
        """Return a passkey prompt with this many sentences of noise."""
        key, before = self.rng.randint(1, 50_000), self.rng.randint(0, sentences)
        noise = [" ".join(islice(cycle(NOISE_SENTENCES), n)) for n in (before, sentences - before)]
        needle = f"The pass key is {key}. Remember it. {key} is the pass key."
        context = "\n".join([PASSKEY_TASK, noise[0], needle, noise[1], ""])
        return Exam(context, (("What is the pass key? The pass key is", f" {key}"),))

    def needles(self, keys: int, noise_lines: int, questions: int) -> Exam:
        """Return RULER's numbers for keys.

        Args:
            keys: number of keys with a number each, at least 1; above 1 and without noise it is niah_multikey_2.
            noise_lines: lines of noise, before any of which the needles stand.
            questions: number of questions, at least 1, each for one of the keys.
        """
        numbers = {key: str(self.rng.randint(1_000_000, 9_999_999)) for key in self._keys(keys)}
        lines = [
            f"One of the special magic numbers for {key} is: {number}." for key, number in numbers.items()
        ]
        context = "\n".join([NEEDLE_TASK, *self._among_noise(lines, noise_lines), ""])
        requested = self.rng.choices(list(numbers), k=questions)
        return Exam(context, tuple((_needle_question(key), f" {numbers[key]}") for key in requested))

    def chain(self, letters: int, noise_lines: int, names: int = 5) -> Exam:
        """Return RULER's chain of variables, named by this many letters each."""
        chain = self._names(names, letters)
        value = self.rng.randint(10_000, 99_998)
        lines = [f"VAR {chain[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(chain))]
        context = "\n".join([f"{CHAIN_TASK}\n", *self._among_noise(lines, noise_lines), ""])
        question = (
            f"Question: Find all variables that are assigned the value {value} in the text above. "
            "Answer: According to the chain(s) of variable assignment in the text above, "
            f"{names} variables are assigned the value {value}, they are: "
        )
        return Exam(context, ((question, "".join(f" {name}" for name in chain)),))

    def document(self, tokens: int) -> str:
        """Return a document of roughly this many tokens, of any kind, with its questions."""
        kind, draw = self.rng.random(), self.rng.randint
        if kind < 0.45:
            questions = max(1, tokens // draw(60, 150))
            # A needle takes about 17 tokens, and a question with its answer about 32.
            return self.needles(max(1, (tokens - 32 * questions) // 17), 0, questions).text
        if kind < 0.65:
            keys, questions = draw(1, 4), draw(1, 4)
            return self.needles(keys, max(0, (tokens - 32 * questions - 17 * keys) // 4), questions).text
        if kind < 0.80:
            return self.passkey(max(0, tokens - 40)).text
        example, lines = draw(0, 20), max(0, (tokens - 230) // 4)
        solved = min(example, lines)
        return f"{self.chain(3, solved).text}\n\n{self.chain(5, lines - solved).text}"

    def _among_noise(self, lines: Sequence[str], noise_lines: int) -> list[str]:
        total = noise_lines + len(lines)
        places = set(self.rng.sample(range(total), len(lines)))
        in_order = iter(lines)
        return [next(in_order) if n in places else NOISE_LINE for n in range(total)]

    def _keys(self, count: int) -> list[str]:
        # A dictionary serves as a set that keeps the order of drawing.
        found: dict[str, None] = {}
        while len(found) < count:
            found["-".join(self.rng.choice(words) for words in self.words)] = None
        return list(found)

    def _names(self, count: int, letters: int) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < count:
            name = "".join(self.rng.choices(string.ascii_uppercase, k=letters))
            # VAR is the keyword of the assignments.
            if name != "VAR":
                found[name] = None
        return list(found)


def retrieval_documents() -> Iterator[Document]:
    """Yield the documents of ``embedded:retrieval-documents``, the same in each process.

    Their keys are words of the embedded corpus, which differs slightly between Python versions. Lengths are drawn
    uniformly on a logarithmic scale.

    Raises:
        RopewalkError: if this Python has no standard library sources.
    """
    words = _corpus_words()
    for number in range(DOCUMENTS):
        # random hashes a string seed by SHA-512, so the documents are the same in every process.
        writer = ExamWriter(random.Random(f"retrieval document {number}"), (words, words))
        tokens = int(SHORTEST * (LONGEST / SHORTEST) ** writer.rng.random())
        yield Document(writer.document(tokens), SOURCE_RETRIEVAL, f"retrieval/{number:04d}")


@lru_cache(maxsize=1)
def _corpus_words() -> tuple[str, ...]:
    found: set[str] = set()
    for document in embedded_documents("train"):
        found.update(re.findall(r"(?<![\w])[a-z]{4,9}(?![\w])", document.text))
    # Sorted, because the order of a set differs from process to process.
    return tuple(sorted(found))


def _needle_question(key: str) -> str:
    return (
        f"What is the special magic number for {key} mentioned in the provided text? "
        f"The special magic number for {key} mentioned in the provided text is"
    )
