"""``ropewalk export --gguf``: from the command line to a file, and what it refuses."""

import json

import pytest

pytest.importorskip("gguf", reason="needs the gguf package")

from benchmarks.llama_cpp import METHODS, convert, tiny_model
from ropewalk.cli import app as program


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    model = tiny_model("llama", METHODS["longrope"])
    model.save_pretrained(folder / "model")
    convert(model, folder / "a.gguf")
    return folder / "model", folder / "a.gguf"


def test_a_file_is_corrected_and_the_changes_are_named(files, tmp_path, capsys):
    model, source = files
    out = tmp_path / "b.gguf"
    assert program.main(["export", str(model), "--gguf", str(source), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "RoPE   longrope, architecture llama" in shown
    assert "change tensor rope_factors_long.weight with 8 factors (new)" in shown
    assert f"next   llama-server -m {out} -c 1536 serves inputs above 256 tokens" in shown
    assert f"next   llama-server -m {out} -c 256 serves inputs up to 256 tokens" in shown
    assert "inputs of up to 256 tokens differ in a longer context" in shown
    again = tmp_path / "c.gguf"
    assert program.main(["export", str(model), "--gguf", str(out), "--out", str(again), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["changes"] == []
    assert found["method"] == "longrope"
    assert len(found["launch"]) == 2


def test_the_model_of_a_run_is_found(files, tmp_path, capsys):
    model, source = files
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.yaml").write_text("")
    (run / "model").symlink_to(model)
    assert program.main(["export", str(run), "--gguf", str(source), "--out", str(tmp_path / "b.gguf")]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gguf", "a.gguf"], "--gguf needs --out"),
        (["--out", "b.gguf"], "--out needs either --rope FILE, --gguf FILE or --step N"),
        (["--gguf", "a.gguf", "--rope", "f.json", "--out", "b"], "--rope and --gguf cannot be combined"),
        (["--gguf", "a.gguf", "--out", "b.gguf", "--push", "me/model"], "cannot be combined"),
        (["--gguf", "missing.gguf", "--out", "b.gguf"], "missing.gguf"),
    ],
)
def test_wrong_options_are_one_sentence_with_status_2(files, tmp_path, capsys, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    assert program.main(["export", str(files[0]), *options]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert message in shown
    assert "Traceback" not in shown
    assert list(tmp_path.iterdir()) == []
