"""``data preview`` shows every boundary, and lets nothing of a document reach the terminal as a command."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ropewalk.cli import data
from ropewalk.data import open_rows
from ropewalk.errors import RopewalkError
from tests.cli.byte_checkpoint import save_byte_checkpoint
from tests.cli.data_command_cases import call

EVIL = "[red]m[/red] \x1b[31m\x1b]0;t\x07 \x9b1m \u202e <s>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_checkpoint(tmp_path_factory.mktemp("model"), 64)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    texts = [("web", "a\nb" + "c" * 30), ("ev\x1bil", EVIL), ("web", "d" * 200)]
    lines = [json.dumps({"text": text, "source": source}) for source, text in texts]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


def packed(corpus: Path, tokenizer: Path, out: Path, *options: object) -> Path:
    call("pack", corpus, "--tokenizer", tokenizer, *options, "--out", out)
    return out


@pytest.fixture(scope="module")
def rows(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = ("--length", 512, "--tag", "T:", "--remainder", "pad")
    return packed(corpus, tokenizer, tmp_path_factory.mktemp("rows") / "rows", *options)


def test_boundaries_tags_anchor_and_padding_are_visible(rows: Path) -> None:
    printed, remarks = call("preview", rows, "--tokens", 5)
    assert remarks == ""
    lines = printed.splitlines()
    assert lines[1] == "tokens added to documents: anchor <s> (bos_token), document end </s> (eos_token)"
    assert lines[3] == "sequence 0 of 1: 512 tokens, 3 documents, pattern anchor"
    assert lines[4] == "  ⟦«<s>»⟧  anchor, token 0"
    # 2 bytes of tag, 33 of text, EOS.
    assert lines[5] == "■ document 0, web, tokens 1..36 (36)"
    assert lines[6] == "  ⟦T:⟧a↵b … 26 tokens … cccc«</s>»"
    assert lines[7].startswith("■ document 1, ev\\x1bil, tokens 37..")
    assert lines[9].startswith("■ document 2, web, tokens ")
    assert re.fullmatch(r"□ padding, tokens [\d]+\.\.511 \([\d]+\), not trained on", lines[11])
    assert len(lines) == 12


def test_no_command_of_a_document_reaches_the_terminal(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    # Colours are the program's own: everything else that a terminal would take for a command is not there.
    console = Console(file=out, force_terminal=True, color_system="standard", highlight=False, width=60)
    monkeypatch.setattr(data, "results", lambda: console)
    call("preview", rows)
    printed = out.getvalue()
    assert "\x1b[36m" in printed
    plain = re.sub(r"\x1b\[[\d;]*m", "", printed)
    assert not set(plain) & {"\x1b", "\x07", "\x9b", "\u202e"}
    assert "[red]m[/red] \\x1b[31m\\x1b]0;t\\x07 \\x9b1m \\u202e «<s>»«</s>»" in plain
    # Without a terminal there are the same characters, and no colour.
    monkeypatch.undo()
    assert call("preview", rows)[0] == plain
    # What the document says in colour is not in colour.
    assert "\x1b[31m" not in printed


def test_interleaved_chunks_are_numbered(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    options = ("--length", 256, "--interleave", "--chunk-min", 8, "--chunk-max", 512, "--pattern", "full")
    folder = packed(corpus, tokenizer, tmp_path / "rows", *options)
    printed, _ = call("preview", folder)
    first = open_rows(folder).packed(0)
    assert len(first.segment_documents) > len(first.sources)
    at, seen = 0, []
    expected = []
    for length, document in zip(first.segment_lengths, first.segment_documents, strict=True):
        seen.append(document)
        of = first.segment_documents.count(document)
        part = f", chunk {seen.count(document)} of {of}" if of > 1 else ""
        source = first.sources[document].replace("\x1b", "\\x1b")
        expected.append(
            f"■ document {first.numbers[document]}, {source}, tokens {at}..{at + length - 1} ({length}){part}"
        )
        at += length
    headers = [line for line in printed.splitlines()[1:] if line.startswith("■")]
    assert headers[: len(expected)] == expected
    assert "anchor" not in printed.splitlines()[3]


def test_spans_as_json_hold_each_token_and_the_text(rows: Path, tokenizer: Path) -> None:
    printed, _ = call("preview", rows, "--tokens", 1000, "--json")
    assert "\x1b" not in printed
    found: dict[str, Any] = json.loads(printed)
    assert (found["context"], found["pattern"], found["tokenizer"]) == (512, "anchor", str(tokenizer))
    (row,) = found["rows"]
    assert row["anchor"] == {"kind": "anchor", "start": 0, "stop": 1, "masked": True, "text": "<s>"}
    spans = [span for chunk in row["chunks"] for span in chunk["spans"]]
    assert spans[0] == {"kind": "text", "start": 1, "stop": 3, "masked": True, "text": "T:"}
    assert [span["start"] for span in spans] == [1, *(span["stop"] for span in spans[:-1])]
    assert spans[-1]["stop"] == 512
    texts = ["".join(span["text"] or "" for span in chunk["spans"]) for chunk in row["chunks"]]
    assert texts == ["T:a\nb" + "c" * 30 + "</s>", f"T:{EVIL}</s>", "T:" + "d" * 200 + "</s>", ""]
    assert [chunk["padding"] for chunk in row["chunks"]] == [False, False, False, True]


def test_as_many_rows_as_there_are(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    folder = packed(corpus, tokenizer, tmp_path / "rows", "--length", 32)
    there = len(open_rows(folder))
    for asked in (1, 2, there + 5):
        printed, _ = call("preview", folder, "--rows", asked)
        assert len(re.findall(r"^sequence \d+ of", printed, re.MULTILINE)) == min(asked, there)


def test_a_document_that_goes_on_says_so(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    """Documents of 34, EVIL's and 201 tokens with EOS, in rows of 31 own tokens: no end is a row's end."""
    folder = packed(corpus, tokenizer, tmp_path / "rows", "--length", 32, "--remainder", "pad")
    printed, _ = call("preview", folder, "--rows", 99)
    firsts = [
        line for line in printed.splitlines() if line.startswith("■ document") and " tokens 1.." in line
    ]
    assert len(firsts) == len(open_rows(folder)) > 5
    assert [line.partition(", continued from sequence ")[2] for line in firsts] == [
        "",
        *map(str, range(len(firsts) - 1)),
    ]
    assert printed.count("continued from") == len(firsts) - 1
    rows = json.loads(call("preview", folder, "--rows", 2, "--json")[0])["rows"]
    assert [[chunk["continues"] for chunk in row["chunks"]] for row in rows] == [[False], [True, False]]


def test_best_fit_leaves_unsaid_what_numbers_cannot_tell(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    folder = packed(corpus, tokenizer, tmp_path / "rows", "--length", 32, "--packing", "best_fit")
    rows = open_rows(folder)
    assert any(rows.packed(n).numbers[0] == rows.packed(n - 1).numbers[-1] for n in range(1, len(rows)))
    assert "continued from" not in call("preview", folder, "--rows", 99)[0]


def test_damaged_and_unfinished_rows_are_refused(rows: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(rows, tmp_path / "copied")
    path = folder / "rows-00000.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(RopewalkError, match=r"rows-00000\.arrow is damaged"):
        call("preview", folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(
        RopewalkError, match=r"the rows in .*copied are incomplete; to complete them, repeat the command"
    ):
        call("preview", folder)


def test_bad_input_is_told(rows: Path, corpus: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((corpus,), r"corpus\d* holds no packed rows; pack documents first: ropewalk data pack"),
        ((tmp_path / "nowhere",), r"there is no folder '.*nowhere'"),
        ((rows, "--rows", 0), r"--rows must be 1 or more, got 0"),
        ((rows, "--tokens", 0), r"--tokens must be 1 or more, got 0"),
        ((rows, "--tokenizer", "embedded"), r"was packed with another tokenizer"),
    ):
        with pytest.raises(RopewalkError, match=message):
            call("preview", *arguments)


def test_help_has_an_example() -> None:
    printed, _ = call("preview", "--help")
    assert "Example: ropewalk data preview" in printed
