"""Threads that send the prompts of a run to one or several servers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

from ropewalk.errors import RopewalkError, RunFailure
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
    """One server, as the threads see it."""

    address: str
    concurrency: int

    def client(self) -> Any:
        """A client of the server, to be closed by the caller."""

    def completion(self, client: Any, request: GenerationRequest, stop: threading.Event) -> Completion:
        """Return the server's completion of a prompt; ends early, with an error, when ``stop`` is set."""

    def failed(self, failure: Exception | None, answered: int, total: int) -> RunFailure:
        """Return the error of a run that the server ended."""


@dataclass(frozen=True, eq=False)
class _Worker:
    """What the threads of one server share.

    Attributes:
        backend: the server.
        client: its client.
        stop: set when the server is lost, or when nothing is left to do.
    """

    backend: Server
    client: Any
    stop: threading.Event

    def work(
        self,
        requests: Sequence[GenerationRequest],
        todo: SimpleQueue[int | None],
        outcomes: SimpleQueue[Answer | Rejection | tuple[_Worker, Exception] | None],
    ) -> None:
        """Process requests until there is a None among them, or the server is lost."""
        try:
            while not self.stop.is_set() and (index := todo.get()) is not None:
                try:
                    found = self.backend.completion(self.client, requests[index], self.stop)
                except Exception as error:
                    if isinstance(error, RefusalError) and error.of_one_prompt:
                        outcomes.put(Rejection(index, str(error)))
                        continue
                    # Another server may answer it.
                    todo.put(index)
                    self.stop.set()
                    outcomes.put((self, error))
                    if not isinstance(error, (FaultError, RefusalError)):
                        raise
                    return
                outcomes.put(Answer(index, found.text, found.new_tokens, found.finished))
        finally:
            # None tells the consumer that this thread has ended.
            outcomes.put(None)


def answers_of(
    backends: Sequence[Server],
    requests: Sequence[GenerationRequest],
    report: Callable[[str], None] = lambda text: None,
) -> Iterator[Answer | Rejection]:
    """Yield one answer or rejection per request as soon as it arrives, from whichever server has room first.

    Args:
        backends: servers of one model; at least one.
        requests: prompts; :func:`check_requests` accepts them.
        report: called with a sentence on each server that is lost.

    Raises:
        RunFailure: if a server rejects every request, for example because of the API key, or all have stopped
            responding. Answers to pending requests are yielded first.
    """
    todo: SimpleQueue[int | None] = SimpleQueue()
    for index in range(len(requests)):
        todo.put(index)
    outcomes: SimpleQueue[Answer | Rejection | tuple[_Worker, Exception] | None] = SimpleQueue()
    workers = [_Worker(each, each.client(), threading.Event()) for each in backends]
    # Daemon threads, so that interrupting a run does not wait for answers that nobody will read.
    threads = [
        threading.Thread(target=worker.work, args=(requests, todo, outcomes), daemon=True)
        for worker in workers
        for _ in range(min(worker.backend.concurrency, len(requests)))
    ]

    def finish() -> None:
        for worker in workers:
            worker.stop.set()
        # A thread that waits for a request gets none.
        for _ in threads:
            todo.put(None)

    for thread in threads:
        thread.start()
    working, answered = len(threads), 0
    failure: tuple[Server, Exception | None] = (backends[0], None)
    lost: set[_Worker] = set()
    try:
        while working:
            outcome = outcomes.get()
            if outcome is None:
                working -= 1
            elif isinstance(outcome, Answer | Rejection):
                answered += 1
                yield outcome
                if answered == len(requests):
                    finish()
            else:
                worker, error = outcome
                if worker in lost:
                    # Threads of one server fail together, so the first reason is enough.
                    continue
                lost.add(worker)
                if failure[1] is None:
                    failure = (worker.backend, error)
                if not isinstance(error, FaultError) or len(lost) == len(workers):
                    finish()
                else:
                    report(
                        f"the server at {worker.backend.address} stopped answering prompts ({error.reason}); "
                        f"{len(workers) - len(lost)} of {len(workers)} servers continue"
                    )
    finally:
        # Also if the caller closes this generator early: each thread then ends after its current request.
        finish()
    # Join, so that the traceback of an unexpected error is printed before our own message.
    for thread in threads:
        thread.join()
    for worker in workers:
        worker.client.close()
    if answered < len(requests):
        backend, reason = failure
        raise backend.failed(reason, answered, len(requests)) from reason
