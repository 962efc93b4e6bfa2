from tests.benchmarks.benchmark_cases import small


def test_it_runs_on_small_sizes(tmp_path):
    found = small("theory", tmp_path)["results"]
    assert [each["what"] for each in found] == ["context bound", "feasible bases", "safe base"]
