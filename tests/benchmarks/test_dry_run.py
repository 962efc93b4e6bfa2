import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.slow  # two interpreters start
def test_it_runs_on_small_sizes(tmp_path):
    (found,) = small("dry_run", tmp_path)["results"]
    assert found["operations_equal"]
    assert found["bytes_equal"]
