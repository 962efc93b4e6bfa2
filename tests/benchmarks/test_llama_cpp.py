import pytest

from tests.benchmarks.benchmark_cases import small


def test_it_runs_on_small_sizes(tmp_path):
    pytest.importorskip("xllamacpp")
    (row,) = small("llama_cpp", tmp_path)["rows"]
    assert (row["family"], row["method"]) == ("llama", "linear")
    assert len(row["corrected"]) == 4
