"""Prompts as token ids, counted and never truncated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError

FIRST_PROBE = 16
"""Units of the first trial, from which the tokens of a unit are estimated."""


@dataclass(frozen=True)
class Prompt:
    """What the model reads.

    Attributes:
        text: without special tokens.
        input_ids: token ids, BOS in front where the tokenizer has one.
        bos_count: BOS tokens in ``input_ids``: 1, or 0 where the tokenizer has none.
    """

    text: str
    input_ids: tuple[int, ...]
    bos_count: int


def encode_prompt(tokenizer: Any, text: str) -> Prompt:
    """Token ids of a text with one BOS in front, whatever the tokenizer's own template would add."""
    ids = tokenizer(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is not None:
        ids = [bos, *ids]
    return Prompt(text, tuple(ids), 0 if bos is None else sum(each == bos for each in ids))


def largest_that_fits(tokens_of: Callable[[int], int], budget: int) -> int:
    """The largest number of units whose prompt has at most ``budget`` tokens.

    Tokens of units nearly add up, so the next trial is where a line through what is known meets the budget;
    every third trial halves the bracket, so that no tokenizer makes it slow.

    Args:
        tokens_of: tokens of the prompt with so many units; nearly linear, and tried a few times only.
        budget: tokens.

    Raises:
        RopewalkError: if the prompt without units is longer than the budget.
    """
    low, tokens_low = 0, tokens_of(0)
    if tokens_low > budget:
        raise RopewalkError(f"the shortest prompt has {tokens_low} tokens, more than {budget}")
    # Some tokenizers join words to one token, none joins four.
    high = 4 * budget + FIRST_PROBE
    candidate, tokens_high, trials = FIRST_PROBE, 0, 0
    while high - low > 1:
        trials += 1
        tokens = tokens_of(candidate)
        if tokens <= budget:
            slope = (tokens - tokens_low) / (candidate - low)
            low, tokens_low = candidate, tokens
        else:
            high, tokens_high = candidate, tokens
            slope = (tokens_high - tokens_low) / (high - low)
        candidate = low + int((budget - tokens_low) / slope) if slope > 0 else high
        if trials % 3 == 0 and tokens_high:
            candidate = (low + high) // 2
        candidate = min(max(candidate, low + 1), high - 1)
    return low
