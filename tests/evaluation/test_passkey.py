"""Passkey: the prompt is the published one, fills its length, and the score is what the answers deserve."""

import re
from typing import Any

import pytest

from evaluation_cases import (
    AnsweringModel,
    byte_tokenizer,
    knows,
    knows_every_second,
    said_key,
    says_nothing,
    word_tokenizer,
)
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.passkey import is_right, passkey, passkey_samples

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@pytest.mark.parametrize(
    ("answer", "score", "interval"),
    [
        # Wilson's intervals of 20, 0 and 10 out of 20, as any statistics package prints them.
        (knows, 1.0, (0.8389, 1.0)),
        (says_nothing, 0.0, (0.0, 0.1611)),
        (knows_every_second, 0.5, (0.2993, 0.7007)),
    ],
)
def test_score_is_what_the_answers_deserve(answer: Any, score: float, interval: tuple[float, float]) -> None:
    tokenizer = word_tokenizer()
    calls: list[tuple[int, int]] = []
    model = AnsweringModel(tokenizer, answer).train()
    results = passkey(model, tokenizer, [256, 512], 20, 0, progress=lambda *call: calls.append(call))
    assert [result.length for result in results] == [256, 512]
    for result in results:
        assert result.score == score
        assert result.ci95 == pytest.approx(interval, abs=5e-5)
        assert len(result.records) == 20
    assert calls == [(done, 40) for done in range(1, 41)]
    assert model.training


def test_prediction_is_the_new_tokens_alone() -> None:
    tokenizer = word_tokenizer()
    model = AnsweringModel(tokenizer, lambda prompt, number: " green")
    (result,) = passkey(model, tokenizer, [256], 2, 0)
    # The prompt holds the key; none of it may reach the score.
    assert [(record.prediction, record.correct) for record in result.records] == [(" green", False)] * 2
    record = result.records[0]
    assert record.prompt_tokens == len(model.prompts[0])
    assert record.bos_count == 1
    assert str(record.key) == said_key(tokenizer.decode(model.prompts[0]))


def test_answer_is_cut_at_ten_tokens() -> None:
    tokenizer = byte_tokenizer()
    model = AnsweringModel(tokenizer, lambda prompt, number: "0" * 8 + said_key(prompt).zfill(5))
    (result,) = passkey(model, tokenizer, [512], 3, 0)
    assert [len(record.prediction) for record in result.records] == [10] * 3
    assert result.score == 0


def test_prompt_is_the_published_one() -> None:
    for sample in passkey_samples(word_tokenizer(), 512, 8, 0):
        first, before, needle, after, question = sample.prompt.text.split("\n")
        assert first == (
            "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
            "I will quiz you about the important information there."
        )
        assert needle == f"The pass key is {sample.key}. Remember it. {sample.key} is the pass key."
        assert question == "What is the pass key? The pass key is"
        assert 1 <= sample.key <= 50_000
        for noise in (before, after):
            assert " ".join([NOISE] * 100).startswith(noise)
        words = [len(noise.split()) for noise in (before, after)]
        # The depth counts sentences, of three to four words.
        assert sample.depth == pytest.approx(words[0] / sum(words), abs=0.02)


# A prompt in single bytes takes more than 300 tokens without any noise.
@pytest.mark.parametrize(
    ("make", "length"),
    [
        *((word_tokenizer, length) for length in (256, 300, 512, 777, 4096)),
        *((byte_tokenizer, length) for length in (400, 512, 777, 4096)),
    ],
)
def test_prompts_fill_their_length_and_never_pass_it(make: Any, length: int) -> None:
    tokenizer = make()
    for depths in ("uniform", "even"):
        for sample in passkey_samples(tokenizer, length, 5, 1, depths):
            assert len(sample.prompt.input_ids) == len(tokenizer(sample.prompt.text)["input_ids"]) + 1
            assert 0.95 * length < len(sample.prompt.input_ids) + 10 <= length
            assert sample.fill == (len(sample.prompt.input_ids) + 10) / length


def test_noise_ends_with_a_sentence_where_the_length_allows_it() -> None:
    for sample in passkey_samples(word_tokenizer(), 512, 4, 0):
        lines = sample.prompt.text.split("\n")
        assert all(noise.endswith(".") for noise in (lines[1], lines[3]))


def test_shortest_length_is_named_and_possible() -> None:
    tokenizer = word_tokenizer()
    with pytest.raises(RopewalkError, match=r"does not fit in 20 tokens; the shortest .* is \d+") as caught:
        passkey_samples(tokenizer, 20, 6, 3)
    shortest = int(re.findall(r"\d+", str(caught.value))[-1])
    # Draws differ by length, and so may a digit of the keys.
    assert len(list(passkey_samples(tokenizer, shortest + 8, 6, 3))) == 6
    with pytest.raises(RopewalkError, match="shortest"):
        passkey_samples(tokenizer, shortest - 8, 6, 3)


def test_all_lengths_are_checked_before_the_model_is_asked() -> None:
    model = AnsweringModel(word_tokenizer(), knows)
    with pytest.raises(RopewalkError, match="does not fit in 20 tokens"):
        passkey(model, model.tokenizer, [512, 20], 2, 0)
    assert not model.prompts


def test_sample_depends_on_seed_length_and_number_alone() -> None:
    tokenizer = word_tokenizer()
    many = list(passkey_samples(tokenizer, 300, 6, 0))
    assert list(passkey_samples(tokenizer, 300, 3, 0)) == many[:3]
    assert len({sample.key for sample in many}) == 6
    assert [s.key for s in passkey_samples(tokenizer, 300, 6, 1)] != [s.key for s in many]
    assert [s.key for s in passkey_samples(tokenizer, 301, 6, 0)] != [s.key for s in many]


def test_depths_are_uniform_or_even() -> None:
    tokenizer = word_tokenizer()
    even = [sample.depth for sample in passkey_samples(tokenizer, 2048, 5, 0, "even")]
    # The prompt has some 430 sentences; a depth is realised to half of one.
    assert even == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.005)
    assert [s.depth for s in passkey_samples(tokenizer, 2048, 1, 0, "even")] == pytest.approx(
        [0.5], abs=0.005
    )
    uniform = [sample.depth for sample in passkey_samples(tokenizer, 1024, 200, 0)]
    # The mean of 200 uniform depths has standard deviation 1 / sqrt(12 · 200).
    assert sum(uniform) / 200 == pytest.approx(0.5, abs=4 / (12 * 200) ** 0.5)
    assert min(uniform) < 0.1
    assert max(uniform) > 0.9
    with pytest.raises(RopewalkError, match="unknown depths 'deep'; choose one of uniform, even"):
        passkey_samples(tokenizer, 512, 2, 0, "deep")  # type: ignore[arg-type]
    with pytest.raises(RopewalkError, match="1 or more, got 0"):
        passkey_samples(tokenizer, 512, 0, 0)


def test_prompts_of_a_tokenizer_without_bos_have_none() -> None:
    tokenizer = word_tokenizer(bos=None)
    (result,) = passkey(AnsweringModel(tokenizer, knows), tokenizer, [300], 2, 0)
    assert result.score == 1
    assert [record.bos_count for record in result.records] == [0, 0]


@pytest.mark.parametrize(
    ("prediction", "right"),
    [
        (" 123", True),
        ("is 123. 456", True),
        ("0123", True),
        ("123abc", True),
        ("1234", False),
        ("456, not 123", False),
        ("one hundred", False),
        ("", False),
        ("１２３", False),
    ],
)
def test_the_first_integer_counts(prediction: str, right: bool) -> None:
    assert is_right(prediction, 123) is right
