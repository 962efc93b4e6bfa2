"""Prompts as token ids, counted and never truncated."""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError

FIRST_PROBE = 16
"""Units of the first trial, from which the tokens of a unit are estimated."""

DATE = "26 Jul 2024"
"""Llama 3's templates write today's date, and would make other prompts tomorrow; this is their own default."""

ALPHABET = string.ascii_letters + string.digits + " .,:;?!'()<>_=-"
"""Characters of the benchmarks' templates, keys and values."""


@dataclass(frozen=True)
class Prompt:
    """What the model reads.

    Attributes:
        text: with special tokens only where a chat template writes them.
        input_ids: token ids, BOS in front where the tokenizer has one.
        bos_count: BOS tokens in ``input_ids``: 1, or 0 where the tokenizer has none.
    """

    text: str
    input_ids: tuple[int, ...]
    bos_count: int


class PromptEncoder:
    """From a task's text to token ids, for base models and for chat models.

    A base model reads BOS, the text, and the beginning of the answer. A chat model reads its own template
    around the text, and the beginning of the answer opens the assistant's turn.

    Args:
        tokenizer: the model's own, with a ``tokenizers`` backend.
        chat: use the tokenizer's chat template.

    Raises:
        RopewalkError: if a chat template is asked for and there is none.
    """

    def __init__(self, tokenizer: Any, chat: bool = False) -> None:
        if chat and not tokenizer.chat_template:
            raise RopewalkError("the tokenizer has no chat template; leave --chat out, or use a chat model")
        self.tokenizer = tokenizer
        self.chat = chat
        self._plain: Any = None

    def encode(self, text: str, answer_prefix: str = "") -> Prompt:
        """The whole prompt, with one BOS where the tokenizer has one (a chat template brings its own)."""
        rendered = self._rendered(text, answer_prefix)
        ids = self.tokenizer(rendered, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        if bos is not None and not self.chat:
            ids = [bos, *ids]
        return Prompt(rendered, tuple(ids), 0 if bos is None else sum(each == bos for each in ids))

    def counts(self, pieces: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens of the whole prompt for each (text, answer prefix), read on all cores at once."""
        rendered = [self._rendered(text, prefix) for text, prefix in pieces]
        head = 0 if self.chat or self.tokenizer.bos_token_id is None else 1
        with _all_cores():
            found = self.backend().encode_batch_fast(rendered, add_special_tokens=False)
        return [head + len(each) for each in found]

    def count(self, text: str, answer_prefix: str = "") -> int:
        """Tokens of one whole prompt."""
        return self.counts([(text, answer_prefix)])[0]

    def bos_count(self, text: str, answer_prefix: str = "") -> int:
        """BOS tokens of the whole prompt, read off the text: only BOS's own letters become BOS."""
        bos = self.tokenizer.bos_token
        if bos is None:
            return 0
        return self._rendered(text, answer_prefix).count(bos) + (not self.chat)

    def check_alphabet(self) -> None:
        """Raise for a tokenizer that cannot write what the benchmarks' prompts and answers are made of.

        Raises:
            RopewalkError: naming the characters that do not come back from the tokens of a text.
        """
        ids = self.tokenizer(ALPHABET, add_special_tokens=False, verbose=False)["input_ids"]
        back = self.tokenizer.decode([each for each in ids if each != self.tokenizer.unk_token_id])
        missing = "".join(c for c in ALPHABET if c not in back and c.lower() not in back)
        if missing:
            raise RopewalkError(f"the tokenizer has no tokens for {missing!r}, which the prompts are made of")

    def backend(self) -> Any:
        """The tokenizer's backend; a copy of one that was saved to truncate or pad, as some are."""
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is None and backend.padding is None:
            return backend
        if self._plain is None:
            self._plain = type(backend).from_str(backend.to_str())
            self._plain.no_truncation()
            self._plain.no_padding()
        return self._plain

    def _rendered(self, text: str, answer_prefix: str) -> str:
        if not self.chat:
            return text + answer_prefix
        turn = [{"role": "user", "content": text}]
        opened: str = self.tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, tokenize=False, date_string=DATE
        )
        return opened + answer_prefix


@contextmanager
def _all_cores() -> Iterator[None]:
    """The command line keeps tokenizers to one core, because it forks workers for documents."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "true"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


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
