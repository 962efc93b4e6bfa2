"""With ropewalk-core alone, an evaluation on a server measures what it measures with everything installed."""

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ropewalk.cli.app import main
from ropewalk.data.read.embedded import demo_model_path
from tests.completion_server import CompletionServer, Reply, completion, few_certificates, message
from tests.places import ROOT


def reply(value: dict[str, Any], number: int) -> Reply:
    """An answer that follows from the prompt, of which it repeats some: some scores are above 0, and some are not."""
    text = str(value.get("prompt") or [each["content"] for each in value["messages"]])
    digest = hashlib.sha256(text.encode()).hexdigest()
    words = text.split()
    made = message if "messages" in value else completion
    return made(f"{digest[:4]} {' '.join(words[int(digest, 16) % len(words) :][:20])}")


TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}"
    "<s>assistant:{% if not enable_thinking %} <think></think>{% endif %}{% endif %}"
)
CASES = {
    "plain": ["--suite", "ruler,passkey,longeval,needle"],
    "text": ["--suite", "passkey", "--send", "text"],
    "chat": [
        *("--suite", "ruler,passkey,longeval,needle", "--exclude", "teacher_forced"),
        *("--chat", "--system-prompt", "Grüße 🙂"),
    ],
    "thoughts": ["--suite", "passkey,longeval", "--chat", "--thinking-tokens", "20"],
    "turns": ["--suite", "passkey,longeval,needle", "--chat", "--endpoint", "chat"],
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CompletionServer]:
    few_certificates(monkeypatch, tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with CompletionServer(reply) as server:
        yield server


def core(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.core_program", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def content(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.jsonl")}


@pytest.mark.parametrize("case", CASES)
def test_predictions_are_the_same_bytes(case: str, served: CompletionServer, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo_model_path(), model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (essays := tmp_path / "essays.txt").write_text((ROOT / "README.md").read_text())
    # One request after the other, so that the order of lines is no matter of chance.
    given = ["eval", str(model), "--server", served.url, *CASES[case], "--concurrency", "1"]
    given += ["--lengths", "2k", "--samples", "1", "--beyond-config"]
    if "ruler" in given[5]:
        given += ["--essays", str(essays)]

    def into(name: str) -> list[str]:
        return [*given, "--out", str(tmp_path / name), "--samples-dir", str(tmp_path / f"{name} samples")]

    assert main(into("full")) == 0
    done = core(*into("core"))
    assert done.returncode == 0, done.stderr
    assert "transformers" not in done.stderr
    full, light = tmp_path / "full", tmp_path / "core"
    predictions = (full / "predictions.jsonl").read_bytes()
    assert predictions
    assert (light / "predictions.jsonl").read_bytes() == predictions
    assert content(tmp_path / "core samples") == content(tmp_path / "full samples") != {}
    results, others = (json.loads((each / "results.json").read_text()) for each in (full, light))
    unchecked = others.pop("notes")
    assert (
        unchecked[-1]
        == f"transformers is not installed, so no server's RoPE is compared with that of {model}"
    )
    assert {**others, "notes": unchecked[:-1], "date": results["date"]} == {"notes": [], **results}
    # One installation goes on where the other stopped: nothing is asked again.
    asked = len(served.requests)
    done = core(*into("full"))
    assert (done.returncode, len(served.requests)) == (0, asked), done.stderr
    assert (full / "predictions.jsonl").read_bytes() == predictions


def test_what_reads_results_works(served: CompletionServer, tmp_path: Path) -> None:
    done = core(
        *(
            "eval",
            "embedded",
            "--server",
            served.url,
            "--suite",
            "passkey",
            "--lengths",
            "256",
            "--samples",
            "2",
        ),
        *("--out", tmp_path / "a", "--json"),
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"][0]["task"] == "passkey"
    assert (tmp_path / "a" / "report.html").stat().st_size
    two = (tmp_path / "a", shutil.copytree(tmp_path / "a", tmp_path / "b"))
    for command in (["eval", "compare", *two], ["eval", "rescore", two[0]], ["compare", *two]):
        done = core(*command)
        assert (done.returncode, done.stderr) == (0, "")
