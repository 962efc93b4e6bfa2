"""Send the prompts of a run to one or several servers, each of which gets the next one when it has room.

Questions about one text go to the same server, which may keep what it computed for the text.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from typing import Any, Protocol

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.http_limits import in_thread
from ropewalk.evaluation.backends.protocol import Answer, GenerationRequest, Rejection
from ropewalk.evaluation.backends.responses import Completion, FaultError, RefusalError


def check_requests(requests: Sequence[GenerationRequest]) -> None:
    """Raise for a request without a prompt or without room for an answer."""
    for index, request in enumerate(requests):
        if not request.input_ids or request.max_new_tokens < 1:
            raise RopewalkError(
                f"request {index} has {len(request.input_ids)} prompt tokens and max_new_tokens "
                f"{request.max_new_tokens}; both must be 1 or more"
            )


class Server(Protocol):
    """One server, as the loop below sees it."""

    address: str
    concurrency: int

    def client(self) -> Any:
        """A client of the server, to be closed by the caller."""

    def completion(self, client: Any, request: GenerationRequest, stop: threading.Event) -> Completion:
        """Return the server's completion of a prompt; ends early, with an error, when ``stop`` is set."""

    def failed(self, failure: Exception | None, answered: int, total: int) -> RunFailure:
        """Return the error of a run that the server ended; ``failure`` is None for an error that nobody expects."""


def answers_of(
    servers: Sequence[Server],
    requests: Sequence[GenerationRequest],
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[Answer | Rejection]:
    """Yield one answer or rejection per request as soon as it arrives, from whichever server has room first.

    Args:
        servers: servers of one model; at least one.
        requests: prompts; :func:`check_requests` accepts them.
        report: called with a sentence on each server that is lost.

    Raises:
        RunFailure: if a server rejects every request, for example because of the API key, or all have stopped
            responding. Answers to pending requests are yielded first.
    """
    texts = _texts(requests)
    begun: dict[Server, deque[int]] = {server: deque() for server in servers}
    clients = {server: server.client() for server in servers}
    stop = {server: threading.Event() for server in servers}
    pending: dict[Future[Completion], tuple[Server, int]] = {}
    # An unexpected error, which its thread prints, is None here.
    lost: dict[Server, Exception | None] = {}
    answered = 0

    def next_for(server: Server) -> int | None:
        if not begun[server] and texts:
            begun[server] = texts.popleft()
        if begun[server]:
            return begun[server].popleft()
        # No server waits while another one has questions left.
        most = max(begun.values(), key=len)
        return most.pop() if most else None

    def ask(server: Server) -> None:
        if not stop[server].is_set() and (index := next_for(server)) is not None:
            call = partial(server.completion, clients[server], requests[index], stop[server])
            # Not a ThreadPoolExecutor: interrupting a run would wait for answers that nobody will read.
            pending[in_thread(call, FaultError, RefusalError)] = server, index

    def stop_all() -> None:
        for each in stop.values():
            each.set()

    try:
        for server in servers:
            for _ in range(server.concurrency):
                ask(server)
        while pending:
            arrived: list[Answer | Rejection] = []
            for future in wait(pending, return_when=FIRST_COMPLETED).done:
                server, index = pending.pop(future)
                error = None if future.cancelled() else future.exception()
                if not future.cancelled() and error is None:
                    found = future.result()
                    arrived.append(Answer(index, found.text, found.new_tokens, found.finished))
                elif isinstance(error, RefusalError) and error.of_one_prompt:
                    arrived.append(Rejection(index, str(error)))
                else:
                    assert isinstance(error, Exception | None)
                    # Another server may answer it.
                    texts.append(deque([index]))
                    stop[server].set()
                    # Requests to one server fail together, so the first reason is enough.
                    if server not in lost:
                        lost[server] = error
                        if not isinstance(error, FaultError):
                            stop_all()
                        elif len(lost) < len(servers):
                            report(
                                f"the server at {server.address} stopped answering prompts ({error.reason}); "
                                f"{len(servers) - len(lost)} of {len(servers)} servers continue"
                            )
            # Before the answers are handed on, so that no server waits for whoever reads them.
            for server in servers:
                for _ in range(server.concurrency - sum(each is server for each, _ in pending.values())):
                    ask(server)
            answered += len(arrived)
            yield from arrived
    finally:
        # Also if the caller closes this generator early: each thread then ends after its current request.
        stop_all()
    for client in clients.values():
        client.close()
    if answered < len(requests):
        server, reason = next(iter(lost.items()))
        raise server.failed(reason, answered, len(requests)) from reason


def _texts(requests: Sequence[GenerationRequest]) -> deque[deque[int]]:
    """Indices of the requests by text: those that follow each other and share the first half of their tokens."""
    found: deque[deque[int]] = deque()
    for index, request in enumerate(requests):
        half = len(request.input_ids) // 2
        if index and request.input_ids[:half] == requests[index - 1].input_ids[:half]:
            found[-1].append(index)
        else:
            found.append(deque([index]))
    return found
