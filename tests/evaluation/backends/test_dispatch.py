"""Threads share the prompts; what was answered is kept when a server fails, and nothing is asked twice."""

import random
import threading
import time
from typing import Any

import pytest

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import GenerationRequest, Rejection
from tests.completion_server import (
    CompletionServer,
    Reply,
    completion,
    refusal,
    until,
)
from tests.evaluation.backends.server_cases import backend, backend_at, echo, requests_of


def test_answers_map_to_their_requests_under_concurrency_and_random_delays() -> None:
    rng = random.Random(0)
    delays = [rng.uniform(0, 0.03) for _ in range(60)]

    def reply(value: dict[str, Any], number: int) -> Reply:
        return completion(f"answer to {value['prompt'][-1]}", delay=delays[number])

    with CompletionServer(reply) as server:
        answers = list(backend(server).answers(requests_of(60)))
    assert sorted(answer.index for answer in answers) == list(range(60))
    assert all(answer.text == f"answer to {answer.index}" for answer in answers)
    assert [answer.index for answer in answers] != list(range(60))
    assert 2 <= server.most_under_way <= 8


@pytest.mark.parametrize("concurrency", [1, 3])
def test_no_more_requests_are_under_way_than_were_asked_for(concurrency: int) -> None:
    with CompletionServer(lambda value, number: completion("x", delay=0.01)) as server:
        assert len(list(backend(server, concurrency=concurrency).answers(requests_of(9)))) == 9
    assert server.most_under_way == concurrency


def test_a_server_that_dies_ends_the_run_after_the_good_answers() -> None:
    def reply(value: dict[str, Any], number: int) -> Reply:
        if number == 5:
            server.die()
        return echo(value, number)

    with CompletionServer(reply) as server:
        stream = backend(server, retries=2, concurrency=2).answers(requests_of(40))
        got = []
        with pytest.raises(RunFailure) as caught:
            got.extend(answer.index for answer in stream)
    # The one that was under way when it died may have come through or not.
    assert 5 <= len(server.requests) <= 7
    assert len(got) == len(set(got)) == len(server.requests)
    message = str(caught.value)
    assert message.startswith(
        f"the server at {server.url} stopped answering prompts after {len(got)} of 40 answers; run the same command "
        "again to resume (reason: "
    )
    assert "refused" in message


def test_answers_under_way_are_waited_for_when_another_request_fails() -> None:
    failed = threading.Event()

    def reply(value: dict[str, Any], number: int) -> Reply:
        if value["prompt"][-1] == 0:
            # All are under way before the first fails.
            until(lambda: server.under_way == 3)
            failed.set()
            return refusal(403, "no")
        failed.wait(5)
        return completion("late", delay=0.05)

    with CompletionServer(reply) as server:
        got = []
        with pytest.raises(RunFailure, match=r"rejected a prompt after 2 of 9 answers \(HTTP 403: no\)$"):
            got.extend(backend(server, concurrency=3).answers(requests_of(9)))
    assert sorted(answer.index for answer in got) == [1, 2]
    assert len(server.requests) == 3


def test_a_failure_ends_the_retries_of_the_others() -> None:
    def reply(value: dict[str, Any], number: int) -> Reply:
        if value["prompt"][-1] == 0:
            return refusal(503, "busy")
        until(lambda: server.under_way >= 1 and len(server.requests) == 2)
        return Reply(403, b'{"error": {"message": "no"}}', delay=0.05)

    with CompletionServer(reply) as server:
        start = time.monotonic()
        with pytest.raises(RunFailure, match="HTTP 403: no"):
            list(backend(server, concurrency=2, backoff=5.0).answers(requests_of(2)))
        assert time.monotonic() - start < 3.0
    assert len(server.requests) == 2


def test_an_interrupted_run_leaves_the_rest_unasked() -> None:
    with CompletionServer(echo) as server:
        stream = backend(server, concurrency=2).answers(requests_of(10_000))
        next(stream)
        stream.close()
        time.sleep(0.1)
        # Two were under way, and each thread may have begun one more.
        assert len(server.requests) < 10


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_nobody_thought_of_is_no_answer_either(monkeypatch: pytest.MonkeyPatch) -> None:
    with CompletionServer(echo) as server:
        asked = backend(server, concurrency=2)
        asked.check()
        monkeypatch.setattr(asked, "_request", lambda client, request: 1 // 0)
        with pytest.raises(
            RunFailure, match=r"after 0 of 3 answers; .* \(reason: an unexpected error, shown above\)"
        ):
            list(asked.answers(requests_of(3)))


@pytest.mark.parametrize("bad", [GenerationRequest((), 4, 100), GenerationRequest((1,), 0, 100)])
def test_bad_requests_are_refused_before_the_server_is_asked(bad: GenerationRequest) -> None:
    with pytest.raises(RopewalkError, match="request 1 has"):
        backend_at("http://localhost:1/v1").answers([*requests_of(1), bad])


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_prompt_that_a_server_rejects_costs_no_other(status: int) -> None:
    def reply(value: dict[str, Any], number: int) -> Reply:
        return refusal(status, "too long") if value["prompt"][-1] in (2, 5) else echo(value, number)

    with CompletionServer(reply) as server:
        found = sorted(backend(server, concurrency=3).answers(requests_of(8)), key=lambda each: each.index)
    assert [each.index for each in found] == list(range(8))
    assert [each for each in found if isinstance(each, Rejection)] == [
        Rejection(index, f"HTTP {status}: too long") for index in (2, 5)
    ]
    # A rejection is final: it takes no retries.
    assert len(server.requests) == 8
