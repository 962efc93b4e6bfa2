"""A stage that searches LongRoPE2's space with needles: its documents, its table, and its identity."""

import json

import pytest
import yaml

import ropewalk.training.stage_rope.search as factor_search
from ropewalk import RopewalkError
from ropewalk.io.settings import deciding
from ropewalk.search import read_factors
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.rope import Rope, Search
from ropewalk.training.stage_rope.search import describe_search, evaluated_documents, rows_for_search
from tests.training.run_cases import extend

CONTEXT = 1024
SEARCH = {"space": "critical-dimension", "objective": "needle", "budget": 6, "documents": 1}


def values_of(output, **search):
    return {
        "model": "embedded",
        "output": str(output),
        "data": {"sources": [{"path": "embedded", "max_documents": 100}], "validation_documents": 60},
        "stages": [
            {
                "context": CONTEXT,
                "steps": 0,
                "rope": {"method": "longrope", "search": {**SEARCH, **search}},
            }
        ],
        "evaluation": {"suites": ["perplexity"], "rows": 1},
    }


def recipe_of(*arguments, **search):
    return parse_recipe(yaml.safe_dump(values_of(*arguments, **search)), "test")


def test_a_stage_trains_with_the_factors_of_its_search(tmp_path, monkeypatch):
    output = tmp_path / "run"
    searched = []

    def spied(wanted, at):
        data = rows_for_search(wanted, at)
        searched.append((data, evaluated_documents(at.resolved, at.validation)))
        return data

    monkeypatch.setattr(factor_search, "rows_for_search", spied)
    summary = extend(recipe_of(output))
    table = read_factors(output / "factors-stage1.json")
    assert (table.search.space, table.search.objective) == ("critical-dimension", "needle")
    assert table.search.text == "rows with needles in held-out documents"
    factors, at = table.long_factor, table.critical_pair.found
    assert (table.critical_pair.smallest, table.critical_pair.theoretical, len(factors)) == (3, 7, 16)
    assert factors[:at] == tuple(factors[at] ** (pair / at) for pair in range(at))
    assert all(4 <= factor <= 8 for factor in factors[at:])
    # The needles lie in documents that the evaluation does not read, and of each row only answers count.
    data, evaluated = searched[-1]
    assert data.documents
    assert evaluated
    assert not data.documents & evaluated
    assert all(0 < int((row.labels >= 0).sum()) < CONTEXT / 8 for row in data.measured)
    found = summary["stages"][0]["search"]
    assert found["critical_pair"] == table.critical_pair.model_dump()
    config = json.loads((output / "model" / "config.json").read_text())
    assert tuple(config["rope_parameters"]["long_factor"]) == factors
    assert f"critical pair {at}, counted from 0" in describe_search(found)
    # Its own table and recipe once more: nothing is left to do.
    assert extend(recipe_of(output), resume=True)["stages"][0]["search"] == found


@pytest.mark.parametrize(
    ("search", "said"),
    [
        ({"budget": 1}, "a budget of 1 forward passes is too small for the 5 initial candidates"),
        (
            {"largest": 3.0},
            "stages.0.rope.search: .* between 4 .* and the largest factor 3, .* to 4 or more",
        ),
        ({"algorithm": "cma-es"}, "algorithm cma-es cannot search the space critical-dimension"),
    ],
)
def test_a_search_that_cannot_begin_is_refused_before_any_work(tmp_path, search, said):
    with pytest.raises(RopewalkError, match=said):
        extend(recipe_of(tmp_path / "run", **search))
    assert not (tmp_path / "run").exists()


def test_needles_need_documents_that_are_held_out(tmp_path):
    values = values_of(tmp_path / "run")
    values["data"]["validation_documents"] = 0
    values["stages"][0] |= {"steps": 1, "rows_per_step": 1}
    values["evaluation"] = {"suites": []}
    with pytest.raises(RopewalkError, match="the search needs held-out documents, but there are none"):
        extend(parse_recipe(yaml.safe_dump(values), "test"))


def test_what_decides_a_search_has_the_new_keys_only_where_they_are_set():
    assert {"space", "objective"}.isdisjoint(deciding(Search()))
    assert {"space", "objective", "algorithm"} <= set(deciding(Search(**SEARCH)))
    assert "critical_pair" not in deciding(Rope(method="yarn"))
    assert deciding(Rope(method="yarn", critical_pair=3))["critical_pair"] == 3
