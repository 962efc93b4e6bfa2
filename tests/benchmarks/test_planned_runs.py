import pytest

from benchmarks.planned_runs import SMALL
from tests.benchmarks.benchmark_cases import small


@pytest.mark.slow  # two interpreters start
def test_it_runs_on_small_sizes(tmp_path):
    assert list(small("planned_runs", tmp_path)["runs"]) == [SMALL.name]
