"""``ropewalk eval --server`` against a real small HTTP server: what breaks is said, and nothing is lost or doubled."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.data import load_tokenizer
from ropewalk.evaluation.record import rescore
from ropewalk.rope import LongRope, for_all_readers, replace_methods
from tests.completion_server import CompletionServer, Reply, completion, refusal

Run = Callable[..., int]


def knowing(checkpoint: Path, hostile: bool = False) -> Callable[[dict[str, Any], int], Reply]:
    """Reads the key out of the prompt's token ids."""
    tokenizer = load_tokenizer(str(checkpoint))

    def reply(request: dict[str, Any], number: int) -> Reply:
        (ids,) = [request["prompt"]] if isinstance(request["prompt"][0], int) else request["prompt"]
        found = re.search(r"The pass key is (\d+)\.", tokenizer.decode(ids, skip_special_tokens=True))
        assert found is not None
        assert request["temperature"] == 0
        more = "\x1b[31m<script>alert(1)</script>" if hostile else ""
        return completion(f" {found[1]} {more}")

    return reply


ASKED = ("--suite", "passkey", "--lengths", "400,500", "--samples", 4, "--timeout", 5)


def test_server_answers_like_a_model_and_hostile_text_is_harmless(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with CompletionServer(knowing(checkpoint, hostile=True), models=["org/served"]) as server:
        assert run(checkpoint, *ASKED, "--server", server.url, "--out", out, "--concurrency", 3) == 0
        assert server.most_under_way <= 3
        assert len(server.requests) == 8
    printed = capsys.readouterr()
    assert "100.0" in printed.out
    assert printed.out.startswith(f"org/served on the server {server.url}\n")
    assert "\x1b[31m" not in printed.out
    page = (out / "report.html").read_text()
    assert "<script>" not in page
    # The model is the one that answered, not the folder of its tokenizer.
    assert re.search(r"<h1[^>]*>Evaluation of org/served</h1>", page)
    assert "served: passkey" in html.unescape(page)
    assert "\x1b" not in page
    record = json.loads((out / "results.json").read_text())
    assert [r["score"] for r in record["results"]] == [100, 100]
    assert record["model_sha256"] is None
    assert (record["model"], record["tokenizer"]) == ("org/served", str(checkpoint))
    assert record["backend"]["kind"] == "server"
    assert record["summary"]["effective_length"][0]["length"] == 500


def test_what_the_server_does_not_take_is_left_out_and_said_in_the_results(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, tokenizer = tmp_path / "out", load_tokenizer(str(checkpoint))

    def refuses(request: dict[str, Any]) -> Reply | None:
        said = "Unexpected fields in the request: {'repetition_penalty'}"
        if "repetition_penalty" not in request and not isinstance(request["prompt"], str):
            said = "prompt must be a string."
        elif "repetition_penalty" not in request:
            return None
        return Reply(422, json.dumps({"detail": said}).encode())

    def reply(request: dict[str, Any], number: int) -> Reply:
        request = {**request, "prompt": tokenizer(request["prompt"])["input_ids"]}
        return knowing(checkpoint)(request, number)

    asked = (
        checkpoint,
        *ASKED,
        "--out",
        out,
        "--server-extra",
        "top_k=1",
        "--server-extra",
        'user="me"',
        "--json",
    )
    with CompletionServer(reply, refuses=refuses) as server:
        assert run(*asked, "--server", server.url) == 0
        assert {(each["top_k"], each["user"]) for each in server.requests} == {(1, "me")}
    said = capsys.readouterr()
    record = json.loads(said.out)
    assert [r["score"] for r in record["results"]] == [100, 100]
    assert record["backend"]["prompts"] == "text"
    assert record["backend"]["left_out"] == ["repetition_penalty"]
    assert record["backend"]["extra"] == {"top_k": 1, "user": "me"}
    assert len(record["notes"]) == 3
    assert record["notes"][2].startswith(
        "The server does not report how many tokens of a prompt it read, so ropewalk"
    )
    for note in record["notes"]:
        assert note in said.err
        assert note in html.unescape((out / "report.html").read_text())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["top_k"], "--server-extra: 'top_k' is not of the form KEY=VALUE; write top_k=1"),
        (["=1"], "--server-extra: '=1' is not of the form KEY=VALUE"),
        (["stop=END"], "'END' is not a JSON value; write a string as stop='\"END\"'"),
        (["top_p=NaN"], "the request field top_p must be a JSON value, got nan"),
        (["max_tokens=5"], "the request field max_tokens cannot be set, because ropewalk sets it"),
        (["top_k=1", "top_k=2"], "--server-extra: top_k is given twice"),
    ],
)
def test_fields_that_cannot_be_sent_are_refused_before_the_server_is_asked(
    run: Run, checkpoint: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    options = [part for each in extra for part in ("--server-extra", each)]
    assert run(checkpoint, *ASKED, "--server", "http://127.0.0.1:9/v1", *options) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert run(checkpoint, "--server-extra", "top_k=1") == 2
    assert "--server-extra top_k=1 needs --server URL" in " ".join(capsys.readouterr().err.split())


def test_server_that_dies_loses_nothing_and_doubles_nothing(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, good = tmp_path / "out", knowing(checkpoint)

    def dies(request: dict[str, Any], number: int) -> Reply:
        return good(request, number) if number < 5 else Reply(500, b"gone", {}, hang_up=0)

    asked = (checkpoint, *ASKED, "--out", out, "--concurrency", 1, "--retries", 1)
    with CompletionServer(dies) as server:
        assert run(*asked, "--server", server.url) == 1
    said = capsys.readouterr()
    assert "run the same command again to resume" in said.err
    assert len((out / "predictions.jsonl").read_text().splitlines()) == 5
    assert not (out / "results.json").exists()
    # It comes back at another port, and only the user knows that it is the same.
    first = server.url
    with CompletionServer(good) as server:
        assert run(*asked, "--server", server.url) == 2
        assert not server.requests
        refused = " ".join(capsys.readouterr().err.split())
        assert f"{out} has answers of the server at {first}, but --server names {server.url}; " in refused
        assert run(*asked, "--server", server.url, "--same-model", "--json") == 0
        assert len(server.requests) == 3
    record = json.loads(capsys.readouterr().out)
    assert record["backend"]["addresses"] == [first, server.url]
    results = record["results"]
    assert [(r["n"], r["score"]) for r in results] == [(4, 100), (4, 100)]
    keys = [
        (each["length"], each["index"])
        for each in map(json.loads, (out / "predictions.jsonl").read_text().splitlines())
    ]
    assert sorted(keys) == [(length, index) for length in (400, 500) for index in range(4)]


@pytest.mark.parametrize(
    ("reply", "status", "message"),
    [
        (lambda request, number: Reply(body=b"<html>nginx</html>"), 1, "again to resume"),
        (lambda request, number: completion(None), 1, "again to resume"),
        (lambda request, number: completion(" 7", read=99), 1, "the server read only 99 of the "),
        (lambda request, number: completion("", "length", 0), 1, "the server ran out of context after 0 of "),
        (
            lambda request, number: refusal(400, "maximum context length is 64"),
            1,
            "maximum context length is 64",
        ),
    ],
)
def test_nonsense_is_no_empty_answer(
    run: Run,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    reply: Callable[[dict[str, Any], int], Reply],
    status: int,
    message: str,
) -> None:
    out = tmp_path / "out"
    with CompletionServer(reply) as server:
        asked = (checkpoint, *ASKED, "--out", out, "--retries", 1, "--server", server.url)
        assert run(*asked) == status
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.count("Traceback") == 0
    assert not (out / "results.json").exists()


def test_a_server_that_does_not_serve_the_model_is_told_before_anything_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*given: object) -> None:
        raise AssertionError("a tokenizer was loaded")

    monkeypatch.setattr("ropewalk.data.tokens.tokenise.load_tokenizer", never)
    monkeypatch.setattr("ropewalk.data.load_tokenizer", never)
    out = tmp_path / "out"
    with CompletionServer(lambda value, number: completion("x")) as server:
        for more, message in (
            (("--server", "http://127.0.0.1:9/v1"), "no model server responds at http://127.0.0.1:9/v1"),
            (
                ("--server", f"{server.url},http://127.0.0.1:9/v1"),
                "no model server responds at http://127.0.0.1:9/v1",
            ),
            (("--server", server.url, "--server-model", "other"), "does not serve other; it serves tiny"),
            (
                ("--server", server.url, "--server-model", "other", "--chat", "--endpoint", "chat"),
                "not serve other",
            ),
            (("--server", server.url, "--endpoint", "chat"), "--endpoint chat needs --chat"),
            (
                ("--server", server.url, "--suite", "short,perplexity"),
                "so short and perplexity cannot be measured",
            ),
            (
                ("--server", server.url, "--suite", "needle", "--tasks", "teacher_forced"),
                "so needle cannot be",
            ),
        ):
            assert run("a/model", *ASKED, "--out", out, *more) == 2
            assert message in " ".join(capsys.readouterr().err.split())
    listed = Reply(body=json.dumps({"data": [{"id": "tiny", "max_model_len": 450}]}).encode())
    with CompletionServer(lambda value, number: completion("x"), models_reply=listed) as server:
        assert run("a/model", *ASKED, "--server", server.url) == 2
        assert not server.trials
    assert "a context of 450 tokens" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()


def test_tasks_that_will_not_run_are_named_before_the_start(
    run: Run, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with CompletionServer(knowing(checkpoint)) as server:
        # The shortest prompts do not fit, so nothing is measured.
        asked = (checkpoint, "--server", server.url, "--lengths", "100", "--samples", 1)
        assert run(*asked, "--suite", "ruler,needle,perplexity") == 2
        told = capsys.readouterr().err.splitlines()
        assert told[:5] == [
            "ruler: niah_single_2, niah_single_3, niah_multikey_1, niah_multivalue, niah_multiquery will not run: the "
            "essays are missing; run ropewalk eval fetch, or give --essays, which takes a folder of .txt files, a .txt "
            "file or RULER's PaulGrahamEssays.json",
            "ruler: qa_1 will not run: SQuAD v2's dev set is missing; run ropewalk eval fetch, or give its file with "
            "--squad",
            "ruler: qa_2 will not run: HotpotQA's dev distractor set is missing; run ropewalk eval fetch, or give its "
            "file with --hotpotqa",
            "needle: teacher_forced will not run: a server gives answers, and no losses",
            "perplexity will not run: a server gives answers, and no losses",
        ]
        # By default, a server is not asked for what it cannot give.
        assert run(checkpoint, "--server", server.url, "--lengths", "400", "--samples", 1) == 0
        assert "will not run" not in capsys.readouterr().err


def test_what_servers_make_of_longrope_is_said_and_of_theta_is_not(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    longrope = shutil.copytree(checkpoint, tmp_path / "longrope")
    config = json.loads((longrope / "config.json").read_text())
    factors = LongRope(8, 10000.0, (1.0,) * 4, (1.0, 1.0, 2.0, 2.0), 1.1, 128)
    (longrope / "config.json").write_text(json.dumps(for_all_readers(replace_methods(config, factors))))
    for folder, said in ((longrope, True), (checkpoint, False)):
        with CompletionServer(knowing(checkpoint)) as server:
            assert run(folder, *ASKED, "--server", server.url) == 0
        told = capsys.readouterr().err
        assert ("served by llama.cpp: it computes RoPE type 'default'" in told) == said
        assert ("inputs above 128 tokens: vllm serve" in told) == said


def test_a_rejected_prompt_is_named_and_counted_neither_way_and_asked_again(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, good = tmp_path / "out", knowing(checkpoint)
    asked = (checkpoint, *ASKED, "--out", out, "--concurrency", 1)
    with CompletionServer(
        lambda request, number: refusal(400, "too long") if number == 2 else good(request, number)
    ) as server:
        assert run(*asked, "--server", server.url) == 0
        assert len(server.requests) == 8
    remark = "1 of 4 prompts are not counted, because the server rejected them (sample 2: HTTP 400: too long)"
    assert remark in " ".join(capsys.readouterr().out.split())
    first, second = json.loads((out / "results.json").read_text())["results"]
    assert (first["n"], first["score"], first["reason"]) == (3, 100, remark)
    assert first["details"]["rejected"] == [{"index": 2, "reason": "HTTP 400: too long"}]
    assert (second["n"], second["reason"], "rejected" in second["details"]) == (4, None, False)
    again = rescore(out)
    assert [each.to_json() for each in again.results] == [first, second]
    with CompletionServer(good) as server:
        assert run(*asked, "--server", server.url, "--same-model") == 0
        assert len(server.requests) == 1
    first, _ = json.loads((out / "results.json").read_text())["results"]
    assert (first["n"], first["reason"], "rejected" in first["details"]) == (4, None, False)


def test_a_length_beyond_the_servers_context_is_refused_before_any_prompt(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    entry = {"id": "tiny", "root": "other/base", "max_model_len": 499}
    listed = Reply(body=json.dumps({"data": [entry]}).encode())
    with CompletionServer(knowing(checkpoint), models_reply=listed) as server:
        assert run(checkpoint, *ASKED, "--out", out, "--server", server.url) == 2
        assert not server.requests
        assert not out.exists()
        said = " ".join(capsys.readouterr().err.split())
        assert f"{server.url} has a context of 499 tokens (max_model_len in /v1/models)" in said
        assert (
            "but the longest length is 500; start the server with a longer context (vLLM: --max-model-len 500"
            in said
        )
        # What fits is measured, and the record says what the server said.
        assert run(checkpoint, *ASKED, "--lengths", "400", "--out", out, "--server", server.url) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert f"says that it serves other/base, but the tokenizer is that of {checkpoint}" in said
    served = json.loads((out / "results.json").read_text())["served"]
    assert served == [{"context": 499, "root": "other/base", "source": "max_model_len in /v1/models"}]


def test_a_finished_evaluation_is_not_taken_for_that_of_another_server(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    asked = (checkpoint, *ASKED, "--out", out)
    with CompletionServer(knowing(checkpoint)) as first, CompletionServer(knowing(checkpoint)) as other:
        assert run(*asked, "--server", f"http://me:secret@{first.url.removeprefix('http://')}") == 0
        capsys.readouterr()
        # The same server, with or without a password, and a slash more.
        assert run(*asked, "--server", f"{first.url}/") == 0
        assert (
            f"the evaluation in {out} is already finished; nothing was evaluated" in capsys.readouterr().err
        )
        # A server more is one that the folder does not know either.
        for url in (other.url, f"{first.url},{other.url}"):
            assert run(*asked, "--server", url) == 2
            said = " ".join(capsys.readouterr().err.split())
            assert f"{out} has the finished evaluation of the server at {first.url}, but --server" in said
            assert f"names {other.url}; give another --out, or add --same-model if" in said
            assert "secret" not in said
        assert run(*asked, "--server", other.url, "--same-model") == 0
        said = capsys.readouterr()
        assert "already finished" in said.err
        # The result is that of the server that was measured.
        assert said.out.startswith(f"tiny on the server {first.url}\n")
        assert not other.requests


def test_another_checkpoint_under_the_same_name_is_another_evaluation(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def evaluated(root: str | None, context: int = 600, *more: str) -> int:
        entry = {"id": "tiny", "max_model_len": context, **({"root": root} if root else {})}
        listed = Reply(body=json.dumps({"data": [entry]}).encode())
        with CompletionServer(knowing(checkpoint), models_reply=listed) as server:
            return run(checkpoint, *ASKED, "--out", out, "--server", server.url, *more)

    assert evaluated("models/step-100") == 0
    # At another port, with another context.
    assert evaluated("models/step-100", 700, "--same-model") == 0
    capsys.readouterr()
    for root, said in (("models/step-200", "models/step-200"), (None, "unknown")):
        assert evaluated(root, 600, "--same-model") == 2
        told = " ".join(capsys.readouterr().err.split())
        assert f"the checkpoint on the server (models/step-100 in the folder, {said} given)" in told
