import pytest

from tests.benchmarks.benchmark_cases import small


@pytest.mark.slow  # two ranks start
def test_it_runs_on_small_sizes(tmp_path):
    meshes = small("parallel_cpu", tmp_path)["meshes"]
    assert [mesh["mesh"] for mesh in meshes] == ["2 ring", "2 replicate"]
