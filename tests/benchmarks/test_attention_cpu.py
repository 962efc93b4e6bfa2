import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.parametrize("documents", ["uniform", "lognormal"])
def test_it_runs_on_small_sizes(tmp_path, documents):
    found = small("attention_cpu", tmp_path, "--documents", documents)["patterns"]
    assert set(found) == {"full", "intra_document", "anchor"}
