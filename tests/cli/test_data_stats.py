"""``data stats`` counts documents and rows alike, as a table, as JSON and as a picture."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ropewalk.cli import output
from ropewalk.cli.data import BY_EMBEDDED
from ropewalk.cli.output import Terminal
from ropewalk.data import open_rows
from ropewalk.data.attention_share import share_of_documents
from ropewalk.errors import RopewalkError
from tests.cli.byte_checkpoint import save_byte_checkpoint
from tests.cli.data_command_cases import call


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
    "in_rows",
    "length_quantiles",
    "long_shares",
    "mean_length",
    "mixture",
    "packed",
    "pieces",
    "samples",
    "repeats",
    "row_length",
    "rows",
    "sources",
    "tokenizer",
    "tokens",
    "trained_tokens",
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
    assert not found["packed"]
    assert {found[key] for key in ("rows", "mixture", "corpus", "pieces", "in_rows")} == {None}


def test_rows_as_json(rows: Path) -> None:
    found = counted(rows)
    assert set(found) == KEYS
    assert found["packed"]
    assert found["row_length"] == 64
    assert found["mixture"]["tokens_asked"] == 600
    assert found["corpus"]["tokens"] == 780
    assert set(found["corpus"]) == KEYS - {"mixture", "corpus", "tokenizer", "pieces", "in_rows", "samples"}
    assert found["attention_share"]["full"] == 1
    assert 0 < found["attention_share"]["intra_document"] < found["attention_share"]["anchor"] < 1
    # 180 tokens of web are there and 300 are asked for.
    assert found["repeats"]["documents"] > 0


def test_rows_do_not_make_documents_look_cut_by_the_mixture(rows: Path) -> None:
    """Rows of 64 hold pieces of 63 tokens at most; the books are of 300 before and after mixing."""
    found, packed = counted(rows), open_rows(rows)
    manifest = packed.manifest
    for state, part in (("mixed", found), ("corpus", found["corpus"])):
        assert part["documents"] == manifest[state]["total"]["documents"]
        assert {name: each["histogram"] for name, each in part["sources"].items()} == {
            name: each["histogram"] for name, each in manifest[state]["sources"].items()
        }
        assert part["sources"]["books"]["length_quantiles"]["1"] == 300
    assert found["documents"] == manifest["counts"]["packing"]["documents"]
    assert found["tokens"] == manifest["counts"]["packing"]["tokens_in"] == 600
    assert (found["sources"]["books"]["documents"], found["sources"]["books"]["token_ratio"]) == (1, 0.5)
    # What is in the rows, counted row by row.
    there = [(row.sources, row.segment_lengths) for row in map(packed.packed, range(len(packed)))]
    inside = found["in_rows"]
    assert found["pieces"] == inside["pieces"] == sum(len(sources) for sources, _ in there)
    assert inside["tokens"] == 63 * found["rows"]
    assert inside["sources"]["books"]["pieces"] == sum(sources.count("books") for sources, _ in there)
    assert inside["length_quantiles"]["1"] == 63
    assert found["documents_per_row"] == found["pieces"] / found["rows"]


def test_records_that_are_tokenised_already_are_counted(tokenizer: Path, tmp_path: Path) -> None:
    records: list[dict[str, Any]] = [
        {"input_ids": [5] * 40, "source": "ids"},
        {"text": "x" * 9, "source": "web"},
        {"input_ids": [6] * 10, "source": [{"start": 0, "end": 4, "source": "web"}, {"start": 4, "end": 10}]},
        {"text": " "},
    ]
    path = tmp_path / "mixed.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    found = counted(path, "--tokenizer", tokenizer, "--workers", 1)
    told = {name: (each["documents"], each["tokens"]) for name, each in found["sources"].items()}
    assert told == {"ids": (1, 40), "web": (2, 13), "mixed": (1, 6)}
    # And packing takes the same documents.
    call("pack", path, "--tokenizer", tokenizer, "--length", 16, "--out", tmp_path / "rows")
    packed = counted(tmp_path / "rows")
    assert {name: (each["documents"], each["tokens"]) for name, each in packed["sources"].items()} == told
    path.write_text(json.dumps({"text": " "}))
    with pytest.raises(RopewalkError, match=r"no documents in .*mixed\.jsonl \(1 empty documents skipped\)"):
        call("stats", path, "--tokenizer", tokenizer)


def test_documents_in_words(corpus: Path, tokenizer: Path) -> None:
    printed, remarks = call("stats", corpus, "--tokenizer", tokenizer)
    assert remarks == ""
    # The model beside the tokenizer is trained for 64 tokens.
    for words in ("76.9 %", "% of documents", "256 to 511", "█", "sequences of 64 tokens packed with these"):
        assert words in printed
    assert "3 texts occur more than once, at most 4 times" in printed


def test_attention_is_counted_at_a_length_that_somebody_gave(
    corpus: Path, tokenizer: Path, tmp_path: Path
) -> None:
    alone = shutil.copytree(tokenizer, tmp_path / "alone", ignore=shutil.ignore_patterns("config.json"))
    for arguments, length in (
        (("--tokenizer", tokenizer), 64),
        (("--tokenizer", tokenizer, "--length", "1k"), 1024),
        (("--tokenizer", alone, "--length", "1k"), 1024),
        (("--tokenizer", alone), None),
        # Whose tokenizer it is says nothing of the user's model.
        ((), None),
    ):
        report = json.loads(call("stats", corpus, *arguments, "--json")[0])
        assert report["row_length"] == length
        assert bool(report["attention_share"]) == (length is not None)
    printed, _ = call("stats", corpus, "--tokenizer", alone)
    assert "times faster" not in printed


def test_progress_is_drawn_on_a_terminal_alone(
    corpus: Path, rows: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()
    monkeypatch.setattr(output, "notes", Terminal(file=out, force_terminal=True, width=100))
    call("stats", corpus, "--tokenizer", tokenizer)
    call("stats", rows)
    assert "documents" in out.getvalue()
    assert "rows" in out.getvalue()
    assert "tokens" in out.getvalue()


def test_rows_in_words(rows: Path) -> None:
    printed, _ = call("stats", rows)
    for words in (
        "Packed documents by source, before cutting",
        "Document chunks in packed sequences",
        "share of chunks",
        "256 to 511",
        "Mixture",
        "requested",
        "achieved",
        "documents per sequence",
        "read more than once",
    ):
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
    drawn = (tmp_path / "rows.svg").read_text()
    assert "<!-- after -->" in drawn
    assert "<!-- before -->" in drawn
    assert "<!-- Document lengths -->" in (tmp_path / "raw.svg").read_text()


def test_before_and_after_are_drawn_of_whole_documents(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("ropewalk.reporting.data.length_figure", lambda *given: drawn.append(given))
    monkeypatch.setattr("ropewalk.reporting.figures.drawing.draw", lambda figure, path: None)
    call("stats", rows, "--plot", "a.png")
    ((states, title, caption),) = drawn
    assert list(states) == ["before", "after"]
    manifest = open_rows(rows).manifest
    for state, told in (("before", "corpus"), ("after", "mixed")):
        for name, each in manifest[told]["sources"].items():
            bins = [(bin_["start"], bin_["end"], bin_["tokens"]) for bin_ in each["histogram"]]
            assert states[state][name].bins == bins
            assert states[state][name].token_ratio == each["token_ratio"]
    assert states["before"]["books"].token_ratio == 600 / 780
    assert states["after"]["books"].token_ratio == 0.5
    assert title == "Document lengths before and after the mixture"
    assert "Lengths are of whole documents, before sequences of 64 tokens cut them." in caption


def test_numbers_stay_whole_in_a_narrow_terminal(corpus: Path, tokenizer: Path) -> None:
    assert "…" not in call("stats", corpus, "--tokenizer", tokenizer, columns=40)[0]


def test_bad_input_is_told(rows: Path, corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    for arguments, message in (
        (
            (rows, "--tokenizer", "embedded"),
            r"holds packed rows, which state their own tokenizer; omit tokenizer",
        ),
        ((rows, "--length", "4k"), r"their own length; omit length"),
        ((corpus, rows), r"holds packed rows, .*; give this folder alone"),
        ((corpus, "--length", "1"), r"--length must be 2 or more, got 1"),
        ((corpus, "--length", "long"), r"'long' is not a length"),
        ((corpus, "--plot", "a.pdf"), r"\.png or \.svg, got a\.pdf"),
        ((tmp_path / "nowhere",), r"there is no file or folder '.*nowhere'"),
    ):
        with pytest.raises(RopewalkError, match=message):
            call("stats", *arguments)


@pytest.fixture
def copied(rows: Path, tmp_path: Path) -> Path:
    return shutil.copytree(rows, tmp_path / "copied")


def test_damaged_rows_are_refused(copied: Path) -> None:
    path = copied / "rows-00000.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(
        RopewalkError, match=r"rows-00000\.arrow is damaged: its SHA-256 is not the one in manifest\.json"
    ):
        call("stats", copied)


@pytest.mark.parametrize("above", [False, True])
@pytest.mark.parametrize("state", ["begun", "no manifest", "broken manifest"])
def test_unfinished_rows_are_no_documents(copied: Path, corpus: Path, state: str, above: bool) -> None:
    manifest = copied / "manifest.json"
    content = manifest.read_text()
    manifest.unlink()
    if state == "begun":
        for path in copied.glob("*.arrow"):
            path.unlink()
        (copied / "unfinished").mkdir()
        (copied / "unfinished" / "job.json").write_text("{}")
    if state == "broken manifest":
        manifest.write_text(content[: len(content) // 2])
    place = copied.parent if above else copied
    for paths in ((place,), (corpus, place)):
        with pytest.raises(
            RopewalkError, match=r"the rows in .*copied are incomplete; to complete them, repeat the command"
        ):
            call("stats", *paths)


def test_a_folder_of_documents_may_be_named_as_ours(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "unfinished").mkdir()
    (tmp_path / "unfinished" / "novel.txt").write_text("x" * 12)
    (tmp_path / "manifest.json").write_text('{"files": [')
    found = counted(tmp_path, "--tokenizer", tokenizer)
    assert (found["documents"], found["tokens"]) == (2, 12 + 11)


def test_help_has_an_example() -> None:
    printed, _ = call("stats", "--help")
    assert "Example: ropewalk data stats" in printed
    assert "[:config][@split]" in printed
    assert "PATHS" in printed
