"""ropewalk probe-trainer: table, JSON and exit status."""

import json

import pytest

from ropewalk.cli.app import main

LOOP = """
import sys

def separate(documents):
    return [sum(each) / len(each) for each in documents]

def leaking(documents):
    print("printed by the trainer")
    return [sum(map(sum, documents)) / len(each) for each in documents]
"""


@pytest.fixture
def loop(tmp_path):
    file = tmp_path / "a_loop_to_probe.py"
    file.write_text(LOOP)
    return file


def test_separate_documents_pass(loop, capsys):
    assert main(["probe-trainer", f"{loop}:separate", "--tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert "loss function: one step on 8 documents" in out
    assert "documents apart" in out
    assert "passed" in out


def test_a_leak_fails_and_the_json_is_alone_on_stdout(loop, capsys):
    assert main(["probe-trainer", f"{loop}:leaking", "--tokens", "2", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert [check["passed"] for check in found["checks"]] == [False] + [None] * 8
    assert "1 of 9 checks failed: 'documents apart'" in captured.err


def test_bad_input_has_status_2(loop, capsys):
    assert main(["probe-trainer", f"{loop}:absent"]) == 2
    assert "it has separate, leaking" in capsys.readouterr().err
