"""Nothing that others wrote commands the terminal: not through a console, a table, a bar, a note or an error."""

import importlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table
from rich.text import Text

from ropewalk.cli import output
from ropewalk.cli.app import main
from ropewalk.cli.output import print_json, print_whole
from ropewalk.cli.progress import ConsoleReporter
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.reporting.tables import ResultTable
from tests.cli.output_cases import ANY, EVIL, acting, printed_by


def table_of(text: Any) -> Table:
    table = Table(title=text, caption=text)
    table.add_column(text)
    table.add_row(text)
    return table


@given(ANY)
def test_no_way_of_printing_lets_a_control_character_through(text: str) -> None:
    result = ResultTable(text, (text, "n"), ((text, text),), notes=(text,)).rich()
    for show in (
        lambda console: console.print(text),
        lambda console: console.print(text, style="bold", soft_wrap=True),
        lambda console: console.print(Text(text)),
        lambda console: console.print(table_of(text)),
        lambda console: console.print(table_of(Text(text))),
        lambda console: console.print(result),
        lambda console: console.say(text),
        lambda console: ConsoleReporter(console).note(text),
    ):
        assert acting(printed_by(show).replace("\t", " ")) == []


@given(st.recursive(ANY, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(ANY, inner, max_size=2)))
def test_json_on_stdout_is_printable_ascii(value: Any) -> None:
    out, before = io.StringIO(), sys.stdout
    sys.stdout = out
    try:
        print_json(value)
    finally:
        sys.stdout = before
    assert all(" " <= each <= "~" or each == "\n" for each in out.getvalue())
    assert json.loads(out.getvalue()) == value


def test_what_reporting_yields_is_printed_each_in_its_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    words = "as many words as fill more than one line"
    output.show([words, ResultTable(words, ("a",), (("b" * 30,),)), "", Text(words)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [words, words]
    assert lines[2].strip() == "a"
    assert lines[3:5] == ["b" * 30, ""]
    assert len(lines[5:]) > 1
    assert " ".join(line.strip() for line in lines[5:]) == words


def test_without_a_terminal_or_a_width_no_line_is_folded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    words = "word " * 40 + "and/a/long/path" * 10
    output.show([Text(words), ResultTable(words, ("a",), (("b",),), notes=(words,))])
    assert [line for line in capsys.readouterr().out.splitlines() if line == words] == [words] * 3


@pytest.mark.parametrize("error", [RopewalkError, KeyError, OSError])
@pytest.mark.parametrize("debug", [[], ["--debug"]])
def test_errors_of_any_kind_are_shown_harmless(
    error: type[Exception],
    debug: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ropewalk.planning import inspection

    # Imported for the first time under the replacement, it would keep the broken function for all tests that follow.
    importlib.import_module("ropewalk.planning.run")

    def broken(model: str, given_length: int | None) -> None:
        raise error(f"{EVIL}\nerror: forged" + "x" * 10_000)

    monkeypatch.setattr(inspection, "read_checkpoint", broken)
    assert main([*debug, "inspect", "embedded"]) in (1, 2)
    printed = capsys.readouterr().err
    assert acting(printed) == []
    last = printed.splitlines()[-1]
    assert last.startswith("error: ")
    assert len(last) < 5000
    assert debug or printed.count("\n") == 1


def error_of(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(list(map(str, arguments))) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert acting(captured.err) == []
    assert captured.err.count("\n") == 1
    return captured.err


def test_names_from_files_and_folders_reach_the_terminal_in_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = EVIL.replace("/", "_")
    recipe, lines, folder = tmp_path / "recipe.yaml", tmp_path / "lines.jsonl", tmp_path / f"{name}\n"
    recipe.write_text(json.dumps({"output": "o", "model": "m", "\x1b[2Jkey": 1}))
    assert r"unknown key \x1b[2Jkey" in error_of(["extend", recipe], capsys)
    assert r"\x1b[2J" in error_of(["extend", "demo", "--set", "\x1b[2J=1"], capsys)
    lines.write_text(json.dumps({EVIL.rstrip("\udcff"): "text"}) + "\n")
    assert r"\x1b[2J" in error_of(["data", "stats", lines, "--tokenizer", "embedded", "--workers", 1], capsys)
    folder.mkdir()
    assert r"\x1b[2J" in error_of(["inspect", folder], capsys)
    assert r"\x1b[2J" in error_of([EVIL.rstrip("\udcff")], capsys)
    assert r"\x1b[2J" in error_of(["extend", "demo", f"--{EVIL.rstrip(chr(0xDCFF))}"], capsys)


def test_names_in_results_and_packed_rows_reach_the_terminal_in_writing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = TaskResult.not_run("passkey", EVIL, 512, EVIL)
    record = {"model": EVIL, "settings": {"threshold": 85}, "results": [result.to_json()]}
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(json.dumps(record))
    assert main(["eval", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    captured = capsys.readouterr()
    assert acting(captured.out + captured.err) == []
    assert r"A \x1b[2J" in captured.out
    lines = tmp_path / "lines.jsonl"
    lines.write_text(json.dumps({"text": "some text", "source": EVIL.rstrip("\udcff")}) + "\n")
    assert main(["data", "stats", str(lines), "--length", "512", "--workers", "1"]) == 0
    captured = capsys.readouterr()
    assert acting(captured.out + captured.err) == []
    assert r"\x1b[2J" in captured.out
    config = tmp_path / "model"
    config.mkdir()
    llama = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    named = {"torch_dtype": EVIL, "architectures": [EVIL]}
    (config / "config.json").write_text(json.dumps({**llama, **named, "num_hidden_layers": 2}))
    main(["inspect", str(config)])
    captured = capsys.readouterr()
    assert acting(captured.out + captured.err) == []


def test_what_the_library_logs_is_harmless_too(capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    assert main(["--version"]) == 0
    logging.getLogger("ropewalk").warning("the model %s", EVIL)
    captured = capsys.readouterr()
    assert r"the model \x1b[2J" in captured.err
    assert acting(captured.err) == []


def test_a_wide_table_keeps_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    print_whole(ResultTable(EVIL, ("model", "n"), ((EVIL, "1,234,567"),)).rich())
    printed = capsys.readouterr().out
    assert "1,234,567" in printed
    assert acting(printed) == []
