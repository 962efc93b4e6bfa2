import sys

import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells the anonymous memory of a process")
def test_it_runs_on_small_sizes(tmp_path):
    (run,) = small("data_index", tmp_path)["runs"]
    assert (run["documents"], run["plan"]) == (1000, "mixed")
