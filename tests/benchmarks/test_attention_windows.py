import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.parametrize("part", [[], ["--layer"], ["--decoder"]], ids=str)
def test_it_runs_on_small_sizes(tmp_path, part):
    cases = small("attention_windows", tmp_path, *part)["cases"]
    assert [case["window"] for case in cases] == [16, 16, 16]
