"""``ropewalk eval --server`` with a name and no files: what counts the tokens is found, said and recorded."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.data import load_tokenizer
from ropewalk.evaluation.results import SAMPLES
from tests.completion_server import CompletionServer, Reply, completion, message
from tests.evaluation.backends.test_text_counters import posts_of

Run = Callable[..., int]
ASKED = ("--suite", "passkey", "--lengths", "400", "--samples", 2, "--timeout", 5)


class Served:
    """A server of a model that finds every key, and reports the tokens that it reads, at most so many."""

    def __init__(
        self, checkpoint: Path, limit: int = 1_000_000, form: str | None = "vllm", **entry: Any
    ) -> None:
        self.tokenizer = load_tokenizer(str(checkpoint))
        self.limit = limit
        listed = Reply(body=json.dumps({"data": [{"id": "tiny", **entry}]}).encode())
        self.server = CompletionServer(
            lambda value, n: self.said(value, self.key(value)),
            models_reply=listed,
            posts=posts_of(form, self.tokenizer) if form else {},
            refuses=lambda value: self.said(value, "x", "length", 1) if value["max_tokens"] == 1 else None,
        )

    def text(self, value: dict[str, Any]) -> str:
        prompt = value.get("prompt", "")
        if isinstance(prompt, list):
            return str(self.tokenizer.decode(prompt))
        return prompt or "\n".join(each["content"] for each in value["messages"])

    def key(self, value: dict[str, Any]) -> str:
        found = re.search(r"The pass key is (\d+)\.", self.text(value))
        return found[1] if found else "none"

    def said(self, value: dict[str, Any], text: str, *how: Any) -> Reply:
        prompt = value.get("prompt")
        # A template writes seven tokens around a turn.
        read = len(prompt) if isinstance(prompt, list) else len(self.tokenizer(self.text(value)).input_ids)
        read += 7 if "messages" in value else 0
        made = message if "messages" in value else completion
        return made(text, *how, read=min(read, self.limit))

    def __enter__(self) -> CompletionServer:
        return self.server.__enter__()

    def __exit__(self, *error: object) -> None:
        self.server.__exit__(*error)


def record_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


@pytest.mark.parametrize("model", [(), ("tiny",)])
@pytest.mark.parametrize("form", ["vllm", "sglang", "llama.cpp"])
def test_a_server_s_own_tokenizer_counts_if_there_is_no_other(
    run: Run,
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    model: tuple[str],
    form: str,
) -> None:
    out = tmp_path / "out"
    with Served(checkpoint, form=form) as server:
        assert run(*model, *ASKED, "--server", server.url, "--out", out) == 0
        assert run(*model, *ASKED, "--server", server.url, "--out", out) == 0
        # Ids are sent, as with files, and nothing is asked twice.
        lines = (out / "predictions.jsonl").read_text().splitlines()
        told = [json.loads(line)["prompt_tokens"] for line in lines]
        assert [len(each["prompt"]) for each in server.requests] == told
    assert "tokens are counted by the server's /tokenize" in capsys.readouterr().err
    record = record_of(out)
    assert [each["score"] for each in record["results"]] == [100]
    assert (record["model"], record["tokenizer"], record["tokenizer_sha256"]) == ("tiny", None, None)
    assert record["tokens"]["tokens"] == "counted by the server's /tokenize"
    assert 0.9 * 400 <= record["results"][0]["details"]["prompt_tokens"][0] <= 400
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


def test_the_checkpoint_that_the_server_names_counts_before_the_server(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Served(checkpoint, root=str(checkpoint)) as server:
        assert run(*ASKED, "--server", server.url, "--out", tmp_path / "a") == 0
        assert run(*ASKED, "--server", server.url, "--out", tmp_path / "b", "--tokenizer", "server") == 0
        assert run(*ASKED, "--server", server.url, "--out", tmp_path / "c", "--tokenizer", checkpoint) == 0
    said = capsys.readouterr().err
    assert (
        f"tokens are counted with the tokenizer of {checkpoint}, the checkpoint that the server names" in said
    )
    a, b, c = (record_of(tmp_path / name) for name in "abc")
    assert a["tokenizer"] == c["tokenizer"] == str(checkpoint)
    assert a["tokenizer_sha256"] == c["tokenizer_sha256"] is not None
    assert b["tokenizer_sha256"] is None
    # The server's tokenizer makes the same prompts as its files.
    digests = [each["results"][0]["details"][SAMPLES] for each in (a, b, c)]
    assert len({*digests}) == 1


def test_words_count_only_when_they_are_asked_for_and_the_report_says_so(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with Served(checkpoint, form=None) as server:
        for wrong in ("a/b", "./no/folder", "nobody"):
            assert run(wrong, *ASKED, "--server", server.url) == 2
            said = " ".join(capsys.readouterr().err.split())
            assert re.search(rf"there is no folder (or file )?{wrong}[,;]", said)
            assert "the server serves tiny: leave MODEL out, or say with --tokenizer what counts" in said
        assert run(*ASKED, "--server", server.url) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "the server does not count tokens with /tokenize (HTTP 404: Not Found)" in said
        assert "or --tokenizer words to estimate tokens from words" in said
        words = ("--tokenizer", "words", "--server", server.url)
        for more, message in (
            (
                ("--send", "ids"),
                "--send ids needs the tokens of prompts, and --tokenizer words only estimates",
            ),
            (("--suite", "ruler", "--compat", "nvidia"), "--compat nvidia needs the tokens of prompts"),
            (("--chat",), "the tokenizer has no chat template; add --endpoint chat"),
        ):
            assert run(*ASKED, *words, *more) == 2
            assert message in " ".join(capsys.readouterr().err.split())
        assert not server.requests
        for more in ((), ("--chat", "--endpoint", "chat")):
            assert run(*ASKED, *words, "--out", out / str(len(more)), *more) == 0
            assert "Lengths are approximate: tokens are estimated from words" in capsys.readouterr().out
    estimates: list[int] = []
    for name in "03":
        record = record_of(out / name)
        assert record["results"][0]["score"] == 100
        assert record["tokens"]["approximate"] is True
        # Of its own kind of text, the server counts other than of mixed text.
        assert record["results"][0]["details"]["tokens_per_piece"] != record["tokens"]["tokens_per_piece"]
        # A byte is a token of this server.
        assert 3 < record["tokens"]["tokens_per_piece"] < 6
        lines = (out / name / "predictions.jsonl").read_text().splitlines()
        estimates += [json.loads(line)["prompt_tokens"] for line in lines]
        page = html.unescape((out / name / "report.html").read_text())
        assert "Lengths are approximate" in page
        assert re.search(
            r"Tokens</\w+>\s*<\w+>tokens are estimated from words, as --tokenizer words says", page
        )
    # A byte is a token of this server; estimates are scaled by its count of one prompt.
    texts = [each.get("prompt") or each["messages"][0]["content"] for each in server.requests]
    assert len(texts) == len(estimates) == 4
    sent = [len(text) + 7 * ("messages" in each) for text, each in zip(texts, server.requests, strict=True)]
    assert sorted(sent) == pytest.approx(sorted(estimates), rel=0.06)


@pytest.mark.parametrize("endpoint", [(), ("--chat", "--endpoint", "chat")])
@pytest.mark.parametrize("source", ["words", "server"])
def test_a_server_that_cuts_prompts_without_a_word_gives_no_scores(
    run: Run, checkpoint: Path, capsys: pytest.CaptureFixture[str], source: str, endpoint: tuple[str, ...]
) -> None:
    """As Ollama does above its num_ctx."""
    with Served(checkpoint, limit=3000) as server:
        status = run(*ASKED, "--server", server.url, "--tokenizer", source, "--send", "text", *endpoint)
        assert status == 0
        capsys.readouterr()
        long = (*ASKED, "--lengths", "6000", "--server", server.url, "--tokenizer", source, *endpoint)
        status = run(*long, "--send", "text")
    said = " ".join(capsys.readouterr().err.split())
    if source == "words":
        assert status == 2
        assert re.search(r"read only 3,000 of at least [45],\d{3} tokens of a text", said)
    else:
        assert status == 1
        assert re.search(r"the server read only 3000 of the 5\d{3} tokens of the prompt", said)


def test_lengths_come_from_the_server_if_there_is_no_config(
    run: Run, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--suite", "passkey", "--samples", 1, "--tokenizer", "server")
    with Served(checkpoint, max_model_len=380) as server:
        assert run(*asked, "--server", server.url, "--out", tmp_path / "out") == 0
    assert record_of(tmp_path / "out")["lengths"] == [380]
    with Served(checkpoint) as server:
        assert run(*asked, "--server", server.url) == 2
    assert (
        "neither the server nor a config says how long a prompt can be; give --lengths"
        in capsys.readouterr().err
    )


def test_the_model_of_several_may_be_named_by_the_first_argument(
    run: Run, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = load_tokenizer(str(checkpoint))
    posts = {
        "/tokenize": lambda value: {"tokens": tokenizer(value["prompt"], add_special_tokens=False).input_ids},
        "/detokenize": lambda value: {"prompt": tokenizer.decode(value["tokens"])},
    }
    with CompletionServer(lambda value, n: completion("1"), models=["x", "y"], posts=posts) as server:
        assert run("y", *ASKED, "--server", server.url) == 0
        assert {each["model"] for each in (*server.requests, *server.trials)} == {"y"}
        assert run("z", *ASKED, "--server", server.url) == 2
    assert "serves x, y; name one model with --server-model" in capsys.readouterr().err


def test_a_model_in_memory_needs_a_name(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--suite", "passkey") == 2
    assert "MODEL is missing; name a checkpoint, or a server with --server URL" in capsys.readouterr().err


def test_words_are_scaled_by_the_shortest_question_of_a_file(
    run: Run, checkpoint: Path, tmp_path: Path
) -> None:
    rows = [
        {
            "prompt": json.dumps([{"role": "user", "content": "The grass is green. " * size}]),
            "answer": "0123456789green",
            "random_string_to_prepend": "0123456789",
            "n_needles": 2,
        }
        for size in (300, 1300, 1400)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("--suite", "openai_mrcr", "--tasks", "openai_mrcr_2", "--lengths", "1k,8k,16k")
    how = ("--tokenizer", "words", "--benchmark-data", f"openai_mrcr={data}", "--timeout", 5)
    with Served(checkpoint) as server:
        assert run(*asked, *how, "--server", server.url, "--out", tmp_path / "out") == 0
    results = [each for each in record_of(tmp_path / "out")["results"] if each["task"] == "openai_mrcr_2"]
    # Nothing has 512 to 1,024 tokens; the shortest question that has a length scales the words of all.
    assert (results[0]["length"], results[0]["status"]) == (1024, "not run")
    assert sum(each["n"] for each in results) >= 1
