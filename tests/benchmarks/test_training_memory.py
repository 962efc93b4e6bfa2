from tests.benchmarks.benchmark_cases import small


def test_it_runs_on_small_sizes(tmp_path):
    assert small("training_memory", tmp_path)["loss"] > 0
