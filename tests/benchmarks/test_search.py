import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.parametrize("problem", ["toy-64", pytest.param("embedded-1024", marks=pytest.mark.slow)])
def test_it_runs_on_small_sizes(tmp_path, problem):
    (found,) = small("search", tmp_path, "--problems", problem)["problems"]
    (run,) = found["runs"]["cma-es + racing"]
    assert run["forwards"] > 0
    assert (found["held_out_documents"] > 0) == (problem != "toy-64")
