"""``ropewalk search import`` and ``show``; neither needs a search."""

import numpy as np
import pytest

from ropewalk.cli.app import main
from ropewalk.search import read_factors
from tests.places import CONFIGS

PHI = CONFIGS / "phi-3-mini-128k-instruct.json"


def test_import_of_a_csv(tmp_path, capsys):
    source, out = tmp_path / "factors.csv", tmp_path / "factors.json"
    factors = np.linspace(1, 2, 16).round(2)
    np.savetxt(source, np.concatenate([[3, 9], factors]), delimiter="\n")
    line = ["search", "import", str(source), "--model", "embedded", "--out", str(out)]
    assert main([*line, "--to", "512", "--start-tokens", "8"]) == 0
    printed = capsys.readouterr().out
    assert "the piece borders of dim_piece_mono" in printed
    assert "csv: factors.csv" in printed
    assert "exportable    no, because of the start tokens" in printed
    table = read_factors(out)
    assert (table.long_factor, table.start_tokens) == (tuple(factors), 8)
    assert (table.model.name, table.model.original_max_position_embeddings) == ("embedded", 256)


def test_import_of_a_config(tmp_path, capsys):
    out = tmp_path / "factors.json"
    assert main(["search", "import", str(PHI), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "48 pairs, base 10,000, original length 4,096 tokens" in printed
    assert "exportable    yes" in printed
    table = read_factors(out)
    assert len(table.long_factor) == len(table.short_factor) == 48
    assert main(["search", "show", str(out), "--plot", str(tmp_path / "factors.png")]) == 0
    assert (tmp_path / "factors.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["numbers.csv", "--to", "512"], "does not state the model of its factors; give --model"),
        (
            ["numbers.csv", "--model", "embedded"],
            "does not state the target length of its factors; give --to",
        ),
        (
            ["numbers.csv", "--model", "embedded", "--to", "512"],
            "has 2 factors, but the model has 16 rotary pairs",
        ),
        (["missing.csv", "--model", "embedded", "--to", "512"], "cannot read missing.csv"),
        (["embedded"], "embedded has no rescale factors: its RoPE is default, not longrope"),
        ([str(PHI), "--to", "64k"], "are for 131072 tokens, not for 65536"),
        ([str(PHI), "--model", "embedded"], "rotary_dim 96"),
        ([str(PHI), "--start-tokens", "4"], "--start-tokens 4 applies to a CSV only"),
        ([str(PHI), "--out", "there.json"], "there.json already exists"),
        (
            [str(PHI), "--out", "factors.csv"],
            "--out factors.csv: the name of a factor table must end in .json",
        ),
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
        ("missing.json", "cannot read missing.json"),
        ("numbers.csv", "is no table|not a factor table"),
    ],
)
def test_show_of_what_is_no_table(file, message, tmp_path, monkeypatch, capsys):
    import re

    monkeypatch.chdir(tmp_path)
    (tmp_path / "numbers.csv").write_text("1.0\n2.0\n")
    assert main(["search", "show", file]) == 2
    assert re.search(message, capsys.readouterr().err)
