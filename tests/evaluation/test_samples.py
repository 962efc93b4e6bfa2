"""Prompts fill a length and never exceed it, whatever a unit is in tokens."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import samples as fitting
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import (
    Draft,
    Drafts,
    Form,
    LengthTooShort,
    Sample,
    fitted_samples,
    grouped_samples,
    prompt_digest,
    sample_random,
)
from tests.evaluation.core_cases import CHAT, byte_tokenizer, through_json

# What the project's page promises; not taken from the code, which must keep it.
LEAST_FILL = 0.95
FORM = Form("ruler", "made", "all", 10)
ENCODER = PromptEncoder(byte_tokenizer())
MERGING = PromptEncoder(byte_tokenizer(merges=("aa", "bb", "aaaa", "bbbb")))


class Asked(AssertionError):
    """A search that goes on beyond any reason."""


def counted(drafts: Callable[[int, int], Draft], most: int = 4000) -> Callable[[int, int], Draft]:
    """The same drafts; a search that does not end fails in place of hanging."""
    numbers = itertools.count()

    def draft(index: int, units: int) -> Draft:
        if next(numbers) > most:
            raise Asked(f"more than {most} drafts, of {units} units in the end")
        return drafts(index, units)

    return draft


def at_any_length(drafts: Drafts) -> Callable[[int], Drafts]:
    """Drafts that do not depend on the length."""
    return lambda length: drafts


def of_words(words: Sequence[Sequence[str]]) -> Callable[[int, int], Draft]:
    """Prompts that repeat the index' own words."""

    def draft(index: int, units: int) -> Draft:
        own = words[index % len(words)]
        body = "".join(itertools.islice(itertools.cycle(own), units))
        return Draft(f"{index}:{body}?", " It is", (str(index),), {"units": units})

    return draft


words = st.lists(
    st.lists(st.text("ab ", min_size=1, max_size=9), min_size=1, max_size=4), min_size=1, max_size=4
)


@settings(max_examples=60)
@given(words, st.integers(20, 900), st.integers(1, 7), st.sampled_from([ENCODER, MERGING]))
def test_prompts_are_never_too_long_and_as_full_as_their_units_allow(
    words: list[list[str]], room: int, count: int, encoder: PromptEncoder
) -> None:
    drafts = of_words(words)
    shortest = max(encoder.count(*parts(drafts(index, 0))) for index in range(count)) + FORM.max_new_tokens
    length = shortest + room
    samples = list(fitted_samples(FORM, encoder, length, count, at_any_length(counted(drafts))))
    assert [sample.index for sample in samples] == list(range(count))
    largest_unit = max(len(word) for own in words for word in own)
    for sample in samples:
        prompt = encoder.encode(sample.text, sample.answer_prefix)
        assert (sample.prompt_tokens, sample.bos_count) == (len(prompt.input_ids), prompt.bos_count)
        assert sample.prompt_tokens + FORM.max_new_tokens <= length
        left = length - FORM.max_new_tokens - sample.prompt_tokens
        next_one = drafts(sample.index, sample.details["units"] + 1)
        is_full = left <= (1 - LEAST_FILL) * length or left < largest_unit
        assert is_full or encoder.count(*parts(next_one)) > length - FORM.max_new_tokens
        assert sample.text == drafts(sample.index, sample.details["units"]).text


def parts(draft: Draft) -> tuple[str, str]:
    return draft.text, draft.answer_prefix


def test_samples_hold_what_their_drafts_and_their_form_say() -> None:
    def draft(index: int, units: int) -> Draft:
        return Draft("x" * units, " so", ("a", "b"), {"units": units, "index": index})

    (sample,) = fitted_samples(FORM, ENCODER, 50, 1, at_any_length(draft), fewest=2)
    units = sample.details["units"]
    # BOS, the letters, and 3 of the prefix.
    assert sample == Sample(
        "ruler",
        "made",
        50,
        0,
        "x" * units,
        " so",
        ("a", "b"),
        "all",
        10,
        1 + units + 3,
        1,
        {"units": units, "index": 0},
    )
    assert sample.fill == (units + 14) / 50


def test_small_units_fill_every_length() -> None:
    for length in (12, 13, 50, 200, 4096):
        for sample in fitted_samples(
            FORM, ENCODER, length, 3, at_any_length(lambda index, units: Draft("x" * units, "", ()))
        ):
            assert LEAST_FILL <= sample.fill <= 1


@settings(max_examples=30)
@given(words, st.integers(60, 500), st.integers(2, 9), st.integers(1, 3))
def test_a_sample_depends_on_its_index_alone(
    words: list[list[str]], length: int, count: int, batch: int
) -> None:
    """Not on how many there are, nor on which are counted together."""
    drafts = of_words(words)
    whole = list(fitted_samples(FORM, MERGING, length, count, at_any_length(drafts)))
    assert whole == list(fitted_samples(FORM, MERGING, length, count, at_any_length(drafts)))
    assert whole[:2] == list(fitted_samples(FORM, MERGING, length, 2, at_any_length(drafts)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "MOST_IN_BATCH", batch)
        assert whole == list(fitted_samples(FORM, MERGING, length, count, at_any_length(drafts)))


def test_samples_are_made_while_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "MOST_IN_BATCH", 2)
    seen: list[int] = []

    def draft(index: int, units: int) -> Draft:
        if units:
            seen.append(index)
        return Draft("x" * units, "", ())

    stream = fitted_samples(FORM, ENCODER, 64, 6, at_any_length(draft))
    assert seen == []
    assert next(stream).index == 0
    assert max(seen) == 1
    assert len(list(stream)) == 5


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(10, 150), st.integers(1, 4))
def test_wild_tokens_end_and_fit(seed: int, length: int, count: int) -> None:
    """Units that add tokens, take some away, or add thousands; the shortest prompt fits."""

    def draft(index: int, units: int) -> Draft:
        tokens = 0 if units == 0 else random.Random(f"{seed}/{index}/{units}").randint(0, 3 * length)
        return Draft("x" * tokens, "", ())

    form = Form("ruler", "wild", "all", 5)
    for sample in fitted_samples(form, ENCODER, length, count, at_any_length(counted(draft))):
        assert sample.prompt_tokens + 5 <= length


@pytest.mark.parametrize("saturated", [0, 1, 20])
@pytest.mark.parametrize("count", [1, 2])
def test_units_that_run_out_end_with_a_shorter_prompt(saturated: int, count: int) -> None:
    """A collection of so many documents has no more of them, however many are asked for."""
    samples = list(
        fitted_samples(
            FORM,
            ENCODER,
            300,
            count,
            at_any_length(counted(lambda index, units: Draft("x" * min(units, saturated), "", ()))),
        )
    )
    assert [sample.prompt_tokens for sample in samples] == [1 + saturated] * count


def test_units_that_run_out_in_another_sample_end_with_a_shorter_prompt() -> None:
    def draft(index: int, units: int) -> Draft:
        return Draft("x" * (units if index == 0 else min(units, 20)), "", ())

    first, second = fitted_samples(FORM, ENCODER, 300, 2, at_any_length(counted(draft)))
    assert first.fill >= LEAST_FILL
    assert second.prompt_tokens == 21


@pytest.mark.parametrize(("first", "second"), [(1, 10), (10, 1), (1, 3), (3, 1)])
def test_units_that_differ_between_samples_are_found_in_few_trials(first: int, second: int) -> None:
    """Not one unit after another: four thousand of them are searched in halves or better."""

    def draft(index: int, units: int) -> Draft:
        return Draft("x" * (units * (first if index == 0 else second)), "", ())

    numbers = 5 * (4096).bit_length()
    samples = list(fitted_samples(FORM, ENCODER, 4096, 2, at_any_length(counted(draft, numbers))))
    assert all(sample.fill >= LEAST_FILL for sample in samples)


def test_length_that_is_too_short_names_the_shortest_that_is_not() -> None:
    drafts = of_words([["ab "], ["a much longer unit "]])
    with pytest.raises(LengthTooShort) as caught:
        fitted_samples(FORM, ENCODER, 20, 4, at_any_length(drafts), fewest=2)
    error = caught.value
    assert str(error) == (
        "the task made does not fit in 20 tokens; the shortest length with this tokenizer is "
        f"{error.shortest}"
    )
    assert error.task == "made"
    assert len(list(fitted_samples(FORM, ENCODER, error.shortest, 4, at_any_length(drafts), fewest=2))) == 4
    with pytest.raises(LengthTooShort):
        fitted_samples(FORM, ENCODER, error.shortest - 1, 4, at_any_length(drafts), fewest=2)


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(-30, 30), st.integers(1, 200), st.integers(20, 300))
def test_shortest_length_is_right_also_where_prompts_change_with_it(
    short: int, more: int, edge: int, length: int
) -> None:
    """Above an edge the fixed part of a prompt is another: longer, or shorter."""

    def drafts_at(length: int) -> Callable[[int, int], Draft]:
        fixed = short if length < edge else max(short + more, 0)
        return lambda index, units: Draft("x" * (fixed + index + units), "", ())

    def made(length: int) -> list[Sample]:
        return list(fitted_samples(FORM, ENCODER, length, 2, drafts_at, 1))

    refused = None
    try:
        samples = made(length)
    except LengthTooShort as error:
        refused = error.shortest
    if refused is None:
        assert all(sample.prompt_tokens + 10 <= length for sample in samples)
    else:
        assert len(made(refused)) == 2
        with pytest.raises(LengthTooShort):
            made(refused - 1)


def test_fewest_units_are_always_there() -> None:
    for fewest in (0, 1, 7):
        for length in (40, 300):
            for sample in fitted_samples(
                FORM, ENCODER, length, 3, at_any_length(of_words([["ab"], ["c"]])), fewest=fewest
            ):
                assert sample.details["units"] >= fewest


@pytest.mark.parametrize("count", [0, -3])
def test_no_samples_are_refused_at_once(count: int) -> None:
    with pytest.raises(RopewalkError, match=f"must be 1 or more, got {count}"):
        fitted_samples(FORM, ENCODER, 100, count, at_any_length(of_words([["a"]])))


def test_chat_prompts_count_their_template() -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=CHAT), chat=True)
    (sample,) = fitted_samples(
        FORM, encoder, 200, 1, at_any_length(lambda index, units: Draft("x" * units, " It", ()))
    )
    prompt = encoder.encode(sample.text, sample.answer_prefix)
    assert sample.prompt_tokens == len(prompt.input_ids)
    assert sample.bos_count == 1
    assert LEAST_FILL <= sample.fill <= 1


def test_a_prompt_is_tokenised_about_once_a_sample() -> None:
    """What makes the generation fast: of the tokens counted, nine in ten are those of the samples.

    Fixed parts that are a few tokens longer than the first sample's do not change that.
    """
    read: list[int] = []

    class Counting(PromptEncoder):
        def counts(self, pieces: Sequence[tuple[str, str]]) -> list[int]:
            found = super().counts(pieces)
            read.extend(found)
            return found

    def draft(index: int, units: int) -> Draft:
        return Draft(str(index**3) + "ab " * units, "", ())

    samples = list(fitted_samples(FORM, Counting(byte_tokenizer()), 4096, 200, at_any_length(draft)))
    assert sum(sample.prompt_tokens for sample in samples) > 0.9 * sum(read)


def test_random_numbers_are_the_same_everywhere_and_another_for_each_sample() -> None:
    """Golden numbers: an answer that is scored again must be to the same question."""
    assert sample_random(0, "niah", 4096, 0).randrange(10**6) == 553_513
    drawn = {
        sample_random(*each).random()
        for each in itertools.product((0, 1, 11), ("niah", "vt"), (4096, 14096), (0, 1, 10))
    }
    assert len(drawn) == 36


@pytest.mark.parametrize("least", [0.95, 0.99])
def test_a_task_says_how_full_its_prompts_are(least: float) -> None:
    def drafts(index: int, units: int) -> Draft:
        return Draft("a" * (units * (5 + index % 4)), "", ("a",))

    form = Form("ruler", "made", "all", 10, least)
    fills = [each.fill for each in fitted_samples(form, ENCODER, 2000, 20, at_any_length(drafts))]
    assert least <= min(fills)
    assert max(fills) <= 1


def test_a_sample_with_earlier_turns_survives_json_and_has_a_digest_of_its_own() -> None:
    def drafts(index: int, units: int) -> Draft:
        return Draft("a" * units, "b", ("a",), {"spans": [[0, 1]]}, (("user", "a"), ("assistant", "b")))

    (sample,) = fitted_samples(FORM, ENCODER, 100, 1, at_any_length(drafts))
    assert Sample.from_json(through_json(sample.to_json())) == sample
    # The turn's border moves, the characters stay.
    moved = replace(sample, earlier=(("user", ""), ("assistant", "ab")))
    assert len({prompt_digest(each) for each in (sample, moved, replace(sample, earlier=()))}) == 3
    assert sample.whole.startswith("User: a\nAssistant: b\nUser: aaaa")
    assert sample.whole.endswith("\nAssistant: b")


# With this tokenizer, the question with the most characters has 5 tokens, and the other 14.
QUESTIONS = ("aaaa" * 5, "xyxyxyxyxyxyxy")


@pytest.mark.parametrize("group", [2, 4])
def test_questions_about_a_text_fit_whichever_has_most_tokens(group: int) -> None:
    def drafts(index: int, units: int) -> Draft:
        return Draft("x" * units + "." + QUESTIONS[index % 2], "", ("",))

    made = list(grouped_samples(FORM, MERGING, 60, 6, group, lambda length: drafts))
    assert [sample.index for sample in made] == list(range(6))
    texts = [sample.text.partition(".")[0] for sample in made]
    assert [text == texts[0] for text in texts] == [True] * 6
    assert max(sample.fill for sample in made) == 1
    # Where only the fewest units fit, tokens decide too.
    shortest = 10 + len(".") + 14 + 1
    with pytest.raises(LengthTooShort, match=f"shortest length with this tokenizer is {shortest}"):
        grouped_samples(FORM, MERGING, shortest - 1, 6, group, lambda length: drafts)
    least = grouped_samples(FORM, MERGING, shortest, 6, group, lambda length: drafts)
    assert [sample.text for sample in least] == [f".{QUESTIONS[index % 2]}" for index in range(6)]


def of_lines(length: int) -> Drafts:
    """Questions, two about a text of random lines, each line about a twentieth of 1,000 tokens."""

    def draft(index: int, units: int) -> Draft:
        draw = sample_random(0, "lines", length, index // 2)
        lines = [draw.choice("abc") * draw.randint(30, 70) for _ in range(units)]
        return Draft(
            "\n".join(lines) + "?" * (1 + index % 2), "", ("",), {"context": index // 2, "of": index % 2}
        )

    return draft


def test_a_sample_that_is_not_full_is_drawn_again() -> None:
    def made(count: int, draws: int) -> list[Sample]:
        form = Form("ruler", "made", "all", 10, 0.99, draws)
        return list(fitted_samples(form, ENCODER, 1000, count, of_lines))

    once, often = made(30, 1), made(30, 16)
    assert min(sample.fill for sample in once) < 0.99 <= min(sample.fill for sample in often)
    assert [sample.index for sample in often] == list(range(30))
    # Those that were full are the same, and the others do not depend on how many are made.
    assert [a for a, b in zip(once, often, strict=True) if a.fill >= 0.99] == [
        b for a, b in zip(once, often, strict=True) if a.fill >= 0.99
    ]
    assert made(7, 16) == often[:7]
    # The fullest of few draws, whichever it is.
    fills = [[sample.fill for sample in made(30, draws)] for draws in (1, 2, 3, 4)]
    assert all(list(each) == sorted(each) for each in zip(*fills, strict=True))


def test_questions_about_a_text_are_drawn_again_together() -> None:
    form = Form("ruler", "made", "all", 10, 0.99, 16)
    made = list(grouped_samples(form, ENCODER, 1000, 19, 2, of_lines))
    assert min(sample.fill for sample in made) >= 0.99
    assert [sample.index for sample in made] == list(range(19))
    assert [sample.details for sample in made] == [{"context": i // 2, "of": i % 2} for i in range(19)]
    texts = [sample.text.rstrip("?") for sample in made]
    assert texts[::2][:9] == texts[1::2]
    assert len(set(texts)) == 10


def test_a_draw_that_does_not_fit_is_left_out() -> None:
    def drafts(index: int, units: int) -> Draft:
        return Draft("a" * (10 if index < 4 else 1000) + "b" * min(units, 5), "", ("",))

    form = Form("ruler", "made", "all", 10, 0.99, 16)
    made = list(fitted_samples(form, ENCODER, 100, 4, at_any_length(drafts)))
    assert [sample.text for sample in made] == ["a" * 10 + "b" * 5] * 4
