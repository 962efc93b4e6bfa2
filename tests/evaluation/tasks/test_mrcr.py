"""MRCR: the checker finds the asked-for text in the chat."""

import difflib
import random
from typing import Any

import pytest

from benchmarks.ruler_samples import trained_tokenizer
from benchmarks.task_checkers import check
from benchmarks.task_checkers import mrcr_answer as answer
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.mrcr import NEEDLES, REQUEST_WORDS, fillers, google, openai, right_prefix
from tests.evaluation.evaluation_cases import byte_tokenizer
from tests.evaluation.tasks.task_cases import samples_of, scores_of

TASKS = [f"mrcr_{needles}" for needles in NEEDLES]
LENGTH = 12_000
"""In bytes, about 4K of another tokenizer's tokens."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return trained_tokenizer(2000, 200_000)


def siblings(sample: Sample) -> list[str]:
    """The answers to the requests that are asked for, in order."""
    right = sample.references[0][10:]
    turns = [text for _, text in sample.earlier]
    request = turns[turns.index(right) - 1]
    return [said for asked, said in zip(turns[::2], turns[1::2], strict=True) if asked == request]


@pytest.mark.parametrize("task", TASKS)
def test_the_chat_has_one_right_answer(task: str, tokenizer: Any) -> None:
    samples = samples_of("mrcr", task, 4096, 70, tokenizer=tokenizer)
    for sample in samples:
        check(sample)
        assert len(siblings(sample)) == sample.details["difficulty"] == int(task[5:])
        assert siblings(sample)[sample.details["asked_for"] - 1] == sample.references[0][10:]
        assert [role for role, _ in sample.earlier] == ["user", "assistant"] * (len(sample.earlier) // 2)
        # One character is one token at most.
        assert len(sample.references[0].encode()) <= sample.max_new_tokens
    assert {sample.details["asked_for"] for sample in samples} == set(range(1, int(task[5:]) + 1))
    depths = [sample.details["depth"] for sample in samples]
    assert min(depths) < 0.3
    assert max(depths) > 0.7


def test_other_requests_have_the_format_or_the_topic_that_is_asked_for() -> None:
    (sample,) = samples_of("mrcr", "mrcr_2", 60_000, 1)
    turns = [text for role, text in sample.earlier[2:] if role == "user"]
    found = [turn.removeprefix("write a ").split(" about ") for turn in turns]
    kind, topic = sample.text.partition("(1 indexed) ")[2].partition(".")[0].split(" about ")
    alike = [(each[0] == kind, each[1] == topic) for each in found]
    assert alike.count((True, True)) == 2
    assert 0.15 < alike.count((True, False)) / len(found) < 0.45
    assert 0.15 < alike.count((False, True)) / len(found) < 0.45


def test_units_are_the_words_of_other_answers_and_a_constant_for_each_request() -> None:
    for units in [*range(4 * 68, 6 * 68), 10_000]:
        made = fillers(random.Random(1), ("poem", "rain"), units)
        assert sum(len(text.split()) for _, text in made) + REQUEST_WORDS * len(made) == units


def test_a_wrong_sibling_scores_little(tokenizer: Any) -> None:
    scores = []
    for sample in samples_of("mrcr", "mrcr_8", 4096, 20, tokenizer=tokenizer):
        prefix, right = sample.references[0][:10], sample.references[0][10:]
        scores += [openai(prefix + each, sample.references) for each in siblings(sample) if each != right]
    assert sum(scores) / len(scores) < 0.05
    assert max(scores) < 0.25


@pytest.mark.parametrize("task", TASKS)
def test_models_score_what_they_know(task: str) -> None:
    def half(prompt: str) -> str:
        # The right prefix with a blank before it, for each second string.
        said = answer(prompt)
        return " " * (ord(said[0]) % 2) + said

    right = {task: 100, f"{task}.google": 100, f"{task}.prefix": 100}
    assert scores_of("mrcr", task, LENGTH, 6, answer) == right
    assert scores_of("mrcr", task, LENGTH, 6, lambda prompt: "") == dict.fromkeys(right, 0)
    known = [1 - ord(sample.references[0][0]) % 2 for sample in samples_of("mrcr", task, LENGTH, 6)]
    share = pytest.approx(100 * sum(known) / 6)
    assert scores_of("mrcr", task, LENGTH, 6, half) == right | {task: share, f"{task}.prefix": share}


TEXT = "The lamp hums over the quay. " * 12
RIGHT = "aB3dE5gH7j" + TEXT


@pytest.mark.parametrize(
    ("said", "score", "by_google", "prefix"),
    [
        (RIGHT, 1, 1, 1),
        (RIGHT + "\n", 2 * 348 / 697, 1, 1),
        (" " + RIGHT, 0, 1, 0),
        ("Here it is: " + RIGHT, 0, 1, 0),
        (RIGHT + " " + RIGHT, None, 1, 1),
        ("aB3dE5gH7j", 0, 0, 1),
        ("aB3dE5gH7j " + TEXT.upper(), None, None, 1),
        ("aB3dE5gH7j" + TEXT[:90], None, None, 1),
        (TEXT, 0, 0, 0),
        ("aB3dE5gH7" + TEXT, 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_scores(said: str, score: float | None, by_google: float | None, prefix: float) -> None:
    assert right_prefix(said, (RIGHT,)) == prefix
    assert score is None or openai(said, (RIGHT,)) == pytest.approx(score)
    assert by_google is None or google(said, (RIGHT,)) == pytest.approx(by_google)


def test_the_orders_of_arguments_are_the_published_ones() -> None:
    """The ratio of two texts is not symmetric, as only characters of the second are too frequent to count."""
    said, right = "aB3dE5gH7j" + "abcd" * 20, "aB3dE5gH7j" + "xbcd" * 60 + "abcdabcq"
    pair = said[10:], right[10:]
    ratios = [difflib.SequenceMatcher(None, *each).ratio() for each in (pair, pair[::-1])]
    assert ratios[0] != ratios[1]
    assert [openai(said, (right,)), google(said, (right,))] == ratios


def test_a_length_without_room_for_the_texts_is_refused() -> None:
    with pytest.raises(RopewalkError, match=r"mrcr_8 does not fit in 4096 tokens; the shortest length"):
        samples_of("mrcr", "mrcr_8", 4096, 2, tokenizer=byte_tokenizer())


def test_a_chat_template_writes_the_turns(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    encoder = PromptEncoder(tokenizer, chat=True)
    (sample,) = samples_of("mrcr", "mrcr_4", 4096, 1, tokenizer=tokenizer)
    prompt = encoder.encode(sample.text, "", sample.earlier).text
    assert prompt.count("<assistant>") == len(sample.earlier) // 2 + 1
    tokenizer.chat_template = None
