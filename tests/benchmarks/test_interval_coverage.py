import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.slow
def test_it_runs_on_small_sizes(tmp_path):
    found = small("interval_coverage", tmp_path)
    assert {"mean_over_tasks", "one_task", "paired", "losses", "false_alarms"} <= set(found)
