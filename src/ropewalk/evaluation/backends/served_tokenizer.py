"""Where the tokens of a served model's prompts are counted: with a tokenizer's files, by the server, or from words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.serving import OF_SERVER, OF_WORDS
from ropewalk.evaluation.backends.text_counters import TextCounter, WordCounter

if TYPE_CHECKING:
    from ropewalk.evaluation.backends.server_pool import ServerPool


@dataclass(frozen=True, eq=False)
class ServedTokenizer:
    """A tokenizer for the prompts of a served model.

    Attributes:
        tokenizer: the tokenizer, or a :class:`TextCounter`.
        path: folder or Hub id of its files; None if there are none.
        source: where it comes from, as a sentence for the user.
    """

    tokenizer: Any
    path: str | None
    source: str

    @property
    def record(self) -> dict[str, Any]:
        """How tokens are counted, as JSON values; complete after the server is checked."""
        more = self.tokenizer.record if isinstance(self.tokenizer, TextCounter) else {}
        return {"source": self.source, **{name: value for name, value in more.items() if name != "probe"}}


def served_tokenizer(model: str | None, wanted: str | None, servers: ServerPool) -> ServedTokenizer:
    """Find the tokenizer of a served model.

    Without a choice of the user's, the files of the checkpoint that the server names count, then those on the Hub under
    the model's name, and then the server itself. Words never count unless the user says so.

    Args:
        model: MODEL of the command, if given: a tokenizer's folder or Hub id, or the model's name on the server.
        wanted: ``server``, ``words``, a folder or a Hub id; None for no choice.
        servers: servers that were found.

    Raises:
        RopewalkError: if there is no such tokenizer; without a choice, with the reason of each that was tried.
    """
    from ropewalk.data import load_tokenizer
    from ropewalk.data.read.embedded import resolve_model

    first = servers.backends[0]
    if wanted == OF_WORDS:
        return ServedTokenizer(
            WordCounter(),
            None,
            "tokens are estimated from words, as --tokenizer words says: lengths are approximate",
        )
    if wanted == OF_SERVER:
        own = first.own_tokenizer()
        return ServedTokenizer(own, None, _by_server(own))
    named = {str(first.model), first.served.root}
    # The name of the model is no choice; anything else that is given is the tokenizer that was meant.
    given = wanted or (model if model not in named else None)
    if given is not None:
        path = resolve_model(given)
        try:
            tokenizer = load_tokenizer(path)
        except RopewalkError as error:
            if wanted is not None:
                raise
            raise RopewalkError(
                f"{error}; the server serves {first.model}: leave MODEL out, or say with --tokenizer what counts the "
                "tokens"
            ) from error
        return ServedTokenizer(tokenizer, path, f"tokens are counted with the tokenizer of {given}")
    reasons: list[str] = []
    for name, what in _candidates(servers).items():
        try:
            source = f"tokens are counted with the tokenizer of {name}, {what}{_although(reasons)}"
            return ServedTokenizer(load_tokenizer(name), name, source)
        except RopewalkError as error:
            reasons.append(str(error))
    try:
        own = first.own_tokenizer()
    except RopewalkError as error:
        raise RopewalkError(
            f"there is no tokenizer to count the tokens of prompts with ({'; '.join([*reasons, str(error)])}); give "
            f"--tokenizer with a folder or Hub id, or --tokenizer {OF_WORDS} to estimate tokens from words"
        ) from error
    return ServedTokenizer(own, None, f"{_by_server(own)}{_although(reasons)}")


def _by_server(own: TextCounter) -> str:
    without = "" if own.bos_token_id is not None else ", which adds no BOS, so prompts have none"
    return f"tokens are counted by the server's /tokenize{without}"


def _although(reasons: Sequence[str]) -> str:
    """Why names that come before are not taken; the first reason is enough."""
    return f" ({reasons[0]})" if reasons else ""


def _candidates(servers: ServerPool) -> dict[str, str]:
    """Names that may have a tokenizer's files, in the order in which they are tried, and what they are."""
    first = servers.backends[0]
    found = {str(first.model): "the model's name on the server"}
    if first.served.root is not None:
        found = {first.served.root: "the checkpoint that the server names", **found}
    # A name without an owner is on the Hub only for a few models of its first years.
    return {
        name: what
        for name, what in found.items()
        if Path(name).is_dir() or (name.count("/") == 1 and not name.startswith(("/", ".")))
    }
