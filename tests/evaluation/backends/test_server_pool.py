"""Several servers share the prompts, and one that dies leaves them to the others."""

from typing import Any

import pytest

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends import GenerationRequest
from ropewalk.evaluation.backends.server_pool import server_pool
from ropewalk.evaluation.backends.serving import Serving
from tests.completion_server import (
    CompletionServer,
    Reply,
    completion,
)
from tests.evaluation.backends.server_cases import always, echo, echo_slowly, requests_of


def test_several_servers_share_the_prompts() -> None:
    with (
        CompletionServer(
            lambda value, number: completion(f"answer to {value['prompt'][-1]}", delay=0.01)
        ) as first,
        CompletionServer(echo) as second,
    ):
        pool = server_pool(Serving(url=f"{first.url}, {second.url}", concurrency=2))
        answers = list(pool.answers(requests_of(40)))
    assert sorted((answer.index, answer.text) for answer in answers) == sorted(
        (index, f"answer to {index}") for index in range(40)
    )
    # The quick one takes more, and the slow one some.
    assert len(second.requests) > len(first.requests) > 0
    assert pool.description["addresses"] == [first.url, second.url]


def test_questions_about_a_text_go_to_one_server() -> None:
    # Eight texts of 20 tokens, with five questions about each.
    requests = [GenerationRequest((*[text] * 20, index), 4, 100) for text in range(8) for index in range(5)]
    with CompletionServer(echo_slowly) as first, CompletionServer(echo_slowly) as second:
        pool = server_pool(Serving(url=f"{first.url},{second.url}", concurrency=2))
        answers = list(pool.answers(requests))
        asked = [[value["prompt"] for value in server.requests] for server in (first, second)]
    assert sorted(answer.index for answer in answers) == list(range(40))
    assert sorted(prompt for each in asked for prompt in each) == sorted(list(r.input_ids) for r in requests)
    assert min(map(len, asked)) >= 10
    # At the end, a server without texts takes questions of another one's last text.
    assert sum(len({prompt[0] for prompt in each}) for each in asked) <= 9


def test_one_text_does_not_leave_a_server_idle() -> None:
    requests = [GenerationRequest((*[1] * 20, index), 4, 100) for index in range(12)]
    with CompletionServer(echo_slowly) as first, CompletionServer(echo_slowly) as second:
        pool = server_pool(Serving(url=f"{first.url},{second.url}", concurrency=2))
        assert len(list(pool.answers(requests))) == 12
        assert min(len(first.requests), len(second.requests)) >= 3


def test_the_prompts_of_a_server_that_dies_go_to_the_others() -> None:
    def reply(value: dict[str, Any], number: int) -> Reply:
        if number == 3:
            dying.die()
        return echo_slowly(value, number)

    told: list[str] = []
    with CompletionServer(reply) as dying, CompletionServer(echo_slowly) as living:
        serving = Serving(url=f"{dying.url},{living.url}", concurrency=2, retries=0)
        answers = list(server_pool(serving, report=told.append).answers(requests_of(30)))
    assert sorted(answer.index for answer in answers) == list(range(30))
    assert all(answer.text == f"answer to {answer.index}" for answer in answers)
    (note,) = told
    assert dying.url in note
    assert note.endswith("1 of 2 servers continue")


def test_servers_that_all_die_end_the_run() -> None:
    broken = always(Reply(500, b"out of memory"))
    with CompletionServer(broken) as first, CompletionServer(broken) as second:
        serving = Serving(url=f"{first.url},{second.url}", concurrency=2, retries=0)
        with pytest.raises(
            RunFailure, match=r"prompts after 0 of 4 answers; .* \(reason: HTTP 500: out of memory"
        ):
            list(server_pool(serving).answers(requests_of(4)))


def test_servers_of_different_models_or_programs_are_refused() -> None:
    with CompletionServer(echo, models=["a"]) as first, CompletionServer(echo, models=["b"]) as second:
        with pytest.raises(RopewalkError, match=r"servers at .* differ \(model 'a' and 'b'\), so"):
            server_pool(Serving(url=f"{first.url},{second.url}")).check()
        with pytest.raises(RopewalkError, match="is given twice"):
            server_pool(Serving(url=f"{first.url},{first.url}/"))
