import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.slow  # Ray starts
def test_it_runs_on_small_sizes(tmp_path):
    pytest.importorskip("ray")
    assert small("data_cluster", tmp_path)["ratio"] > 0
