"""Several servers of one model, which share the prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.dispatch import answers_of, check_requests
from ropewalk.evaluation.backends.protocol import Answer, GenerationRequest, Rejection
from ropewalk.evaluation.backends.server import ServerBackend
from ropewalk.evaluation.backends.serving import Serving


class ServerPool:
    """Several servers of one model, which share the prompts: each takes the next one when it has room.

    If a server stops responding, the others answer its prompts.

    Args:
        backends: one backend for each server; at least one.
        report: called with a sentence on each server that is lost.
    """

    def __init__(
        self, backends: Sequence[ServerBackend], report: Callable[[str], None] = lambda text: None
    ) -> None:
        self.backends, self.report = list(backends), report
        self.checked = False
        """Whether :meth:`check` has accepted the servers."""

    @property
    def as_turns(self) -> bool:
        """Whether the servers get turns and apply the chat template themselves."""
        return self.backends[0].as_turns

    @property
    def notes(self) -> list[str]:
        """Notes for the user about the answers, each once; complete after :meth:`check`."""
        return [*dict.fromkeys(note for each in self.backends for note in each.notes)]

    @property
    def description(self) -> dict[str, Any]:
        """That of the servers, which is the same but for the address; complete after :meth:`check`."""
        addresses = [each.address for each in self.backends]
        more = {"addresses": addresses} if len(addresses) > 1 else {}
        return self.backends[0].description | more

    def find(self, preferred: str | None = None) -> None:
        """Find the model on every server; no tokenizer is needed for it.

        Args:
            preferred: see :meth:`ServerBackend.find`.

        Raises:
            RopewalkError: as :meth:`ServerBackend.find`.
        """
        for each in self.backends:
            each.find(preferred)

    def use(self, tokenizer: Any) -> None:
        """Encode with this tokenizer; see :meth:`ServerBackend.use`."""
        for each in self.backends:
            each.use(tokenizer)

    def check(self) -> str:
        """Check every server, and that all serve the same model and accept the same requests.

        Returns:
            The name of the model.

        Raises:
            RopewalkError: as :meth:`ServerBackend.check`; or if two servers differ.
        """
        first, *others = self.backends
        name = first.check()
        for other in others:
            other.check()
            ours, theirs = (
                {key: value for key, value in each.description.items() if key != "address"}
                for each in (first, other)
            )
            if ours != theirs:
                differing = [
                    f"{key} {ours.get(key)!r} and {theirs.get(key)!r}"
                    for key in dict.fromkeys((*ours, *theirs))
                    if ours.get(key) != theirs.get(key)
                ]
                raise RopewalkError(
                    f"the servers at {first.address} and {other.address} differ ({'; '.join(differing)}), so their "
                    "answers cannot be counted together; give servers that serve the same model with the same program"
                )
        self.checked = True
        return name

    def tokens_read(self, text: str, turns: Sequence[tuple[str, str]]) -> int | None:
        """See :meth:`ServerBackend.tokens_read`."""
        return self.backends[0].tokens_read(text, turns)

    def require_length(self, length: int) -> None:
        """Raise if a server says that its context is shorter than this many tokens; call :meth:`find` first.

        Raises:
            RopewalkError: names the server and both lengths.
        """
        for each in self.backends:
            each.require_length(length)

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer | Rejection]:
        """Yield one answer or rejection per request as soon as it arrives; see :meth:`ServerBackend.answers`.

        Raises:
            RopewalkError: as :meth:`ServerBackend.answers`.
            RunFailure: as :meth:`ServerBackend.answers`, if no server is left.
        """
        check_requests(requests)
        if requests and not self.checked:
            self.check()
        return answers_of(self.backends, requests, self.report)


def server_pool(
    serving: Serving, tokenizer: Any = None, report: Callable[[str], None] = lambda text: None
) -> ServerPool:
    """The servers at the addresses of the settings.

    Raises:
        RopewalkError: as :class:`ServerBackend`; or if an address is given twice.
    """
    urls = [each.strip() for each in serving.url.split(",")]
    backends = [
        ServerBackend(serving.model_copy(update={"url": url}), tokenizer, report=report) for url in urls
    ]
    addresses = [each.address for each in backends]
    twice = next((each for each in addresses if addresses.count(each) > 1), None)
    if twice is not None:
        raise RopewalkError(f"the server address {twice} is given twice; give each server once")
    return ServerPool(backends, report)
