import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.slow  # the profiler that finds a peak
def test_it_runs_on_small_sizes(tmp_path):
    found = small("audit_memory", tmp_path)
    assert len(found["measured"]["few_layers"]) == 3
    assert found["projected"][0]["total_bytes"] > 0
