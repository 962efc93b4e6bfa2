from tests.benchmarks.benchmark_cases import small


def test_it_runs_on_small_sizes(tmp_path):
    found = small("served_prompts", tmp_path)
    # Without lm_eval's clients, ropewalk is measured alone.
    clients = {"ropewalk"} if found["missing"] else {"ropewalk", "lm_eval"}
    for server in found["servers"].values():
        assert server["runs"].keys() == clients
        assert all(run["prompts"] == 3 for runs in server["runs"].values() for run in runs)
    assert {run["right"] for runs in found["servers"]["instant"]["runs"].values() for run in runs} == {0}
    assert found["bound_per_second"] > 0
