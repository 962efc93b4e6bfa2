"""The commands print a result on stdout, as a table or as JSON, and refuse bad input in one sentence."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from ropewalk.cli.app import main
from ropewalk.errors import RopewalkError
from tests.cli.data_command_cases import call


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


def test_pack_then_stats(corpus: Path, tokenizer: str, tmp_path: Path) -> None:
    arguments = (corpus, "--tokenizer", tokenizer, "--length", "0.0625k", "--out", tmp_path / "out")
    printed, remarks = call("pack", *arguments)
    assert remarks == ""
    assert "sequences of 64 tokens" in printed
    assert "empty documents skipped" in printed
    assert printed.splitlines()[-1] == str(tmp_path / "out")
    assert "nothing to do" in call("pack", *arguments)[1]
    printed, _ = call("stats", tmp_path / "out")
    assert "1 sequence" in printed


def test_pack_prints_its_manifest_as_json(corpus: Path, tokenizer: str, tmp_path: Path) -> None:
    options = (
        "--length",
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
    assert {key: result[key] for key in ("documents", "tokens_in", "rows", "tokens_packed")} == {
        "documents": 11,
        "tokens_in": 110,
        "rows": 1,
        "tokens_packed": 16,
    }
    # The long document is held out; ten of two tokens are left.
    assert (result["account"]["validation"], result["tokens_remainder"]) == (90, 4)
    assert json.loads(call(*arguments)[0]) == {**result, "reused": True}


def test_a_mixture_says_what_was_asked_and_what_came_out(
    corpus: Path, tokenizer: str, tmp_path: Path
) -> None:
    options = ("--length", 8, "--shares", "web=1,corpus=0", "--tag", "word", "--interleave", "--chunk-min", 2)
    printed, _ = call("pack", corpus, "--tokenizer", tokenizer, *options, "--out", tmp_path / "out")
    assert "tag tokens added, not trained on" in printed
    assert "documents left out by the mixture" in printed
    assert "web" in printed
    result = json.loads(
        call("pack", corpus, "--tokenizer", tokenizer, *options, "--out", tmp_path / "out", "--json")[0]
    )
    assert result["mixture"]["total"]["share_achieved"] == 1
    assert set(result["sources"]) == {"web"}
    assert result["settings"]["interleave"]["min_length"] == 2


def test_a_share_is_an_order(corpus: Path, tokenizer: str, tmp_path: Path) -> None:
    arguments = ("pack", corpus, "--tokenizer", tokenizer, "--length", 8)
    whole = json.loads(call(*arguments, "--out", tmp_path / "whole", "--json")[0])
    shared = tmp_path / "shared"
    told = json.loads(call(*arguments, "--out", shared, "--shard", "1/2", "--json")[0])
    assert {**told, "folder": ""} == {**whole, "folder": ""}
    assert "already packed" in call(*arguments, "--out", shared, "--shard", "0/2")[1]
    for options in (("--shard", "2/2"), ("--shard", "x"), ("--shard", "1")):
        with pytest.raises(RopewalkError, match=r"--shard must be i/n"):
            call(*arguments, "--out", tmp_path / "no", *options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--length", "12 monkeys"], "--length: '12 monkeys' is not a length"),
        (
            ["--length", "8", "--pattern", "causal"],
            "unknown --pattern 'causal'; choose from full, intra_document",
        ),
        (["--length", "8", "--workers", "-2"], "--workers must be 0 or more, got -2"),
        (["--length", "8", "--text-field", "body"], "no text field 'body'; the fields are 'text', 'source'"),
        (["--length", "1M"], "the documents do not fill one row"),
        (["--length", "8", "--validation-fraction", "2"], "--validation-fraction must be less than 1, got 2"),
        (
            ["--length", "8", "--weights", "web"],
            "--weights must be name=number pairs separated by commas, got 'web'",
        ),
        (["--length", "8", "--shares", "web=1,web=2"], "--shares: 'web' is given twice"),
        (["--length", "8", "--weights", "wbe=2"], "wbe"),
        (["--length", "8", "--length-shares", "0=1,x=2"], "--length-shares: 'x' is not a length"),
        (["--length", "8", "--interleave", "--chunk-cuts", "0.2"], "--chunk-cuts is missing"),
        (["--length", "8", "--tag", "{title}"], "may contain only the placeholder {source}"),
        (["--length", "8", "--max-documents", "-1"], "--max-documents must be 1 or more"),
    ],
)
def test_bad_input_is_told(
    corpus: Path, tokenizer: str, tmp_path: Path, options: list[str], message: str
) -> None:
    with pytest.raises(RopewalkError, match=message):
        call("pack", corpus, "--tokenizer", tokenizer, "--out", tmp_path / "out", *options)


def test_ctrl_c_says_where_the_work_lies_and_how_it_goes_on(
    corpus: Path,
    tokenizer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, store = tmp_path / "out", tmp_path / "store"
    command = ["data", "pack", str(corpus), "--tokenizer", tokenizer, "--length", "8", "--out", str(out)]

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    def interrupted_in(place: str, *options: str) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(f"ropewalk.data.rows.pack.{place}", interrupt)
            assert main([*command, *options]) == 130
        return capsys.readouterr().err

    nothing = "error: interrupted: nothing is packed yet; run the same command to start again\n"
    assert interrupted_in("load_tokenizer") == nothing
    said = f"error: interrupted: the rows packed so far are in {out}; run the same command to resume\n"
    assert interrupted_in("write_rows") == said
    assert f"in {out}, tokenised documents in {store};" in interrupted_in(
        "write_rows", "--token-store", str(store)
    )
    assert main(command) == 0


@pytest.mark.parametrize("command", ["pack", "stats", "preview"])
def test_help_has_an_example(command: str) -> None:
    printed, _ = call(command, "--help")
    assert f"Example: ropewalk data {command}" in printed
