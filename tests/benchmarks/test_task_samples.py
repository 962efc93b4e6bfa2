from benchmarks.task_checkers import CHECKERS
from tests.benchmarks.benchmark_cases import small


def test_it_checks_each_suite_on_small_sizes(tmp_path):
    found = small("task_samples", tmp_path)
    assert {row["suite"] for row in found["results"]} == set(CHECKERS)
    assert all(row["samples"] for row in found["results"])
