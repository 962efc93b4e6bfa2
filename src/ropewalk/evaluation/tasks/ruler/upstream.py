"""RULER's samples exactly as NVIDIA/RULER at c3f5e3b generates them, character by character.

Upstream draws all samples of a task and length from one stream of random numbers, including the trials of its search
for the number of units, and shuffles some lists with the same seed each time. Our own samples differ only in this; both
share the functions that build the text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice

import numpy as np

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Draft, Form, Sample, Task, counted_samples
from ropewalk.evaluation.tasks.haystack_sources import prose_of
from ropewalk.evaluation.tasks.ruler import vt, word_counting
from ropewalk.evaluation.tasks.ruler.niah import (
    DEPTHS,
    NeedleTask,
    draw_word,
    hide_in_lines,
    hide_in_sentences,
    needle_lines,
)
from ropewalk.evaluation.tasks.ruler.qa import QuestionTask, qa_prompt
from ropewalk.evaluation.tasks.ruler.questions import QuestionSet
from ropewalk.evaluation.tasks.ruler.templates import CWE, FWE, NOISE_LINE, needle_line, niah_prompt
from ropewalk.evaluation.tasks.words import listed_words

SEED = 42
VERSION = "NVIDIA/RULER c3f5e3b"
SHORT_BELOW = 4096
"""Length in tokens below which upstream's search takes smaller steps."""
MOST_TRIES = 100
"""Maximum number of trials with the fewest units for a sample; upstream never stops trying."""

SplitSentences = Callable[[str], Sequence[str]]
Tokens = Callable[[str], int]


@dataclass(frozen=True)
class Room:
    """The room for a prompt, counted as upstream does.

    Attributes:
        tokens: counts the tokens of a text as upstream does, without BOS and chat template.
        length: tokens of prompt and answer together.
        reserved: tokens of the length that the prompt cannot use.
    """

    tokens: Tokens
    length: int
    reserved: int = 0

    def holds(self, prompt: str) -> bool:
        return self.tokens(prompt) + self.reserved <= self.length


@dataclass(frozen=True)
class Made:
    """One prompt of upstream."""

    text: str
    prefix: str
    references: tuple[str, ...]

    @property
    def prompt(self) -> str:
        return self.text + self.prefix

    def draft(self, units: int, tokens: Tokens) -> Draft:
        """Return a draft whose details contain upstream's token count, which has no BOS."""
        details = {"compat": VERSION, "units": units, "upstream_tokens": tokens(self.prompt)}
        return Draft(self.text, self.prefix, self.references, details)


Stream = Iterator[tuple[Made, int]]

Make = Callable[[int], Made]
"""Returns the next prompt of the stream, given its number of units."""


class _Unlucky(Exception):
    """Upstream's script fails on this draw, and draws again."""


def upstream_samples(
    task: Task,
    encoder: PromptEncoder,
    length: int,
    count: int,
    split: SplitSentences | None = None,
) -> Iterator[Sample]:
    """Generate upstream's samples with its seed 42, in order and lazily.

    Upstream fills the length by a token count without BOS and chat template. The samples' own count includes both, so
    it may exceed the length by that many tokens.

    Args:
        task: one of RULER's tasks.
        encoder: counts the tokens of the samples.
        length: tokens of prompt and answer together.
        count: number of samples; a smaller number gives the beginning of the same sequence.
        split: splits a text into sentences; None for nltk's ``sent_tokenize``.

    Raises:
        RopewalkError: by the call itself if the first sample cannot be generated or upstream's script would never end;
            later, if that happens for another sample.
    """
    if count < 1:
        raise RopewalkError(f"the number of samples must be 1 or more, got {count}")
    if isinstance(task, QuestionTask):
        return iter(upstream_qa_samples(task, encoder, length, count))

    def tokens(text: str) -> int:
        # The fast variant skips the offsets of tokens, which take as long as the tokens themselves.
        (encoded,) = encoder.backend().encode_batch_fast([text], add_special_tokens=False)
        return len(encoded)

    try:
        made = _made(task, tokens, length, split)
        # The first sample is made at once, so that a task that cannot run fails before others have run.
        first = next(made)
    except _Unlucky as error:
        raise RopewalkError(
            f"NVIDIA's script for {task.name} fails at {length} tokens with this tokenizer; choose another length, or "
            f"remove --compat nvidia"
        ) from error
    form = Form(task.suite, task.name, "all", task.max_new_tokens)
    return (
        counted_samples(form, encoder, length, [index], [each.draft(units, tokens)])[0]
        for index, (each, units) in enumerate(islice(chain([first], made), count))
    )


def _made(task: Task, tokens: Tokens, length: int, split: SplitSentences | None) -> Stream:
    """Return an endless stream of prompts with their numbers of units."""
    if isinstance(task, NeedleTask):
        return _niah(task, tokens, length, split)
    if isinstance(task, vt.TrackingTask):
        return _vt(task, tokens, length)
    if isinstance(task, word_counting.CommonWordsTask):
        return _cwe(task, tokens, length)
    if isinstance(task, word_counting.FrequentWordsTask):
        return _fwe(task, tokens, length)
    raise RopewalkError(f"NVIDIA's scripts have no samples for {task!r}; choose one of RULER's tasks")


def upstream_unavailable(task: Task) -> str | None:
    """Return what upstream's form of a task needs beyond the task itself and is missing here, or None."""
    if not (isinstance(task, NeedleTask) and task.in_prose):
        return None
    try:
        _punkt()("One. Two.")
    except ImportError:
        return "NVIDIA's script splits essays with nltk; run pip install nltk and nltk.download('punkt_tab')"
    except LookupError:
        return "NVIDIA's script needs nltk's data to split essays; run nltk.download('punkt_tab')"
    return None


def _niah(task: NeedleTask, tokens: Tokens, length: int, split: SplitSentences | None) -> Stream:
    draw = random.Random(SEED)

    def make(units: int) -> Made:
        keys, values = [], []
        for _ in range(task.keys):
            keys.append(draw_word(task.key_kind, draw))
            values.append([draw_word(task.value_kind, draw) for _ in range(task.values)])
        needles = needle_lines(task.value_kind, keys, values)
        random.Random(SEED).shuffle(needles)
        if task.in_prose:
            prose = " ".join(prose_of(task.haystack, task.essays).words(units))
            sentences = _sentences(split or _punkt(), prose)
            depths = draw.sample(DEPTHS, len(needles))
            context = hide_in_sentences(
                lambda start, end: " ".join(sentences[start:end]), len(sentences), needles, depths
            )
        else:
            lines = [_niah_line(task, draw) for _ in range(units)]
            positions = sorted(draw.sample(range(units), len(needles)), reverse=True)
            # Upstream inserts needles from the end of the list, so the first needle comes last.
            context = hide_in_lines(lines, needles[::-1], positions[::-1])
        queried = draw.sample(range(task.keys), task.queries)
        text, prefix = niah_prompt(task.value_kind, [keys[at] for at in queried], task.values, context)
        return Made(text, prefix, tuple(value for at in queried for value in values[at]))

    # Upstream's own steps, on which the number of units depends.
    step = 500 if task.in_prose else 25 if length >= SHORT_BELOW else 5
    per_unit = tokens(make(step).prompt) / step
    # Upstream's bound of the search: three times its estimate.
    most = max(int(length / per_unit * 3), step * 2)
    room = Room(tokens, length, task.max_new_tokens)
    return _fitted(task.name, make, room, _search(make, room, step, most), step)


def _niah_line(task: NeedleTask, draw: random.Random) -> str:
    if task.haystack == "noise":
        return NOISE_LINE
    return needle_line(task.value_kind, draw_word(task.key_kind, draw), draw_word(task.value_kind, draw))


def _vt(task: vt.TrackingTask, tokens: Tokens, length: int) -> Stream:
    draw, numbers = random.Random(SEED), np.random.RandomState(SEED)
    example, names = _vt_example(task, draw, tokens)

    def body(units: int) -> Made:
        return _vt_prompt(task, draw, numbers, units, vt.NAME_LETTERS)

    def make(units: int) -> Made:
        made = body(units)
        return Made(
            _other_names(example, names, draw, numbers) + "\n" + made.text, made.prefix, made.references
        )

    step = 10 if length >= SHORT_BELOW else 5
    per_unit = tokens(body(step).prompt) / step
    room = Room(tokens, length, task.max_new_tokens)
    most = max(int(length / per_unit * 3), step * 2)
    # Upstream sets the example's tokens aside in this search, and counts them with the prompt afterwards.
    units = _search(body, replace(room, reserved=room.reserved + tokens(example)), step, most)
    return _fitted(task.name, make, room, units, step)


def _vt_example(task: vt.TrackingTask, draw: random.Random, tokens: Tokens) -> tuple[str, list[str]]:
    """Return the longest example within 500 tokens, and its names."""

    def make(units: int) -> Made:
        return _vt_prompt(task, draw, None, units, vt.EXAMPLE_NAME_LETTERS)

    step = 5
    per_unit = tokens(make(step).prompt) / step
    most = max(int(vt.EXAMPLE_TOKENS / per_unit * 3), step * 2)
    room = Room(tokens, vt.EXAMPLE_TOKENS)
    units = _search(make, room, step, most)
    made, _ = next(_fitted(f"{task.name}'s example", make, room, units, step))
    return vt.answered(made.text, made.prefix, made.references) + "\n", list(made.references)


def _vt_prompt(
    task: vt.TrackingTask,
    draw: random.Random,
    numbers: np.random.RandomState | None,
    units: int,
    letters: int,
) -> Made:
    names = [vt.draw_name(draw, letters) for _ in range(task.statements)]
    value = "12345" if numbers is None else str(numbers.randint(vt.LEAST_VALUE, vt.MOST_VALUE + 1))
    if len(set(names)) < len(names):
        # On a duplicate, upstream draws more names, treats them as an incomplete second chain, and fails.
        while len(set(names)) < task.statements:
            names.append(vt.draw_name(draw, letters))
        if numbers is not None:
            # Upstream draws the value of the second chain before it fails, so the stream must advance alike.
            numbers.randint(vt.LEAST_VALUE, vt.MOST_VALUE + 1)
        raise _Unlucky
    # random.sample cannot choose more positions than there are lines.
    if units < len(names):
        raise _Unlucky
    positions = sorted(draw.sample(range(units), len(names)))
    context = hide_in_lines([NOISE_LINE] * units, vt.chain_statements(names, value), positions)
    return Made(*vt.tracking_prompt(context, value, len(names)), tuple(names))


def _other_names(
    example: str, names: Sequence[str], draw: random.Random, numbers: np.random.RandomState
) -> str:
    """Replace every occurrence of the example's names and value by new ones."""
    for name in names:
        example = example.replace(name, vt.draw_name(draw, len(name)))
    return example.replace("12345", str(numbers.randint(vt.LEAST_VALUE, vt.MOST_VALUE + 1)))


def _cwe(task: word_counting.CommonWordsTask, tokens: Tokens, length: int) -> Stream:
    draw = random.Random(SEED)
    words = list(listed_words())
    random.Random(SEED).shuffle(words)
    repeats = word_counting.repeats_at(length)

    def numbered(units: int, common: int, other: int) -> tuple[str, list[str]]:
        if units > len(words):
            raise RopewalkError(
                f"{task.name} at {length} tokens needs more than the {len(words)} available words; NVIDIA's script "
                f"takes more words from a list that is only in NVIDIA's repository; add --exclude {task.name}, or "
                "remove --compat nvidia"
            )
        drawn_words = draw.sample(words, units)
        entries = word_counting.word_list(drawn_words, common, other)
        random.Random(SEED).shuffle(entries)
        return word_counting.numbered(entries), drawn_words[: word_counting.COMMON]

    def make(units: int) -> Made:
        shown = numbered(repeats.example_words, repeats.example_common, repeats.example_other)
        context, answer = numbered(units, repeats.common, repeats.other)
        text = word_counting.answered_example(*shown) + CWE.text(context=context)
        return Made(text, CWE.prefix(), tuple(answer))

    # Upstream estimates the tokens of a word from a prompt of 4096 words.
    step, first = 10, 4096
    per_unit = tokens(make(first).prompt) / first
    most = max(int(length // per_unit) * 2, step * 2)
    room = Room(tokens, length, task.max_new_tokens)
    return _fitted(task.name, make, room, _search(make, room, step, most), step)


def _fwe(task: word_counting.FrequentWordsTask, tokens: Tokens, length: int) -> Stream:
    draw = random.Random(SEED)
    budget = length - task.max_new_tokens
    step, size = budget // 32, budget // word_counting.TOKENS_PER_WORD
    if size <= word_counting.ANSWERS:
        raise RopewalkError(
            f"NVIDIA's RULER script cannot make {task.name} fit in {length} tokens; choose a longer length"
        )

    def vocabulary() -> list[str]:
        words = [word_counting.draw_coded_word(draw) for _ in range(size)]
        # Words may repeat; upstream then draws more until enough are distinct.
        while len(set(words)) < size:
            words.append(word_counting.draw_coded_word(draw))
        words = sorted(set(words))
        random.Random(SEED).shuffle(words)
        # The dots take the place of the first word and thus its rank.
        return [word_counting.DOTS, *words[1:]]

    def make(words: Sequence[str], units: int) -> Made:
        entries = word_counting.coded_words(words, word_counting.word_counts(units, size))
        random.Random(SEED).shuffle(entries)
        text = FWE.text(context=" ".join(entries))
        return Made(text, FWE.prefix(), tuple(words[1 : word_counting.ANSWERS + 1]))

    words, units = vocabulary(), budget // word_counting.WORD_LETTERS
    # Up to the first size that is too long, then one step back.
    while tokens(make(words, units).prompt) < budget:
        units += step
    most = units - step
    while True:
        words, units = vocabulary(), most
        while tokens((made := make(words, units)).prompt) > budget:
            units -= step
            if units < -step:
                raise RopewalkError(
                    f"NVIDIA's RULER script cannot make {task.name} fit in {length} tokens; choose a longer length"
                )
        yield made, units


def _search(make: Make, room: Room, least: int, most: int) -> int:
    """Run upstream's binary search: return the largest number of units that it finds to fit, or the least."""
    # Every trial draws from the stream too, so this search must be upstream's to the letter.
    found = least
    while least <= most:
        middle = (least + most) // 2
        if room.holds(make(middle).prompt):
            found, least = middle, middle + 1
        else:
            most = middle - 1
    return found


def _fitted(name: str, make: Make, room: Room, units: int, step: int) -> Stream:
    """Yield samples one by one; a sample that is too long is drawn again with fewer units."""
    while True:
        used, tries = units, 0
        while (made := _luckily(make, used)) is None or not room.holds(made.prompt):
            if used > step:
                used -= step
            # Only tries at the smallest size count: all before were with fewer and fewer units.
            tries += used <= step
            if tries > MOST_TRIES:
                raise RopewalkError(
                    f"NVIDIA's RULER script cannot make {name} fit in {room.length} tokens, even at the smallest "
                    "size; choose a longer length, or remove --compat nvidia"
                )
        yield made, used


def _luckily(make: Make, units: int) -> Made | None:
    try:
        return make(units)
    except _Unlucky:
        return None


# Cached because most samples have the same number of words, and nltk is slow.
@lru_cache(maxsize=4)
def _sentences(split: SplitSentences, text: str) -> Sequence[str]:
    return split(text.strip())


def _punkt() -> SplitSentences:
    from nltk.tokenize import sent_tokenize  # type: ignore[import-untyped]

    split: SplitSentences = sent_tokenize
    return split


DOCUMENTS_STEP = 10
"""Number of documents in the smallest prompt that is tried, and the decrement between tries."""
MakeQuestion = Callable[[int, int], tuple[str, str] | None]
"""Returns task text and prefix for a question's index and a number of documents; None if upstream's script fails."""


def upstream_qa_samples(task: QuestionTask, encoder: PromptEncoder, length: int, count: int) -> list[Sample]:
    """Generate upstream's question answering samples with its seed 42.

    Upstream fills the length by a token count without BOS and chat template. The samples' own count includes both, so
    it may exceed the length by that many tokens.

    Args:
        task: ``qa_1`` or ``qa_2``, with its dataset.
        encoder: encoder whose tokenizer decides how many documents fit.
        length: tokens of prompt and answer together.
        count: number of samples; a smaller number gives the beginning of the same sequence.

    Raises:
        RopewalkError: if there are fewer questions than samples, or upstream's script would never end.
    """
    data = task.questions()
    if not 1 <= count <= len(data.questions):
        raise RopewalkError(
            f"{task.name} has {len(data.questions)} questions, one per sample, and {count} samples are requested; give "
            f"--samples from 1 to {len(data.questions)}"
        )

    def tokens(text: str) -> int:
        ids = encoder.tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)
        return len(ids["input_ids"])

    make = _question_prompts(data)
    room = Room(tokens, length, task.max_new_tokens)
    most = _search_documents(task, make, room)
    drafts = []
    for index in range(count):
        (text, prefix), documents = _question_fitted(task, make, room, index, most)
        details = {"compat": VERSION, "units": documents, "upstream_tokens": tokens(text + prefix)}
        drafts.append(Draft(text, prefix, data.questions[index].answers, details))
    form = Form(task.suite, task.name, "part", task.max_new_tokens)
    return counted_samples(form, encoder, length, range(count), drafts)


def _question_prompts(data: QuestionSet) -> MakeQuestion:
    """Return a function that builds prompts from a single stream of random numbers."""
    draw = random.Random(SEED)
    total = len(data.documents)

    def make(index: int, documents: int) -> tuple[str, str] | None:
        question = data.questions[index]
        own, nearest = list(question.gold), list(question.more)
        others = documents - len(own)
        if documents >= total:
            # Upstream ignores the question's own documents here: it takes all documents in order, with repetition.
            order = [at % total for at in range(documents)]
        elif others > len(nearest):
            known = {*own, *nearest}
            rest = [at for at in range(total) if at not in known]
            if others - len(nearest) > len(rest):
                return None
            order = own + nearest + draw.sample(rest, others - len(nearest))
        elif others < 0:
            return None
        else:
            order = own + draw.sample(nearest, others)
        random.Random(SEED).shuffle(order)
        return qa_prompt(question.query, [data.documents[at] for at in order])

    return make


def _search_documents(task: QuestionTask, make: MakeQuestion, room: Room) -> int:
    """Return the largest number of documents that upstream's binary search finds to fit, or the least."""
    first = room.tokens("".join(_question_made(task, make, DOCUMENTS_STEP)))
    least, most, found = (
        DOCUMENTS_STEP,
        max(int(room.length / (first / DOCUMENTS_STEP) * 3), 2 * DOCUMENTS_STEP),
        DOCUMENTS_STEP,
    )
    while least <= most:
        middle = (least + most) // 2
        if room.holds("".join(_question_made(task, make, middle))):
            found, least = middle, middle + 1
        else:
            most = middle - 1
    return found


def _question_made(task: QuestionTask, make: MakeQuestion, documents: int) -> tuple[str, str]:
    made = make(0, documents)
    if made is None:
        raise RopewalkError(
            f"NVIDIA's script fails on the first question of {task.source}, because it has more than {documents} "
            f"documents of its own, or its article has all documents; remove --compat nvidia"
        )
    return made


def _question_fitted(
    task: QuestionTask,
    make: MakeQuestion,
    room: Room,
    index: int,
    documents: int,
) -> tuple[tuple[str, str], int]:
    """Build one sample, with fewer and fewer documents until it fits."""
    # One try for each step down, then as many at the smallest size as elsewhere.
    for _ in range(documents // DOCUMENTS_STEP + MOST_TRIES):
        made = make(index, documents)
        if made is not None and room.holds("".join(made)):
            return made, documents
        if documents > DOCUMENTS_STEP:
            documents -= DOCUMENTS_STEP
    raise RopewalkError(
        f"NVIDIA's RULER script cannot make {task.name} fit in {room.length} tokens with {DOCUMENTS_STEP} documents "
        "or more; choose a longer length, or remove --compat nvidia"
    )
