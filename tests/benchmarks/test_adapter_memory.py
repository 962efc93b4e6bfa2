from benchmarks.adapter_memory import KINDS
from tests.benchmarks.benchmark_cases import small


def test_it_runs_on_small_sizes(tmp_path):
    found = small("adapter_memory", tmp_path)["kinds"]
    assert [each["kind"] for each in found] == list(KINDS)
    assert found[0]["trained"] == found[0]["parameters"] > found[1]["trained"] > found[2]["trained"] > 0
