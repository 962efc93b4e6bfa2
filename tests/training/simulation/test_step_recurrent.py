"""A dry step of a hybrid model: the kernels that a GPU runs, their operations, and the states that ranks send."""

import pytest

from tests.marks import slow_after
from tests.training.simulation.hybrid_cases import LENGTH, hybrid_recipe, step_of
from tests.training.simulation.real_cases import real_step
from tests.training.simulation.test_step import text_of

CONVOLUTION = {"causal_conv1d_fwd"}
DELTA = CONVOLUTION | {"l2norm_fwd", "chunk_local_cumsum", "recompute_w_u", "chunk_delta_h_fwd"}
SCAN = CONVOLUTION | {
    "bmm_chunk_fwd",
    "chunk_cumsum_fwd",
    "chunk_scan_fwd",
    "chunk_state_fwd",
    "state_passing_fwd",
}
KERNELS = {
    "qwen3_5": DELTA | {"chunk_kkt_solve", "chunk_fwd_o"},
    "bailing_hybrid": DELTA
    | {"chunk_kda_fwd_inter_solve", "chunk_kda_fwd_intra_token_parallel", "chunk_gla_fwd_o"},
    # In training, one function computes the convolution, the scan and the gated norm.
    "bamba": SCAN | {"layer_norm_fwd"},
    "lfm2": CONVOLUTION,
    "minimax": set(),
}
"""Gated DeltaNet, Kimi's rule, Mamba-2, short convolutions, and lightning attention, which has none."""


@pytest.mark.parametrize("family", slow_after(2, ["qwen3_5", "bamba", "lfm2", "bailing_hybrid", "minimax"]))
def test_a_gpu_runs_the_kernels_of_a_family_with_the_operations_of_the_formula(aside, tmp_path, family):
    """Documents are packed without padding; a backward does twice the work of a forward."""
    found = aside(step_of, hybrid_recipe(tmp_path, family), family)
    assert found.kernels == KERNELS[family]
    if found.kernels:
        assert found.flops["forward"] == found.formula
        assert found.flops["backward"] == 2 * found.formula


@pytest.mark.slow
def test_without_packages_transformers_own_code_runs(aside, tmp_path):
    """Documents are then padded to each other's length, and products are ordinary ones."""
    recipe = hybrid_recipe(tmp_path, "qwen3_5")
    packages = "causal-conv1d", "flash-linear-attention"
    found = {
        (device, missing): aside(step_of, recipe, "qwen3_5", 1, device, 0, missing)
        for device, missing in (("cuda", ()), ("cuda", packages[:1]), ("cuda", packages), ("cpu", ()))
    }
    assert found["cuda", packages[:1]].kernels == KERNELS["qwen3_5"] - CONVOLUTION
    without, on_cpu = found["cuda", packages], found["cpu", ()]
    assert without.kernels == on_cpu.kernels == set()
    assert without.dense == on_cpu.dense > found["cuda", ()].dense


@pytest.mark.slow
def test_ranks_that_share_a_row_run_the_scan_by_itself(aside, tmp_path):
    """The function for whole mixers takes no state. Cut documents are padded to each other's length, with a halo."""
    found = aside(step_of, hybrid_recipe(tmp_path, "bamba", parallel={"ring": 2}), "bamba", 2)
    assert found.kernels == SCAN
    assert found.formula < found.flops["forward"] < 1.2 * found.formula
    assert found.flops["backward"] == 2 * found.flops["forward"]


MESHES = [
    ("qwen3_5", {"ring": 2}, True),
    ("lfm2", {"sequence": 2}, False),
    ("bamba", {"sequence": 2}, True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh", "checkpointed"), MESHES)
def test_bytes_of_states_and_halos_are_those_of_two_processes(
    aside, tmp_path, two_ranks, family, mesh, checkpointed
):
    """With kernels, too; checkpointed layers send them once more."""
    recipe = hybrid_recipe(tmp_path, family, parallel=mesh, gradient_checkpointing=checkpointed)
    real = two_ranks.run(real_step, text_of(recipe), 2, LENGTH)
    for rank, (sent, dense, _) in enumerate(real):
        on_cpu, on_gpu = (aside(step_of, recipe, family, 2, device, rank) for device in ("cpu", "cuda"))
        assert on_cpu.sent == on_gpu.sent == sent
        assert on_cpu.all_dense == dense
