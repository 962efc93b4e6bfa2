"""Passkey: the prompt is the published one, fills its length, and is judged by the first integer."""

import re
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.passkey import PasskeyTask
from ropewalk.evaluation.tasks.registry import METRICS
from tests.evaluation.evaluation_cases import byte_tokenizer, word_tokenizer
from tests.evaluation.ruler_cases import demo_tokenizer, metaspace_tokenizer

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def made(
    length: int, count: int, seed: int = 0, task: PasskeyTask | None = None, tokenizer: Any = None
) -> list[Sample]:
    encoder = PromptEncoder(tokenizer or word_tokenizer())
    return list((task or PasskeyTask()).samples(encoder, length, count, seed))


def test_prompt_is_the_published_one() -> None:
    for sample in made(512, 8):
        first, before, needle, after, question = sample.text.split("\n")
        (key,) = sample.references
        assert first == (
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
            "I will quiz you about the important information there."
        )
        assert needle == f"The pass key is {key}. Remember it. {key} is the pass key."
        assert question == "What is the pass key? The pass key is"
        assert 1 <= int(key) <= 50_000
        for noise in (before, after):
            assert " ".join([NOISE] * 100).startswith(noise)
        words = [len(noise.split()) for noise in (before, after)]
        # The depth counts sentences, of three to four words.
        assert sample.details["depth"] == pytest.approx(words[0] / sum(words), abs=0.02)
        assert (sample.suite, sample.task, sample.metric) == ("passkey", "passkey", "first integer")
        assert (sample.answer_prefix, sample.max_new_tokens) == ("", 10)


# A prompt in single bytes takes more than 300 tokens without any noise.
@pytest.mark.parametrize(
    ("make", "length"),
    [
        *((word_tokenizer, length) for length in (256, 300, 512, 777, 4096)),
        *((byte_tokenizer, length) for length in (400, 512, 777, 2048, 4096)),
        *((demo_tokenizer, length) for length in (400, 2048, 4096)),
        *((metaspace_tokenizer, length) for length in (400, 2048, 4096)),
    ],
)
def test_prompts_fill_their_length_and_never_pass_it(make: Any, length: int) -> None:
    tokenizer = make()
    for depths in ("uniform", "even"):
        for sample in made(length, 5, 1, PasskeyTask(depths), tokenizer):
            ids = tokenizer(sample.text, add_special_tokens=False)["input_ids"]
            assert sample.prompt_tokens == len(ids) + 1
            assert 0.95 * length < sample.prompt_tokens + 10 <= length
            assert sample.fill == (sample.prompt_tokens + 10) / length
            assert sample.bos_count == 1


def test_noise_ends_with_a_sentence_where_the_length_allows_it() -> None:
    for sample in made(512, 4):
        lines = sample.text.split("\n")
        assert all(noise.endswith(".") for noise in (lines[1], lines[3]))


def test_shortest_length_is_named_and_possible() -> None:
    with pytest.raises(
        RopewalkError, match=r"passkey does not fit in 20 tokens; the shortest .* is \d+"
    ) as caught:
        PasskeyTask().samples(PromptEncoder(word_tokenizer()), 20, 6, 3)
    shortest = int(re.findall(r"\d+", str(caught.value))[-1])
    assert len(made(shortest, 6, 3)) == 6
    with pytest.raises(RopewalkError, match="shortest"):
        made(shortest - 1, 6, 3)


def test_sample_depends_on_seed_length_and_number_alone() -> None:
    many = made(300, 6)
    assert made(300, 3) == many[:3]
    keys = [sample.references for sample in many]
    assert len(set(keys)) == 6
    assert [s.references for s in made(300, 6, 1)] != keys
    assert [s.references for s in made(301, 6)] != keys
    assert [s.index for s in many] == list(range(6))
    # In this length noise is fitted to the word, one sample at a time.
    words = made(400, 5, 0, None, byte_tokenizer())
    assert made(400, 2, 0, None, byte_tokenizer()) == words[:2]
    assert [s.index for s in words] == list(range(5))


def test_depths_are_uniform_or_even() -> None:
    even = [sample.details["depth"] for sample in made(2048, 5, 0, PasskeyTask("even"))]
    # The prompt has some 430 sentences; a depth is realised to half of one.
    assert even == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.005)
    (middle,) = made(2048, 1, 0, PasskeyTask("even"))
    assert middle.details["depth"] == pytest.approx(0.5, abs=0.005)
    uniform = [sample.details["depth"] for sample in made(1024, 200)]
    # The mean of 200 uniform depths has standard deviation 1 / sqrt(12 * 200).
    assert sum(uniform) / 200 == pytest.approx(0.5, abs=4 / (12 * 200) ** 0.5)
    assert min(uniform) < 0.1
    assert max(uniform) > 0.9


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(RopewalkError, match="unknown depths 'deep'; choose from uniform, even"):
        PasskeyTask("deep")  # type: ignore[arg-type]
    with pytest.raises(RopewalkError, match="1 or more, got 0"):
        made(512, 0)


def test_settings_tell_tasks_apart() -> None:
    assert PasskeyTask().settings() != PasskeyTask("even").settings()
    assert PasskeyTask().unavailable() is None


def test_prompts_of_a_tokenizer_without_bos_have_none() -> None:
    assert [sample.bos_count for sample in made(300, 2, 0, None, word_tokenizer(bos=None))] == [0, 0]


def test_the_first_integer_counts() -> None:
    (sample,) = made(512, 1)
    judge = METRICS[sample.metric]
    (key,) = sample.references
    for answer, score in ((f" {key}. 99", 1), (f" 99, {key}", 0), ("", 0), (f" 0{key}", 1), (f" {key}7", 0)):
        assert judge(answer, sample.references) == score
