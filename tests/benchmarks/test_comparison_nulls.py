from benchmarks.comparison_nulls import EFFECTS, NULLS
from tests.benchmarks.benchmark_cases import small


def test_it_runs_on_small_sizes(tmp_path):
    found = small("comparison_nulls", tmp_path)
    assert (len(found["nulls"]), len(found["power"])) == (len(NULLS), len(EFFECTS))
