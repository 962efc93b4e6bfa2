from benchmarks.ruler_samples import TASKS
from tests.benchmarks.benchmark_cases import small


def test_it_runs_on_small_sizes(tmp_path):
    found = small("ruler_samples", tmp_path)
    assert [row["task"] for row in found["results"]] == list(TASKS)
