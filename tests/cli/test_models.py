"""``ropewalk models`` through the program's own main."""

import json

from ropewalk.cli import app as program
from ropewalk.models.support import COLUMNS


def test_the_table_has_a_line_for_each_family(capsys):
    assert program.main(["models"]) == 0
    shown = capsys.readouterr().out
    assert "packed training" in shown
    assert any(
        line.startswith("qwen3 ") and line.count("tested") == len(COLUMNS) for line in shown.splitlines()
    )
    assert "no RoPE: bart, " in shown


def test_one_family_with_its_reasons(capsys):
    assert program.main(["models", "falcon"]) == 0
    assert (
        "packed training: refused: FalconForCausalLM does not accept external attention functions"
        in " ".join(capsys.readouterr().out.split())
    )


def test_as_json(capsys):
    assert program.main(["models", "qwen3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["families"]["qwen3"]["export"]["status"] == "tested"


def test_an_unknown_family_is_bad_input(capsys):
    assert program.main(["models", "qwen33"]) == 2
    assert "did you mean qwen3" in capsys.readouterr().err
