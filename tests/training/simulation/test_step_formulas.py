"""The closed formulas of operations and bytes against dry runs of the real step."""

import pytest

from tests.dry_run.cases import model_folder, recipe_of
from tests.training.simulation.formula_cases import LAYERS_OF_8B, both

CASES = [
    pytest.param({"sequence": 8}, 8, 0, {}, id="ulysses"),
    pytest.param({"ring": 4}, 4, 3, {}, id="ring"),
    pytest.param({"shard": 4, "sequence": 2}, 8, 0, {"rows_per_step": 4}, id="mixed"),
    pytest.param({"sequence": 8}, 8, 0, {"gradient_checkpointing": False}, id="without checkpointing"),
    pytest.param(
        {"sequence": 8},
        8,
        0,
        {"tiled_mlp": 4096, "offload_optimizer": True},
        id="tiles, optimizer on the host",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "ranks", "rank", "changes"), CASES)
def test_formulas_agree_with_the_real_step(aside, tmp_path, mesh, ranks, rank, changes):
    model = model_folder(tmp_path / "model", **LAYERS_OF_8B)
    settings = {"context": 131072, "pattern": "full", "gradient_checkpointing": True} | changes
    # The formulas count attention run again, as it is where its results do not fit.
    settings["keep_attention"] = False
    found = aside(both, recipe_of(model, parallel=mesh, **settings), ranks, rank)
    for kind in ("ulysses", "ring"):
        assert found[kind][0] == found[kind][1]
    # The step also sums a few numbers over the ranks: its targets, its loss and its norm.
    assert 0 <= found["fsdp"][0] - found["fsdp"][1] < 100
    counted, estimated = found["operations"]
    if settings["gradient_checkpointing"]:
        # torch may stop recomputing a layer before its last product, whose result nothing needs.
        assert counted <= estimated < 1.03 * counted
    else:
        assert counted == estimated
