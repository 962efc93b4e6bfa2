"""``ropewalk search import``, and what the command says of a table; neither needs a search."""

import numpy as np
import pytest

from ropewalk.cli.app import main
from ropewalk.reporting.search import objectives_table
from ropewalk.search import Factors, read_factors
from ropewalk.search.factor_table import HeldOut, perplexity_text
from tests.places import CONFIGS

PHI = CONFIGS / "phi-3-mini-128k-instruct.json"
BASELINES = {"pi": None, "ntk": 8.0, "yarn": 8.5}
SEARCH = {
    "objective": "perplexity",
    "algorithm": "evolution",
    "seed": 0,
    "budget": 9,
    "racing": True,
    "documents": 2,
    "text": "a.jsonl",
    "documents_sha256": "a",
    "largest": 5.0,
    "start_tokens": (0,),
    "device": "cpu",
    "dtype": "float32",
    "candidates": 3,
    "seconds": 1.0,
}


def searched(best=7.0, held_out=7.5, baselines=BASELINES, **search):
    judged = HeldOut(documents=1, documents_sha256="b", best=held_out, baselines=BASELINES)
    return Factors(
        model={"name": "tiny", "rotary_dim": 4, "rope_theta": 1e4, "original_max_position_embeddings": 512},
        target_length=2048,
        long_factor=(1.0, 2.0),
        attention_factor=1.1,
        provenance={"kind": "search", "source": "evolution"},
        best={"objective": best, "rescale_factors": (1.0, 2.0)},
        baselines=baselines,
        forwards=9,
        search={**SEARCH, **search},
        held_out=judged if held_out else None,
    )


def test_factors_that_are_better_everywhere_need_no_caution():
    assert searched().cautions() == []


def test_held_out_rows_that_say_otherwise_are_told():
    (said,) = searched(held_out=9.0).cautions()
    assert "on held-out rows NTK has 8.0000 and the factors found 9.0000" in said


@pytest.mark.parametrize("held_out", [7.5, 9.0])
def test_a_baseline_that_wins_on_the_search_rows_is_told_once(held_out):
    (said,) = searched(9.0, held_out).cautions()
    assert "on the search rows themselves NTK is better" in said


def test_that_nothing_was_held_out_is_told():
    (said,) = searched(held_out=None).cautions()
    assert "nothing was held out" in said


def test_the_baselines_shown_are_those_that_were_measured():
    table = searched()
    assert table.rule_factors()["PI"] == (4.0, 4.0)
    kept = {"pi": (8.0, 9.0), "ntk": (1.0, 9.0)}
    assert table.model_copy(update={"baseline_factors": kept}).rule_factors() == {
        "PI": kept["pi"],
        "NTK": kept["ntk"],
    }


def test_the_table_of_objectives():
    table = objectives_table(searched(objective="needle", short_penalty=0.5))
    assert table.title == (
        "Needle perplexity at 2,048 tokens, before training; on search rows with 0.5 times what is lost at the trained "
        "length"
    )
    assert table.header == ("RoPE", "1 search rows and their beginnings", "1 held-out rows, no penalty")
    assert objectives_table(searched()).header == ("RoPE", "2 search rows", "1 held-out rows")
    assert table.rows[0] == ("factors found", "7.0000", "7.5000")
    assert table.rows[1] == ("PI", "∞", "∞")


@pytest.mark.parametrize(
    ("value", "text"), [(None, "∞"), (2.8164123, "2.8164"), (20.9, "20.900"), (3.2e7, "3.20e+07")]
)
def test_perplexities_have_five_digits(value, text):
    assert perplexity_text(value) == text


def test_import_of_a_csv(tmp_path, capsys):
    source, out = tmp_path / "factors.csv", tmp_path / "factors.json"
    factors = np.linspace(1, 2, 16).round(2)
    np.savetxt(source, np.concatenate([[3, 9], factors]), delimiter="\n")
    line = ["search", "import", str(source), "--model", "embedded", "--out", str(out)]
    assert main([*line, "--to", "512", "--start-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert "the piece borders of dim_piece_mono" in printed
    assert "csv: factors.csv" in printed
    assert "plain config  no, for its start tokens" in printed
    table = read_factors(out)
    assert (table.long_factor, table.start_tokens) == (tuple(factors), 8)
    assert (table.model.name, table.model.original_max_position_embeddings) == ("embedded", 256)


def test_import_of_a_config(tmp_path, capsys):
    out = tmp_path / "factors.json"
    assert main(["search", "import", str(PHI), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "48 pairs, base 10,000, original length 4,096 tokens" in printed
    assert "plain config  yes" in printed
    table = read_factors(out)
    assert len(table.long_factor) == len(table.short_factor) == 48
    assert main(["search", "show", str(out), "--plot", str(tmp_path / "factors.png")]) == 0
    assert (tmp_path / "factors.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["numbers.csv", "--to", "512"], "says nothing but numbers; give --model"),
        (["numbers.csv", "--model", "embedded"], "says nothing but numbers; give --to"),
        (
            ["numbers.csv", "--model", "embedded", "--to", "512"],
            "has 2 factors, and the model has 16 rotary pairs",
        ),
        (["missing.csv", "--model", "embedded", "--to", "512"], "cannot read factors from missing.csv"),
        (["embedded"], "embedded has no rescale factors: its RoPE is default, and not longrope"),
        ([str(PHI), "--to", "64k"], "are for 131072 tokens, and not for 65536"),
        ([str(PHI), "--model", "embedded"], "rotary_dim 96"),
        ([str(PHI), "--start-tokens", "4"], "--start-tokens 4 is for a CSV"),
        ([str(PHI), "--out", "there.json"], "there.json exists already"),
        ([str(PHI), "--out", "factors.csv"], "--out factors.csv is a factor table, whose name ends in .json"),
    ],
)
def test_bad_input_is_one_sentence_and_status_2(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numbers.csv").write_text("1.0\n2.0\n")
    (tmp_path / "there.json").write_text("mine")
    assert main(["search", "import", "--out", "new.json", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert message in printed.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numbers.csv", "there.json"]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("missing.json", "cannot read factors from missing.json"),
        ("numbers.csv", "is no table|no factor table"),
    ],
)
def test_show_of_what_is_no_table(file, message, tmp_path, monkeypatch, capsys):
    import re

    monkeypatch.chdir(tmp_path)
    (tmp_path / "numbers.csv").write_text("1.0\n2.0\n")
    assert main(["search", "show", file]) == 2
    assert re.search(message, capsys.readouterr().err)
