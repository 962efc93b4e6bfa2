from tests.benchmarks.benchmark_cases import small


def test_it_runs_on_small_sizes(tmp_path):
    found = small("answer_viewer", tmp_path)
    assert 0 < found["index_bytes"] < found["bytes"]
    if found["browser"] is not None:
        assert found["browser"]["said"]["words"].startswith("1 of 1,200 samples")
        # Only the rows on the screen are in the page.
        assert found["browser"]["rows"] < 30
