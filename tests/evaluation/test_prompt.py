"""Prompts have one BOS, and the largest prompt that fits is found with few trials."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evaluation_cases import byte_tokenizer
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import encode_prompt, largest_that_fits


@pytest.mark.parametrize("template", [False, True])
def test_bos_stands_once_in_front(template: bool) -> None:
    tokenizer = byte_tokenizer(template=template)
    prompt = encode_prompt(tokenizer, "ab c")
    assert prompt.bos_count == prompt.input_ids.count(tokenizer.bos_token_id) == 1
    assert prompt.input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(prompt.input_ids[1:]) == prompt.text == "ab c"


def test_no_bos_where_the_tokenizer_has_none() -> None:
    prompt = encode_prompt(byte_tokenizer(bos=None), "ab c")
    assert prompt.bos_count == 0
    assert len(prompt.input_ids) == 4


@given(
    st.integers(0, 50),
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(0, 3000),
)
def test_largest_that_fits_is_what_counting_up_finds(base: int, cycle: list[int], room: int) -> None:
    def tokens_of(count: int) -> int:
        whole, rest = divmod(count, len(cycle))
        return base + whole * sum(cycle) + sum(cycle[:rest])

    budget = base + room
    expected = 0
    while tokens_of(expected + 1) <= budget:
        expected += 1
    assert largest_that_fits(tokens_of, budget) == expected


def test_long_prompts_need_few_trials() -> None:
    trials: list[int] = []

    def tokens_of(count: int) -> int:
        trials.append(count)
        return 60 + 4 * count + count // 3 + count % 7

    found = largest_that_fits(tokens_of, 131_062)
    assert tokens_of(found) <= 131_062 < tokens_of(found + 1)
    # The first trials give the slope; the count is known to within its wobble, and then bracketed.
    assert len(trials) <= 12


def test_prompt_that_never_fits_and_units_without_tokens_end() -> None:
    with pytest.raises(RopewalkError, match="has 9 tokens, more than 8"):
        largest_that_fits(lambda count: 9 + count, 8)
    assert largest_that_fits(lambda count: 5, 8) > 8
