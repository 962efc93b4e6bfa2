"""Encode prompts as token ids and count their tokens; prompts are never truncated."""

from __future__ import annotations

import os
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ropewalk.data.tokens.chat import DATE, chat_template
from ropewalk.data.tokens.render import render
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.protocol import END_OF_THOUGHTS, THOUGHTS
from ropewalk.evaluation.backends.text_counters import TextCounter, joined_turns

Turns = tuple[tuple[str, str], ...]
"""Turns of a chat: the role and the text of each."""

FIRST_PROBE = 16
"""Units of the first trial; its token count gives the first estimate of the tokens per unit."""

ALPHABET = string.ascii_letters + string.digits + " .,:;?!'()<>_=-"
"""Characters that the benchmarks' templates, keys and values contain."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it.

    Attributes:
        text: the prompt; contains special tokens only if a chat template writes them.
        input_ids: token ids, starting with BOS if the tokenizer has one.
        bos_count: number of BOS tokens in ``input_ids``: 1, or 0 if the tokenizer has none.
    """

    text: str
    input_ids: tuple[int, ...]
    bos_count: int


def plain_chat(earlier: Turns, text: str, answer_prefix: str = "") -> str:
    """A prompt without a chat template. Turns before the text are marked as Google's MRCR marks them.

    Args:
        earlier: turns before ``text``; mostly none, and then nothing is marked.
        text: the last turn of the user, or the whole prompt.
        answer_prefix: beginning of the answer.
    """
    if not earlier:
        return text + answer_prefix
    marked = "".join(map(_marked, (*earlier, ("user", text))))
    return f"{marked}Assistant: {answer_prefix}".rstrip(" ")


def _marked(turn: tuple[str, str]) -> str:
    return f"{turn[0].capitalize()}: {turn[1]}\n"


def turn_starts(earlier: Turns, text: str) -> list[tuple[int, str]]:
    """Where each turn begins in :func:`plain_chat`, with its role; empty without earlier turns."""
    if not earlier:
        return []
    turns = (*earlier, ("user", text))
    starts = accumulate((len(_marked(turn)) for turn in turns), initial=0)
    return list(zip(starts, [*(role for role, _ in turns), "assistant"], strict=True))


class PromptEncoder:
    """Encodes the text of a task as token ids, for base models and chat models.

    A base model reads BOS, the text, and the beginning of the answer. Earlier turns stand before the text, see
    :func:`plain_chat`. For a chat model, the chat template wraps
    the text, and the beginning of the answer opens the assistant's turn. A thinking model opens its turn itself, so the
    beginning of the answer ends the user's turn.

    Args:
        tokenizer: the model's tokenizer, with a ``tokenizers`` backend.
        chat: use the tokenizer's chat template.
        system: system prompt before the user's turn; None for none.
        thinking: tokens that a thinking model may spend before its answer; 0 tells the template not to think.
        as_turns: whether a server gets the turns and applies the template itself, which leaves no place for the
            beginning of an answer. A :class:`TextCounter` then needs no chat template: the server's own one counts by
            the tokens that it writes around a text.
        own_variables: whether the server applies the template with variables of the user's, such as
            ``enable_thinking``, so that the template rendered here does not show whether the model thinks.

    Raises:
        RopewalkError: if ``chat`` is true and the tokenizer has no chat template, ``system`` or ``thinking`` is given
            without ``chat``, or the template refuses a system prompt.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat: bool = False,
        system: str | None = None,
        thinking: int = 0,
        as_turns: bool = False,
        own_variables: bool = False,
    ) -> None:
        counted = isinstance(tokenizer, TextCounter)
        if chat and not tokenizer.chat_template and not (counted and as_turns):
            raise RopewalkError(
                "the tokenizer has no chat template; "
                + ("add --endpoint chat" if counted else "remove --chat, or use a chat model")
            )
        for name, value in (("--system-prompt", system), ("--thinking-tokens", thinking)):
            if value and not chat:
                raise RopewalkError(f"{name} works only with a chat template; add --chat")
        self.tokenizer = tokenizer
        self.chat, self.system, self.thinking, self.as_turns = chat, system, thinking, as_turns
        self.own_variables = own_variables
        self._plain: Any = None
        self._template = chat_template(tokenizer) if chat else None
        # The server's template writes tokens around each turn, and no one here knows which.
        self._around = tokenizer.around if counted else 0
        # Rendered once before the work: some templates (Gemma 2's) refuse a system prompt.
        opened = self._template is not None and self._rendered("", "").rstrip().endswith(THOUGHTS)
        # Variables of the user's may turn thinking off, and nobody gives them for that with tokens to think.
        self.thoughts_opened = (opened and not (own_variables and thinking == 0)) if chat else None
        """Whether the prompt ends inside the model's thoughts; None without a chat template, see `answer_in`."""

    def check_thoughts(self, remedy: str) -> None:
        """Raise if the model thinks although it has no tokens for it: every answer would end within its thoughts.

        Args:
            remedy: how to give it tokens, for the message.

        Raises:
            RopewalkError: with the remedy.
        """
        if self.thinking > 0 or not self.chat:
            return
        if self.thoughts_opened:
            raise RopewalkError(
                "the chat template always starts the model's thoughts, and without tokens for them no answer follows; "
                f"{remedy}"
            )
        if self._template and self.as_turns and not self.own_variables and self._thinks_untold():
            raise RopewalkError(
                "with --endpoint chat, the server's chat template lets the model think, and without tokens for its "
                f"thoughts no answer follows; {remedy}, or turn thinking off with --server-extra "
                "'chat_template_kwargs={\"enable_thinking\": false}'"
            )

    def _thinks_untold(self) -> bool:
        """Whether the template lets the model think unless ``enable_thinking`` is false."""
        turns = self.turns("")
        return self._by_template(turns) != self._by_template(turns, enable_thinking=False)

    def encode(self, text: str, answer_prefix: str = "", earlier: Turns = ()) -> Prompt:
        """Encode the whole prompt, with one BOS if the tokenizer has one (a chat template writes its own)."""
        rendered = self._rendered(text, answer_prefix, earlier)
        # BOS is added by hand below: tokenizers disagree on which special tokens they add, and some add EOS.
        ids = self.tokenizer(rendered, add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        if bos is not None and not self.chat:
            ids = [bos, *ids]
        if around := self._around_turns(earlier):
            # They stand for tokens that only the server writes.
            return Prompt(rendered, (*(0,) * around, *ids), 0)
        # Counted and not assumed, because a chat template may write BOS twice or not at all.
        return Prompt(rendered, tuple(ids), 0 if bos is None else sum(each == bos for each in ids))

    def counts(self, pieces: Sequence[tuple[str, str] | tuple[str, str, Turns]]) -> list[int]:
        """Count the tokens of each whole prompt (text, answer prefix, earlier turns), on all cores in parallel."""
        rendered = [self._rendered(*piece) for piece in pieces]
        # Counts must equal the lengths of encode(), which adds BOS by hand except under a chat template.
        bos = 0 if self.chat or self.tokenizer.bos_token_id is None else 1
        heads = [bos + self._around_turns(*piece[2:]) for piece in pieces]
        with _all_cores():
            # The fast variant skips offsets, which take as long as the tokens themselves.
            found = self.backend().encode_batch_fast(rendered, add_special_tokens=False)
        return [head + len(each) for head, each in zip(heads, found, strict=True)]

    def count(self, text: str, answer_prefix: str = "", earlier: Turns = ()) -> int:
        """Count the tokens of one whole prompt."""
        return self.counts([(text, answer_prefix, earlier)])[0]

    def _around_turns(self, earlier: Turns = ()) -> int:
        """Tokens that the server's template writes around the texts of a prompt, where it alone knows them."""
        return self._around * (1 + len(earlier) + (self.chat and self.system is not None))

    def bos_count(self, text: str, answer_prefix: str = "", earlier: Turns = ()) -> int:
        """Count the BOS tokens of the whole prompt by its text: only the literal BOS string becomes a BOS token."""
        bos = self.tokenizer.bos_token
        if bos is None or self._around:
            return 0
        return self._rendered(text, answer_prefix, earlier).count(bos) + (not self.chat)

    def check_alphabet(self) -> None:
        """Check that the tokenizer can represent the characters of the benchmarks' prompts and answers.

        Raises:
            RopewalkError: if encoding and decoding loses characters; the message lists them.
        """
        if getattr(self.tokenizer, "approximate", False):
            return
        ids = self.tokenizer(ALPHABET, add_special_tokens=False, verbose=False)["input_ids"]
        # The text of an unknown token, such as "[UNK]", consists of letters of the alphabet itself.
        back = self.tokenizer.decode([each for each in ids if each != self.tokenizer.unk_token_id])
        # Lower case counts too: uncased tokenizers are usable, because answers are compared in lower case.
        missing = "".join(c for c in ALPHABET if c not in back and c.lower() not in back)
        if missing:
            raise RopewalkError(
                f"the tokenizer has no tokens for the characters {missing!r}, which the prompts contain; use a model "
                "whose tokenizer has them"
            )

    def backend(self) -> Any:
        """Return the tokenizer's backend, or a copy without truncation and padding if it was saved with them."""
        backend = self.tokenizer.backend_tokenizer
        if backend.truncation is None and backend.padding is None:
            return backend
        if self._plain is None:
            # A copy, because the user's tokenizer must keep its settings.
            self._plain = type(backend).from_str(backend.to_str())
            self._plain.no_truncation()
            self._plain.no_padding()
        return self._plain

    def _rendered(self, text: str, answer_prefix: str, earlier: Turns = ()) -> str:
        if not self.chat:
            return plain_chat(earlier, text, answer_prefix)
        turns = self.turns(text, answer_prefix, earlier)
        if self._template is None:
            return joined_turns(turns)
        opened = self._by_template(turns, enable_thinking=self.thinking > 0)
        return opened if self._prefix_in_turn else opened + answer_prefix

    def _by_template(self, turns: Turns, **variables: bool) -> str:
        """The turns, and the beginning of an answer, as the chat template writes them."""
        assert self._template is not None
        messages = [{"role": role, "content": content} for role, content in turns]
        known = {**self._template.names, "date_string": DATE, **variables}
        try:
            return render(self._template.template, known, messages, [(len(messages), True)])[0]
        except RopewalkError as error:
            more = (
                ""
                if self.system is None
                else "; leave out --system-prompt, or write the system prompt into the template"
            )
            raise RopewalkError(f"the chat template cannot write this prompt ({error}){more}") from error

    @property
    def _prefix_in_turn(self) -> bool:
        """Whether the beginning of the answer ends the user's turn, because the assistant's cannot be begun."""
        return self.thinking > 0 or self.as_turns

    def turns(self, text: str, answer_prefix: str = "", earlier: Turns = ()) -> Turns:
        """A prompt of a chat as roles and texts."""
        asked = ("user", text + answer_prefix if self._prefix_in_turn else text)
        return (*(() if self.system is None else (("system", self.system),)), *earlier, asked)


def answer_in(text: str, thoughts_opened: bool | None) -> str:
    """The answer in a generated text: what follows a thinking model's thoughts; empty if they did not end.

    Args:
        text: the text as generated.
        thoughts_opened: whether the prompt ended inside the model's thoughts; None for a prompt without a chat
            template, whose whole text is the answer.
    """
    # A base model may write anything, and a chat model may think although its template says not to.
    if thoughts_opened is None:
        return text
    _, ended, answer = text.rpartition(END_OF_THOUGHTS)
    if ended:
        return answer.strip()
    return "" if thoughts_opened or THOUGHTS in text else text


@contextmanager
def _all_cores() -> Iterator[None]:
    """Let the tokenizers library use all cores; the command line disables this because it forks workers."""
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
    """Find the largest number of units whose prompt has at most ``budget`` tokens.

    The token count is nearly linear in the units, so linear interpolation chooses the next trial. Every third
    trial halves the bracket instead, which bounds the number of trials for any tokenizer.

    Args:
        tokens_of: returns the tokens of a prompt with the given number of units; nearly linear.
        budget: maximum number of tokens.

    Raises:
        RopewalkError: if the prompt without units is longer than the budget.
    """
    low, tokens_low = 0, tokens_of(0)
    if tokens_low > budget:
        raise RopewalkError(
            f"the shortest possible prompt has {tokens_low} tokens, more than the limit of {budget}"
        )
    # Upper bound: some tokenizers merge several words into one token, but none merges four.
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
        # Interpolation finds the size in two or three encodings, where bisection would need a dozen.
        candidate = low + int((budget - tokens_low) / slope) if slope > 0 else high
        # Bisect only between two measured ends: the initial upper bound may be far too high.
        if trials % 3 == 0 and tokens_high:
            candidate = (low + high) // 2
        # Always strictly inside the bracket, so that every trial shrinks it.
        candidate = min(max(candidate, low + 1), high - 1)
    return low
