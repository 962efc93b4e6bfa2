"""``ropewalk recipe`` through the program's own main."""

import json

from ropewalk.cli import app as program
from ropewalk.recipes import recipe_text, shipped_recipes


def test_list_has_a_line_for_each_recipe_below_its_model(capsys):
    assert program.main(["recipe", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed.keys() == shipped_recipes().keys()
    assert program.main(["recipe", "list"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{name}, {head['goal']}: {head['summary']}" in shown for name, head in listed.items())
    # A model is a heading, once, and its recipes follow before the next.
    models = sorted({head["model"] for head in listed.values()}, key=str.casefold)
    headings = [
        shown.index(f"{model} {next(n for n, h in listed.items() if h['model'] == model)}, ")
        for model in models
    ]
    assert headings == sorted(headings)


def test_what_is_shown_is_a_recipe_that_can_be_kept(capsys, tmp_path):
    assert program.main(["recipe", "show", "demo"]) == 0
    shown = capsys.readouterr().out
    assert shown == recipe_text("demo")
    (tmp_path / "mine.yaml").write_text(shown)
    assert program.main(["recipe", "check", str(tmp_path / "mine.yaml"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == []


def test_a_check_says_what_it_would_train(capsys):
    assert program.main(["recipe", "check", "demo", "--set", "stages.0.steps=7"]) == 0
    shown = capsys.readouterr().out
    assert "57,344 training tokens" in shown  # 7 steps of 8 rows of 1,024
    assert "The recipe is valid and fits the model." in shown
    assert "memory: only a lower bound was compared; ropewalk plan" in shown


def test_a_recipe_without_its_documents_or_its_model_is_not_ready(capsys):
    for change, missing in (
        (
            "data.sources=[nowhere.jsonl]",
            "data.sources.0 nowhere.jsonl: not here; give your documents with --set",
        ),
        (
            "data.sources=[allenai/c4]",
            "data.sources.0 allenai/c4: not here; give your documents with --set; for a dataset on the Hub, write "
            "hf:allenai/c4",
        ),
        (
            "model=./nowhere",
            "model ./nowhere: neither a folder here nor in the Hugging Face cache, and no name",
        ),
    ):
        assert program.main(["recipe", "check", "demo", "--set", change]) == 2
        shown, error = capsys.readouterr()
        assert "Run it" not in shown
        assert f"the recipe is not ready to run here; missing: {missing}" in " ".join(error.split())
        assert program.main(["recipe", "check", "demo", "--set", change, "--json"]) == 2
        found = json.loads(capsys.readouterr().out)
        assert not found["ready"]
        assert found["missing"][0].startswith(missing)


def test_a_model_that_the_run_would_download_keeps_no_recipe_from_running(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    changes = ["--set", "model=nobody/has-this", "--set", "data.sources=[embedded]"]
    assert program.main(["recipe", "check", "demo", *changes]) == 0
    shown = capsys.readouterr().out
    assert "the run would download it. The recipe was not checked against it" in shown
    assert "The recipe is valid. Run it" in shown


def test_mistakes_end_with_status_2_and_one_sentence(capsys):
    for arguments, sentence in (
        (["show", "dmo"], "ropewalk has no recipe 'dmo'; did you mean demo"),
        (["check", "demo", "--set", "stages.0.stepz=3"], "unknown key stages.0.stepz; did you mean steps?"),
        (["check", "nothing.yaml"], "cannot read recipe nothing.yaml"),
    ):
        assert program.main(["recipe", *arguments]) == 2
        error = capsys.readouterr().err
        assert sentence in " ".join(error.split())
        assert error.count("error:") == 1


def test_a_check_is_for_the_gpus_that_are_named(capsys):
    there = ["--gpus", "1", "--gpu", "a6000", "--memory-gb", "0.001"]
    assert program.main(["recipe", "check", "demo", *there]) == 2
    shown, error = capsys.readouterr()
    assert "warning: " in shown
    assert "not ready to run there; missing: memory for stages.0" in " ".join(error.split())
