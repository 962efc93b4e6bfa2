"""``data stats`` counts documents and rows alike, as a table, as JSON and as a picture."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from byte_checkpoint import save_byte_checkpoint
from ropewalk.cli import data
from ropewalk.cli.data_stats import BY_EMBEDDED
from ropewalk.data.attention_share import share_of_documents
from ropewalk.errors import RopewalkError


def call(*arguments: object) -> tuple[str, str]:
    app = typer.Typer()
    data.register(app)
    result = CliRunner().invoke(
        app, ["data", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


def counted(*arguments: object) -> dict[str, Any]:
    printed, remarks = call("stats", *arguments, "--json")
    assert remarks == ""
    found: dict[str, Any] = json.loads(printed)
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, so that a text's length is its number of tokens."""
    return save_byte_checkpoint(tmp_path_factory.mktemp("model"), 64)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    texts = [("web", "x" * 20), ("books", "y" * 300), ("web", "x" * 20), ("web", "z" * 50)] * 2
    lines = [json.dumps({"text": text, "source": source}) for source, text in texts]
    (folder / "a.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def rows(corpus: Path, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rows") / "mixed"
    shares = ("--shares", "web=0.5,books=0.5", "--total-tokens", 600)
    call("pack", corpus, "--tokenizer", tokenizer, "--length", 64, *shares, "--out", out, "--json")
    return out


KEYS = {
    "attention_ideal_speedup",
    "attention_share",
    "attention_skipped",
    "corpus",
    "documents",
    "documents_per_row",
    "documents_per_row_quantiles",
    "histogram",
    "length_quantiles",
    "long_shares",
    "mean_length",
    "mixture",
    "packed",
    "repeats",
    "row_length",
    "rows",
    "sources",
    "tokenizer",
    "tokens",
}


def test_documents_as_json(corpus: Path, tokenizer: Path) -> None:
    found = counted(corpus, "--tokenizer", tokenizer, "--length", "0.0625k")
    assert set(found) == KEYS
    assert (found["documents"], found["tokens"], found["row_length"]) == (8, 780, 64)
    assert found["tokenizer"] == str(tokenizer)
    assert list(found["sources"]) == ["books", "web"]
    web = found["sources"]["web"]
    assert (web["documents"], web["tokens"], web["mixture_ratio"]) == (6, 180, 0.75)
    assert web["length_quantiles"]["0.5"] == 20
    assert web["histogram"][0] == {"start": 16, "end": 32, "documents": 4, "tokens": 80}
    assert found["repeats"] == {"documents": 3, "tokens": 300 + 3 * 20 + 50, "most": 4}
    assert found["attention_share"] == share_of_documents(np.array([20, 300, 20, 50] * 2), 64)
    assert (found["packed"], found["rows"], found["mixture"], found["corpus"]) == (False, None, None, None)


def test_rows_as_json(rows: Path) -> None:
    found = counted(rows)
    assert set(found) == KEYS
    assert found["packed"]
    assert found["row_length"] == 64
    assert found["tokens"] == 63 * found["rows"]
    assert found["mixture"]["tokens_asked"] == 600
    assert found["corpus"]["tokens"] == 780
    assert set(found["corpus"]) == KEYS - {"mixture", "corpus", "tokenizer"}
    assert found["attention_share"]["full"] == 1
    assert 0 < found["attention_share"]["intra_document"] < found["attention_share"]["anchor"] < 1
    assert found["documents_per_row"] == found["documents"] / found["rows"]
    # 180 tokens of web are there and 300 are asked for.
    assert found["repeats"]["documents"] > 0


def test_documents_in_words(corpus: Path, tokenizer: Path) -> None:
    printed, remarks = call("stats", corpus, "--tokenizer", tokenizer)
    assert remarks == ""
    for words in ("76.9 %", "mixture ratio", "256 to 511", "█", "rows of 131,072 tokens filled with these"):
        assert words in printed
    assert "3 texts are there more than once, 4 times at most" in printed


def test_rows_in_words(rows: Path) -> None:
    printed, _ = call("stats", rows)
    for words in ("pieces", "Mixture", "asked", "achieved", "documents a row", "read more than once"):
        assert words in printed
    assert call("stats", rows.parent)[0] == printed


def test_the_embedded_tokenizer_counts_where_none_is_given_and_says_so(corpus: Path) -> None:
    printed, remarks = call("stats", corpus, "--json")
    assert remarks == BY_EMBEDDED + "\n"
    assert json.loads(printed)["tokenizer"] == "embedded"


def test_a_picture_is_drawn(rows: Path, corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    for name, arguments in (("rows", (rows,)), ("raw", (corpus, "--tokenizer", tokenizer))):
        path = tmp_path / f"{name}.svg"
        assert f"drawn: {path}" in call("stats", *arguments, "--plot", path)[1]
    assert "<!-- in rows -->" in (tmp_path / "rows.svg").read_text()
    assert "<!-- before -->" in (tmp_path / "rows.svg").read_text()
    assert "<!-- Document lengths -->" in (tmp_path / "raw.svg").read_text()


def test_numbers_stay_whole_in_a_narrow_terminal(corpus: Path, tokenizer: Path) -> None:
    app = typer.Typer()
    data.register(app)
    arguments = ["data", "stats", str(corpus), "--tokenizer", str(tokenizer)]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "40"})
    assert result.exit_code == 0
    assert "…" not in result.stdout


def test_bad_input_is_told(rows: Path, corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (
            (rows, "--tokenizer", "embedded"),
            r"holds packed rows, which have their own; leave --tokenizer out",
        ),
        ((rows, "--length", "4k"), r"leave --length out"),
        ((corpus, rows), r"holds packed rows; count one folder of rows alone"),
        ((corpus, "--length", "1"), r"2 tokens or more, got --length 1"),
        ((corpus, "--length", "long"), r"'long' is no length"),
        ((corpus, "--plot", "a.pdf"), r"\.png or \.svg, got a\.pdf"),
        ((tmp_path / "nowhere",), r"nowhere"),
    ):
        with pytest.raises(RopewalkError, match=message):
            call("stats", *arguments)


def test_help_has_an_example() -> None:
    printed, _ = call("stats", "--help")
    assert "Example: ropewalk data stats" in printed
    assert "[:config][@split]" in printed
