"""Tokenizers for models of which there is only a server: the server's own, and a count of words.

They have the part of a tokenizer that prompts need: token ids, and their number. Neither has a chat template; with an
endpoint of chats, the tokens that the server's template writes around a text are measured with the trial request.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.responses import FaultError, RefusalError
from ropewalk.io.progress import Sparing

Ask = Callable[[str, dict[str, Any]], Any]
"""Posts a JSON value to a path below the server's root, and returns the JSON value of the response."""


class TextCounter(ABC):
    """A tokenizer without files.

    Attributes:
        approximate: whether the counts are estimates, and the ids mean nothing to the model.
        around: tokens that the server writes around a text.
        bos_token, bos_token_id: token before a text; None if there is none.
    """

    approximate = False
    around = 0
    bos_token: str | None = None
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    unk_token_id: int | None = None
    chat_template = None
    # Of the backend of a tokenizer, which this is too.
    truncation = padding = None

    @property
    def backend_tokenizer(self) -> TextCounter:
        return self

    @property
    @abstractmethod
    def record(self) -> dict[str, Any]:
        """How tokens are counted, as JSON values."""

    @abstractmethod
    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Token ids of texts."""

    @abstractmethod
    def decode(self, ids: Sequence[int], **options: bool) -> str:
        """Text of token ids."""

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, **options: bool
    ) -> dict[str, Any]:
        texts = [text] if isinstance(text, str) else list(text)
        found = self.encode_batch_fast(texts, add_special_tokens)
        return {"input_ids": found[0] if isinstance(text, str) else found}


@dataclass(frozen=True)
class _Form:
    """Requests and responses of one family of servers.

    Attributes:
        text, special: fields of ``/tokenize`` for the text, and for whether to add special tokens.
        more: further fields of ``/tokenize``.
        decoded: field of the response of ``/detokenize`` that has the text.
        named: whether requests name the model.
        whole: further fields of ``/detokenize``, which keep special tokens.
    """

    text: str
    special: str
    more: dict[str, Any]
    decoded: str
    named: bool
    whole: dict[str, Any]


FORMS = (
    # vllm/entrypoints/serve/tokenize/protocol.py at 030ea52: TokenizeCompletionRequest, DetokenizeRequest.
    _Form("prompt", "add_special_tokens", {}, "prompt", True, {}),
    # sglang/srt/entrypoints/openai/protocol.py: the same but for the response of /detokenize.
    _Form("prompt", "add_special_tokens", {}, "text", True, {"skip_special_tokens": False}),
    # tools/server/README.md of llama.cpp: POST /tokenize, POST /detokenize.
    _Form("content", "add_special", {"parse_special": True, "with_pieces": False}, "content", False, {}),
)

SHORT = 1000
MOST_SHORT = 1 << 14
"""Characters of a text whose tokens are kept, and the number of such texts: tasks count the same words many times."""

SECONDS_BETWEEN_LINES = 10.0

PROBE = "The grass is green. 3f9a-70214, (Zürich) <END>\n"


class ServerTokenizer(TextCounter):
    """The tokenizer of a served model, behind the server's ``/tokenize`` and ``/detokenize``.

    Args:
        ask: posts to the server; raises FaultError or RefusalError.
        model: name of the model on the server.
        concurrency: maximum number of texts that are encoded at a time.
        report: called with a sentence on the number of texts, from time to time.

    Raises:
        RopewalkError: if the server has none of the known forms of these endpoints, or they contradict each other.
    """

    def __init__(
        self, ask: Ask, model: str, concurrency: int, report: Callable[[str], None] = lambda text: None
    ) -> None:
        self._ask, self._model, self._concurrency = ask, model, concurrency
        self._report, self._asked = Sparing(report, SECONDS_BETWEEN_LINES, at_once=False), 0
        self._short: dict[tuple[str, bool], list[int]] = {}
        reasons = []
        for form in FORMS:
            self._form = form
            try:
                plain = self._encode(PROBE, False)
                if plain and self.decode(plain):
                    break
                reasons.append("it returns no tokens of a text")
            except (FaultError, RefusalError) as error:
                reasons.append(str(error))
        else:
            raise RopewalkError(f"the server does not count tokens with /tokenize ({reasons[0]})")
        self._probe = plain
        with_special = self._encode(PROBE, True)
        # Some tokenizers add a token at the end too, which prompts never have.
        if with_special[1 : 1 + len(plain)] == plain:
            self.bos_token_id = with_special[0]
            self.bos_token = self.decode([with_special[0]]) or None

    @property
    def record(self) -> dict[str, Any]:
        return {"tokens": "counted by the server's /tokenize", "probe": self._probe}

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Token ids of texts, several at a time.

        Raises:
            RunFailure: if the server stops counting.
        """

        def encode(text: str) -> list[int]:
            try:
                return self._encode(text, add_special_tokens)
            except (FaultError, RefusalError) as error:
                raise RunFailure(
                    f"the server stopped counting tokens with /tokenize ({error}); run the same command again to resume"
                ) from error

        different = [*dict.fromkeys(text for text in texts if (text, add_special_tokens) not in self._short)]
        if len(different) == 1:
            found = {different[0]: encode(different[0])}
        else:
            with ThreadPoolExecutor(self._concurrency) as pool:
                found = dict(zip(different, pool.map(encode, different), strict=True))
        ids = [found.get(text) or self._short.get((text, add_special_tokens), []) for text in texts]
        for text, its in found.items():
            if len(text) <= SHORT and len(self._short) < MOST_SHORT:
                self._short[text, add_special_tokens] = its
        # Copies, because the kept ones must stay as they are.
        return [[*each] for each in ids]

    def decode(self, ids: Sequence[int], **options: bool) -> str:
        named = {"model": self._model} if self._form.named else {}
        said = self._ask("/detokenize", {**named, "tokens": list(ids), **self._form.whole})
        text = said.get(self._form.decoded) if isinstance(said, dict) else None
        if not isinstance(text, str):
            raise RefusalError("/detokenize returns no text")
        return text

    def _encode(self, text: str, special: bool) -> list[int]:
        form = self._form
        named = {"model": self._model} if form.named else {}
        said = self._ask("/tokenize", {**named, form.text: text, form.special: special, **form.more})
        self._asked += 1
        self._report(
            f"preparing prompts: the server's /tokenize has counted {self._asked:,} texts so far; with the model's "
            "tokenizer in --tokenizer, this is faster"
        )
        ids = said.get("tokens") if isinstance(said, dict) else None
        # Not isinstance, because True is an int too.
        if not isinstance(ids, list) or any(type(each) is not int or each < 0 for each in ids):
            raise RefusalError("/tokenize returns no token ids")
        return ids


_PIECE = re.compile(r"[^\W\d_]+|\d{1,3}|[^\w\s]|_")
"""A word, up to three digits, or a mark: byte-pair encodings make about one token of each."""

SAMPLE = (
    "One of the special magic numbers for long-context is: 7421193. When the ship left the harbour at dawn, nobody on "
    "deck was sure which of the islands they would reach first, or whether the weather, calm for a week, would hold. "
    "One of the special magic uuids for wandering-age is: 2f1c9a7e-85d4-4b60-9e13-0a7d5c88f2b1.\n"
)
"""What a token is measured on: the kinds of text that the benchmarks have."""
COPIES = 5


class WordCounter(TextCounter):
    """Counts words, numbers and marks, and estimates tokens from them; for servers that count no tokens."""

    approximate = True

    def __init__(self) -> None:
        self._tokens_per_piece = 0.0
        self._copy = 0.0
        self.by_task: dict[tuple[str, str], WordCounter] = {}
        """Counters for the prompts of single tasks, which :meth:`scaled` makes."""

    @property
    def tokens_per_piece(self) -> float:
        """Estimated tokens of a word, a group of three digits, or a mark."""
        return self._tokens_per_piece

    @property
    def record(self) -> dict[str, Any]:
        return {
            "tokens": "estimated from words, groups of three digits, and marks",
            "approximate": True,
            "tokens_per_piece": round(self._tokens_per_piece, 4),
        }

    def measure(self, read: Callable[[str], int | None]) -> None:
        """Measure the tokens of a piece, and those around a text.

        Args:
            read: returns the tokens of a prompt by the server's count; None if it does not report it.

        Raises:
            RopewalkError: if the server does not report them, or reports what cannot be.
        """
        one, several = read(SAMPLE), read(SAMPLE * COPIES)
        if not one or not several:
            raise RopewalkError(
                "the server does not report the tokens of prompts (usage.prompt_tokens), so their length cannot be "
                "estimated from words; give --tokenizer a folder or a Hub id"
            )
        self._copy = (several - one) / (COPIES - 1)
        pieces = len(_PIECE.findall(SAMPLE))
        if not 0.2 * pieces <= self._copy <= 20 * pieces:
            raise RopewalkError(
                f"the server reports {one} tokens for a text, and {several} for {COPIES} times the text; from such "
                "counts, the length of prompts cannot be estimated"
            )
        self._tokens_per_piece = self._copy / pieces
        self.around = max(round(one - self._copy), 0)

    def scaled(self, estimated: int, read: int | None) -> WordCounter:
        """A counter for texts of one kind: lists of numbers have more tokens per piece than prose.

        Args:
            estimated: tokens of such a text by this counter, with those around it.
            read: tokens of the same text by the server's count; None if it does not report it.
        """
        found = WordCounter()
        found.around, found._copy = self.around, self._copy
        share = ((read or estimated) - self.around) / max(estimated - self.around, 1)
        # A server that reports nonsense for one text is not followed into prompts of any length.
        found._tokens_per_piece = self._tokens_per_piece * min(max(share, 0.25), 4.0)
        return found

    def probe(self, length: int) -> tuple[str, int]:
        """A text of just less than a length in tokens, and the tokens that the server must at least report for it."""
        copies = max(int((length - self.around) / self._copy) - 1, 1)
        # A token may be merged or split where two copies meet.
        return SAMPLE * copies, int(copies * (self._copy - 1))

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = False) -> list[list[int]]:
        return [self._encode(text) for text in texts]

    def decode(self, ids: Sequence[int], **options: bool) -> str:
        raise AssertionError("estimated tokens have no text")

    def _encode(self, text: str) -> list[int]:
        # Different texts get different ids, although these stand for no tokens.
        kind = zlib.crc32(text.encode("utf-8", "surrogatepass"))
        return [kind] * round(len(_PIECE.findall(text)) * self._tokens_per_piece)


def joined_turns(turns: Sequence[tuple[str, str]]) -> str:
    """The texts of a chat whose template is not known, one after the other."""
    return "\n".join(text for _, text in turns)
