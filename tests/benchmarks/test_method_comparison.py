"""The comparison of methods: stages are valid and equally long, and a small run compares two methods with the model."""

import json
import subprocess
from types import SimpleNamespace

import pytest
import yaml

from benchmarks.common import RESULTS
from benchmarks.method_comparison import (
    DROPE,
    MULTIPLES,
    ROPES,
    Setup,
    at_length,
    by_doubling,
    page,
    setup_of,
    write_corpus,
)
from ropewalk.data.read.embedded import resolve_model
from ropewalk.experiments.grid import make_grid
from tests.benchmarks.benchmark_cases import small
from tests.experiments.test_run import ForkedRun


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    runs = tmp_path_factory.mktemp("runs")
    write_corpus(runs / "corpus", documents=40)
    return setup_of("embedded", None, runs)


def test_every_method_has_a_valid_stage_of_equally_many_tokens(setup, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(setup.recipe()))
    for times in MULTIPLES:
        stages = [[setup.stage(method, times * setup.trained)] for method in ROPES]
        grid = make_grid(str(recipe), (f"stages={json.dumps(stages)[1:-1]}",), 1, (), tmp_path)
        assert len(grid.runs) == len(ROPES) == 8
        for method, run in zip(ROPES, grid.runs, strict=True):
            (stage,) = run.recipe.stages
            assert stage.context == (setup.trained if method == DROPE else times * setup.trained)
            assert stage.steps * stage.rows_per_step * stage.context == 499_712


def test_the_setup_is_that_of_the_embedded_model(setup):
    with open(f"{resolve_model(setup.model)}/config.json") as file:
        assert json.load(file)["max_position_embeddings"] == setup.trained


def test_the_corpus_has_documents_for_both_kinds_of_rows(setup):
    for source in setup.data["sources"]:
        with open(source["path"]) as file:
            lengths = [len(json.loads(line)["text"]) for line in file]
        assert min(lengths) < 700 < 5000 < max(lengths)


@pytest.mark.slow  # two runs and three evaluations
def test_it_runs_on_small_sizes(tmp_path, monkeypatch):
    # Forks have imported the libraries, as in the tests of grids.
    started = SimpleNamespace(Popen=ForkedRun, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr("ropewalk.experiments.run.subprocess", started)
    monkeypatch.setattr("benchmarks.method_comparison.DOCUMENTS", 40)
    arguments = ("embedded", "--runs", str(tmp_path / "runs"))
    (table,) = small("method_comparison", tmp_path, *arguments)["lengths"].values()
    assert set(table["scores"]) == {"theta", "cope", "none"}
    assert set(table["differences"]) == {"cope", "none"}
    assert set(table["cost"]) == {"theta", "cope"}
    # What has scores is not run again.
    monkeypatch.setattr("benchmarks.method_comparison.compare", None)
    (again,) = small("method_comparison", tmp_path, *arguments)["lengths"].values()
    assert again == table


def test_the_page_has_the_tables_of_the_result():
    result = json.loads((RESULTS / "methods_embedded.json").read_text())
    assert page(result) in (RESULTS.parents[1] / "docs" / "comparisons.md").read_text()
    for table in result["lengths"].values():
        files = [
            json.loads((RESULTS / "methods_embedded" / f"{table['length']}-seed{seed}.json").read_text())
            for seed in table["seeds"]
        ]
        # As text, because NaN differs from itself, and to six digits, because processors round differently.
        assert _rounded(at_length(files)) == _rounded(table)


def test_perplexity_of_a_doubling_is_that_of_all_its_tokens():
    found = by_doubling({"0 to 256": 20.0, "256 to 320": 10.0, "320 to 512": 40.0, "512 to 1024": 7.0})
    # A quarter of the second 256 tokens has the loss log 10, the rest log 40.
    assert found == {
        "0 to 256": pytest.approx(20),
        "256 to 512": pytest.approx(10**0.25 * 40**0.75),
        "512 to 1,024": pytest.approx(7),
    }


def _rounded(table):
    return json.loads(json.dumps(table), parse_float=lambda text: f"{float(text):.6g}", parse_constant=str)
