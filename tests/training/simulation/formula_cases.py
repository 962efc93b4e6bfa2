"""Runs of which the closed formulas and a dry run are compared, in a process of their own."""

from ropewalk.models.config.read import read_config
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.time import model_flops
from ropewalk.planning.sizing.traffic import step_communication
from ropewalk.training.simulation.rank_costs import flops_of, operators_of, transfers_of
from tests.dry_run.cases import played, resolved_for

LAYERS_OF_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
"""Llama 3.1 8B with 4 of its 32 layers."""


def both(recipe, ranks, rank):
    """Operations of all ranks, and bytes by kind: by a dry run of one rank, and by the formulas."""
    stage = recipe.stages[0]
    step = played(recipe, ranks, rank=rank)
    mesh = resolved_for(recipe, ranks).stages[0].mesh
    run = ShardedRun(
        ModelShape.from_config(read_config(recipe.model)),
        mesh,
        stage.context,
        stage.rows_per_batch,
        checkpointing=stage.gradient_checkpointing,
        dtype="bfloat16",
    )
    found = flops_of(operators_of(step))
    sent = transfers_of(step)
    expected = step_communication(run)
    again, tokens = run.checkpointing, stage.rows_per_step * run.row_length
    pairs = run.model.layers * stage.rows_per_step * run.row_length * (run.row_length + 1) // 2
    _, attention = model_flops(run.model, tokens, pairs)
    # A backward kernel computes the scores again, the loss its head, and checkpointing everything else.
    scores = 2 * pairs * run.model.heads * run.model.head_dim
    executed = tokens * ((8 if again else 6) * run.model.layer_matrices + 8 * run.model.head_parameters)
    executed += (4 if again else 3) * attention // 3 + scores
    return {
        "operations": ((found["dense"] + found["attention"]) * ranks, executed),
        "fsdp": (sent.shards[0], expected.fsdp),
        "ulysses": (sent.ulysses[0], expected.ulysses),
        "ring": (sent.ring[0], expected.ring),
    }
