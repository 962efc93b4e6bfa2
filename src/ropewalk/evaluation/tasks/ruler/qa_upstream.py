"""RULER's qa samples exactly as NVIDIA/RULER at c3f5e3b makes them, character by character.

Upstream asks the questions in the order of the file, draws documents from one stream of random numbers, the trials
of its search among them, and shuffles by the same seed each time, so that the question's own documents stand at
the same place in all samples that have as many.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.fitting import Draft, Form, counted_samples
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.sample import Sample
from ropewalk.evaluation.tasks.ruler.qa import QuestionTask, qa_prompt
from ropewalk.evaluation.tasks.ruler.questions import QuestionSet

SEED = 42
VERSION = "NVIDIA/RULER c3f5e3b"
STEP = 10
"""Documents of the smallest prompt that is tried, and fewer of them in a next try."""
MOST_TRIES = 100
"""Prompts with the fewest documents before a sample is given up; upstream never gives up."""

Make = Callable[[int, int], tuple[str, str] | None]
"""From a question's index and a number of documents to task text and prefix; None where upstream's script fails."""


def upstream_qa_samples(task: QuestionTask, encoder: PromptEncoder, length: int, count: int) -> list[Sample]:
    """All samples that upstream makes with its seed 42.

    The number of tokens that upstream fills the length with has no BOS and no chat template; that of the samples
    has, and may be more than there is room for by as much.

    Args:
        task: ``qa_1`` or ``qa_2``, with its data set.
        encoder: its tokenizer decides how many documents fit.
        length: tokens.
        count: how many samples; the first ones of more are the same.

    Raises:
        RopewalkError: if there are not so many questions, or upstream would never end.
    """
    data = task.questions()
    if not 1 <= count <= len(data.questions):
        raise RopewalkError(
            f"{task.name} has {len(data.questions)} questions, one a sample; there cannot be {count} samples"
        )

    def tokens(prompt: tuple[str, str]) -> int:
        ids = encoder.tokenizer("".join(prompt), add_special_tokens=False, truncation=False, verbose=False)
        return len(ids["input_ids"])

    make = _prompts(data)
    budget = length - task.max_new_tokens
    most = _search(task, make, tokens, length, budget)
    drafts = []
    for index in range(count):
        (text, prefix), documents = _fitted(task, make, tokens, length, budget, index, most)
        details = {"compat": VERSION, "units": documents, "upstream_tokens": tokens((text, prefix))}
        drafts.append(Draft(text, prefix, data.questions[index].answers, details))
    form = Form(task.suite, task.name, "part", task.max_new_tokens)
    return counted_samples(form, encoder, length, range(count), drafts)


def _prompts(data: QuestionSet) -> Make:
    """Prompts one after the other, from one stream of random numbers."""
    draw = random.Random(SEED)
    total = len(data.documents)

    def make(asked: int, documents: int) -> tuple[str, str] | None:
        question = data.questions[asked]
        own, nearest = list(question.gold), list(question.more)
        others = documents - len(own)
        if documents >= total:
            # Upstream forgets the question's own documents here; all are there, but for a cut-off repetition.
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


def _search(
    task: QuestionTask, make: Make, tokens: Callable[[tuple[str, str]], int], length: int, budget: int
) -> int:
    """The largest number of documents that upstream's binary search sees fit, else the least."""
    first = _made(task, make, STEP)
    least, most, found = STEP, max(int(length / (tokens(first) / STEP) * 3), 2 * STEP), STEP
    while least <= most:
        middle = (least + most) // 2
        if tokens(_made(task, make, middle)) <= budget:
            found, least = middle, middle + 1
        else:
            most = middle - 1
    return found


def _made(task: QuestionTask, make: Make, documents: int) -> tuple[str, str]:
    made = make(0, documents)
    if made is None:
        raise RopewalkError(
            f"upstream's script fails on the first question of {task.source}, whose own documents are more than "
            f"{documents} or whose article has all there are; do without compat"
        )
    return made


def _fitted(
    task: QuestionTask,
    make: Make,
    tokens: Callable[[tuple[str, str]], int],
    length: int,
    budget: int,
    asked: int,
    documents: int,
) -> tuple[tuple[str, str], int]:
    """One sample; as long as it is too long, it is made again with fewer documents."""
    for _ in range(documents // STEP + MOST_TRIES):
        made = make(asked, documents)
        if made is not None and tokens(made) <= budget:
            return made, documents
        if documents > STEP:
            documents -= STEP
    raise RopewalkError(
        f"{task.name} does not fit in {length} tokens as upstream makes it, with {STEP} documents or more; take a "
        "longer length, or do without compat"
    )
