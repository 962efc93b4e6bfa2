import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.slow  # the profiler that finds a peak
def test_it_runs_on_small_sizes(tmp_path, monkeypatch):
    # The row of the first-token experiment is the longer, the more logits a chunk has.
    monkeypatch.setattr("benchmarks.audit_memory.LOGITS_BYTES", 2**23)
    found = small("audit_memory", tmp_path)
    assert len(found["measured"]["few_layers"]) == 3
    assert found["projected"][0]["total_bytes"] > 0
