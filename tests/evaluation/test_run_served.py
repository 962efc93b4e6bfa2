"""Suites whose samples are made by seed, on a server: thoughts, long chats, shared texts, and runs that are cut off."""

import hashlib
import json
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from benchmarks.task_checkers import CHECKERS
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import demo_model_path
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation import EvaluationSettings, Settings, evaluate
from ropewalk.evaluation.backends.serving import Serving
from ropewalk.evaluation.prompt import PromptEncoder, plain_chat
from ropewalk.evaluation.tasks.registry import BY_NAME
from ropewalk.evaluation.tasks.suite import GeneratedSuite
from ropewalk.parallel.context import RunContext
from tests.completion_server import CompletionServer, Reply, few_certificates, message, refusal, until
from tests.programs import ROPEWALK, Program

SUITES = sorted(CHECKERS)
LENGTH = 4096
"""In tokens of the demo model's tokenizer."""
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
THINKS = TEMPLATE.replace(
    "<s>assistant:", "<s>assistant:{% if enable_thinking is not false %}<think>{% endif %}"
)
DECOY = "<think>\nlabel: 99 Answer: 0 Final Answer: [0] kitchen Alma Hugo Bill\n"

Answerer = Callable[[dict[str, Any], int], Reply]


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few_certificates(monkeypatch, tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo model with a chat template."""
    made = tmp_path / "model"
    shutil.copytree(demo_model_path(), made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def asked_in(request: dict[str, Any]) -> str:
    """The whole prompt of a chat, as people read it."""
    *earlier, (_, last) = ((turn["role"], turn["content"]) for turn in request["messages"])
    return plain_chat(tuple(earlier), last)


def measured(
    folder: Path, suite: str, url: str, out: Path, samples: int, concurrency: int = 1, **what: Any
) -> None:
    """Evaluate a suite on a chat server."""
    asked = {
        "suites": (suite,),
        "lengths": (LENGTH,),
        "samples": samples,
        "chat": True,
        "beyond_config": True,
    }
    config = EvaluationSettings(
        model=str(folder),
        what=Settings(**{**asked, **what}),
        serving=Serving(url=url, endpoint="chat", retries=0, concurrency=concurrency),
        samples_dir=Path(f"{out} samples"),
    )
    evaluate(config, RunContext(output=out))


def predictions(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "predictions.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("suite", SUITES)
def test_thoughts_have_tokens_of_their_own_and_are_not_scored(
    suite: str, folder: Path, tmp_path: Path
) -> None:
    (folder / "chat_template.jinja").write_text(THINKS)

    def thinks(request: dict[str, Any], number: int) -> Reply:
        right = CHECKERS[suite].answer(asked_in(request))
        if number % 2:
            return message(right, reasoning_content=DECOY)
        return message(f"{DECOY}</think>\n\n{right}")

    with CompletionServer(thinks) as server:
        with pytest.raises(RopewalkError, match=r"lets the model think.*add --thinking-tokens"):
            measured(folder, suite, server.url, tmp_path / "out", 2)
        assert server.requests == []
        measured(folder, suite, server.url, tmp_path / "out", 2, thinking_tokens=77)
        tasks = {task.name: task for task in generated(suite)}
        budgets = {request["max_tokens"] for request in server.requests}
    assert budgets == {task.max_new_tokens + 77 for task in tasks.values()}
    found = predictions(tmp_path / "out")
    assert {each["task"] for each in found} == set(tasks)
    assert {each["score"] for each in found} == {1}
    # Thoughts in a field of their own are no part of the answer.
    assert sum(each["prediction"].startswith(DECOY) for each in found) == len(tasks)
    for each in found:
        assert each["prompt_tokens"] + tasks[each["task"]].max_new_tokens + 77 <= LENGTH


def generated(suite: str) -> list[Any]:
    """The tasks of a suite that run by default, without files of the user's."""
    found = BY_NAME[suite]
    assert isinstance(found, GeneratedSuite)
    tasks = found.tasks(Settings(suites=(suite,)))
    return [tasks[name] for name in found.default or tasks if tasks[name].unavailable() is None]


def test_a_chat_of_hundreds_of_turns_arrives_whole_and_in_order(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    length, lost = 65536, 0

    def read(turns: list[dict[str, str]]) -> int:
        """Tokens of what a server reads that loses turns of long chats."""
        shown = [turns[0], *turns[1 + lost :]] if len(turns) > 100 else turns
        text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def reply(request: dict[str, Any], number: int) -> Reply:
        return message(CHECKERS["mrcr"].answer(asked_in(request)), read=read(request["messages"]))

    def trial(request: dict[str, Any]) -> Reply | None:
        return message("x", "length", 1, read(request["messages"])) if request["max_tokens"] == 1 else None

    with CompletionServer(reply, refuses=trial) as server:
        asked = {"samples": 1, "tasks": ("mrcr_8",), "lengths": (length,)}
        measured(folder, "mrcr", server.url, tmp_path / "out", **asked)
        lost = 2
        with pytest.raises(RunFailure, match=r"rejected all 1 prompts.*the server read only"):
            measured(folder, "mrcr", server.url, tmp_path / "lost", **asked)
    (task,) = (each for each in generated("mrcr") if each.name == "mrcr_8")
    (sample,) = task.samples(PromptEncoder(tokenizer, chat=True, as_turns=True), length, 1, 0)
    assert len(sample.earlier) > 900
    assert [role for role, _ in sample.earlier] == ["user", "assistant"] * (len(sample.earlier) // 2)
    sent = [(turn["role"], turn["content"]) for turn in server.requests[0]["messages"]]
    assert sent == [*sample.earlier, ("user", sample.text)]
    (found,) = predictions(tmp_path / "out")
    lost = 0
    assert found["prompt_tokens"] == sample.prompt_tokens == read(server.requests[0]["messages"])
    assert found["score"] == 1


def test_a_server_may_write_less_around_the_turns_of_a_chat(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    own = TEMPLATE.replace("{{ m.role }}: ", "")

    def reply(request: dict[str, Any], number: int) -> Reply:
        text = tokenizer.apply_chat_template(request["messages"], chat_template=own, tokenize=False)
        return message("?", tokens=1, read=len(tokenizer(text, add_special_tokens=False)["input_ids"]))

    def trial(request: dict[str, Any]) -> Reply | None:
        return reply(request, 0) if request["max_tokens"] == 1 else None

    with CompletionServer(reply, refuses=trial) as server:
        measured(folder, "mrcr", server.url, tmp_path / "out", 3, tasks=("mrcr_2",))
        turns = [len(request["messages"]) for request in server.trials]
    # The last two compare the templates, once.
    assert turns == [1, 1, 1, 3]
    assert len(predictions(tmp_path / "out")) == 3


SHARING = {"graphwalks": 4, "icl": 10, "counting": 25}
"""Questions about a text, in suites whose texts have several."""


@pytest.mark.parametrize("suite", SHARING)
def test_questions_about_a_text_come_one_after_the_other_and_begin_alike(
    suite: str, folder: Path, tmp_path: Path
) -> None:
    task = {"icl": "natural"}.get(suite, generated(suite)[0].name)
    count = 2 * SHARING[suite] + 1
    with CompletionServer(lambda request, number: message("?")) as server:
        measured(folder, suite, server.url, tmp_path / "out", count, tasks=(task,))
        prompts = [asked_in(request) for request in server.requests]
    contexts = [each["details"]["context"] for each in predictions(tmp_path / "out")]
    groups = [list(group) for _, group in groupby(zip(contexts, prompts, strict=True), lambda pair: pair[0])]
    assert [len(group) for group in groups] == [SHARING[suite], SHARING[suite], 1]
    for group in groups[:2]:
        # A cache of prefixes serves all but the question.
        first, *others = (prompt for _, prompt in group)
        assert all(each[: int(0.95 * len(each))] == first[: int(0.95 * len(each))] for each in others)


def knows_half(suite: str) -> Answerer:
    """A model that knows the answer to about half of the prompts; what it says depends on the prompt alone."""

    def reply(request: dict[str, Any], number: int) -> Reply:
        prompt = asked_in(request)
        right = CHECKERS[suite].answer(prompt)
        return message(right if hashlib.sha256(prompt.encode()).digest()[0] % 2 else f"Grüße 🙂 {right[:3]}")

    return reply


def content(out: Path) -> tuple[bytes, list[str]]:
    """All answers, and the lines of the results but for the day."""
    lines = (out / "results.json").read_text().splitlines()
    return (out / "predictions.jsonl").read_bytes(), [line for line in lines if '"date"' not in line]


@pytest.mark.parametrize("suite", SUITES)
def test_a_run_that_is_cut_off_and_continued_writes_the_same_bytes(
    suite: str, folder: Path, tmp_path: Path
) -> None:
    good, most = knows_half(suite), 10**9

    def reply(request: dict[str, Any], number: int) -> Reply:
        return good(request, number) if number < most else refusal(500, "gone")

    with CompletionServer(reply) as server:

        def run(name: str) -> None:
            # One after the other, because answers are written as they arrive.
            measured(folder, suite, server.url, tmp_path / name, 4)

        run("whole")
        total = len(server.requests)
        assert total == 4 * len(generated(suite))
        # In the middle of a task, and of the questions about a text.
        most = total + 3
        with pytest.raises(RunFailure):
            run("cut")
        kept = predictions(tmp_path / "cut")
        assert len(kept) == 3
        assert not (tmp_path / "cut" / "results.json").exists()
        most = 10**9
        before = len(server.requests)
        run("cut")
        assert len(server.requests) - before == total - len(kept)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    assert len({each["score"] for each in predictions(tmp_path / "whole")}) > 1


@pytest.mark.slow
def test_a_run_that_is_killed_and_continued_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    good, hangs = knows_half("mrcr"), False

    def reply(request: dict[str, Any], number: int) -> Reply:
        said = good(request, number)
        return Reply(body=said.body, delay=60) if hangs and number >= 19 else said

    with CompletionServer(reply) as server:
        measured(folder, "mrcr", server.url, tmp_path / "whole", 5)
        assert len(server.requests) == 15
        hangs = True
        cut = ["eval", folder, "--server", server.url, "--suite", "mrcr", "--chat", "--endpoint", "chat"]
        cut += ["--lengths", LENGTH, "--samples", 5, "--beyond-config", "--concurrency", 1, "--retries", 0]
        program = Program(
            ROPEWALK, *cut, "--out", tmp_path / "cut", "--samples-dir", tmp_path / "cut samples"
        )
        try:
            answered = tmp_path / "cut" / "predictions.jsonl"
            assert until(lambda: answered.exists() and answered.read_bytes().count(b"\n") == 4, 120)
        finally:
            program.kill()
            program.communicate()
        assert not (tmp_path / "cut" / "results.json").exists()
        hangs = False
        measured(folder, "mrcr", server.url, tmp_path / "cut", 5)
        # Four were answered before, and the fifth was asked twice.
        assert len(server.requests) == 2 * 15 + 1
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
