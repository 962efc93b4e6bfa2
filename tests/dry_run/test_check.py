"""A recipe is checked without a run: what it would train, what is missing, and what is wrong with it."""

import pytest

from ropewalk import RopewalkError
from ropewalk.dry_run.check import check
from ropewalk.training import load_recipe


def test_a_recipe_whose_model_is_here_is_compared_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = check(load_recipe("demo"))
    assert found.missing == ()
    assert any("trained for 256 tokens" in line for line in found.resolved)
    assert found.tokens == sum(stage.tokens for stage in found.stages) == 60 * 8 * 1024
    assert not list(tmp_path.iterdir())


def test_what_the_model_cannot_do_is_refused():
    with pytest.raises(RopewalkError, match=r"lift\.0 is 'windows', but the model has no such limit"):
        check(load_recipe("demo", ["lift=[windows]"]))


def test_what_is_not_here_is_said_and_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    found = check(load_recipe("llama-64k", ["data.validation_sources=[held-out.jsonl]"]))
    assert found.resolved is None
    assert [line.partition(":")[0] for line in found.missing] == [
        "model meta-llama/Llama-2-7b-hf",
        "data.sources.0 documents",
        "data.validation_sources.0 held-out.jsonl",
    ]
    (tmp_path / "documents").mkdir()
    assert len(check(load_recipe("llama-64k")).missing) == 1


def test_what_lies_elsewhere_by_design_is_not_missing():
    recipe = load_recipe("demo", ["data.sources=['hf:owner/name', embedded]"])
    assert check(recipe).missing == ()
