import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.slow  # three interpreters start
def test_it_runs_on_small_sizes(tmp_path):
    found = small("data_packing", tmp_path)
    assert found["speed"]["embedded"][0]["tokens"] == found["memory"][0]["tokens"] > 0
