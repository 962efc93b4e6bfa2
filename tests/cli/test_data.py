"""The commands print a result on stdout, as a table or as JSON, and refuse bad input in one sentence."""

import json
from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from ropewalk.cli import data
from ropewalk.errors import RopewalkError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    backend = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2, "word": 3}, "<unk>"))
    backend.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("word " * 90)
    (folder / "b.jsonl").write_text('{"text": "word other", "source": "web"}\n' * 10 + '{"text": " "}\n')
    return folder


def call(*arguments: object) -> tuple[str, str]:
    app = typer.Typer()
    data.register(app)
    result = CliRunner().invoke(
        app, ["data", *map(str, arguments)], catch_exceptions=False, env={"COLUMNS": "120"}
    )
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


def test_pack_then_stats(corpus: Path, tokenizer: str, tmp_path: Path) -> None:
    arguments = (corpus, "--tokenizer", tokenizer, "--context", "0.0625k", "--out", tmp_path / "out")
    printed, remarks = call("pack", *arguments)
    assert remarks == ""
    assert "rows of 64 tokens" in printed
    assert "empty documents passed over" in printed
    (folder,) = (tmp_path / "out").iterdir()
    assert printed.splitlines()[-1] == str(folder)
    assert "nothing was done" in call("pack", *arguments)[1]
    printed, _ = call("stats", folder)
    assert "1 rows" in printed
    assert call("stats", tmp_path / "out")[0] == printed


def test_pack_prints_its_manifest_as_json(corpus: Path, tokenizer: str, tmp_path: Path) -> None:
    options = (
        "--context",
        "16",
        "--pattern",
        "full",
        "--bos",
        "none",
        "--no-eos",
        "--validation-documents",
        1,
    )
    arguments = ("pack", corpus, "--tokenizer", tokenizer, *options, "--out", tmp_path / "out", "--json")
    printed, remarks = call(*arguments)
    result = json.loads(printed)
    assert remarks == ""
    assert Path(result["folder"], "manifest.json").is_file()
    assert result["reused"] is False
    assert result["settings"]["eos"] is False
    assert result["counts"]["split"]["validation_documents"] == 1
    assert json.loads(call(*arguments)[0]) == {**result, "reused": True}


def test_stats_of_documents(corpus: Path, tokenizer: str) -> None:
    printed, _ = call("stats", corpus, "--tokenizer", tokenizer, "--json")
    result = json.loads(printed)
    assert {name: source["documents"] for name, source in result["sources"].items()} == {
        "corpus": 1,
        "web": 10,
    }
    assert result["total"]["tokens"] == 110
    printed, _ = call("stats", corpus, "--tokenizer", tokenizer)
    for figure in ("corpus", "90.9%", "81.8%", "64 to 127", "all"):
        assert figure in printed


def test_numbers_stay_whole_in_a_narrow_terminal(corpus: Path, tokenizer: str) -> None:
    app = typer.Typer()
    data.register(app)
    arguments = ["data", "stats", str(corpus), "--tokenizer", tokenizer]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "75"})
    assert "…" not in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--context", "12 monkeys"], "'12 monkeys' is no length"),
        (["--context", "8", "--pattern", "causal"], "unknown pattern 'causal'; choose one of full"),
        (["--context", "8", "--workers", "-2"], "workers must be 1 or more, got -2"),
        (["--context", "8", "--text-field", "body"], "no text field 'body'; the fields are text, source"),
        (["--context", "1M"], "not one row is full"),
        (["--context", "8", "--validation-fraction", "2"], "validation fraction"),
    ],
)
def test_bad_input_is_told(
    corpus: Path, tokenizer: str, tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(RopewalkError, match=message):
        call("pack", corpus, "--tokenizer", tokenizer, "--out", tmp_path / "out", *options)


def test_stats_without_a_tokenizer_are_refused(corpus: Path) -> None:
    with pytest.raises(RopewalkError, match="give --tokenizer"):
        call("stats", corpus)


@pytest.mark.parametrize("command", ["pack", "stats"])
def test_help_has_an_example(command: str) -> None:
    printed, _ = call(command, "--help")
    assert f"Example: ropewalk data {command}" in printed
    assert "[:config][@split]" in printed
