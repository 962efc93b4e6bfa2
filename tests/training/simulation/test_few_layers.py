"""Steps of deep models, extended from a few layers, beside the same steps of all layers."""

import math

import pytest

from ropewalk.training.simulation.few_layers import some_of_each
from tests.dry_run.cases import model_folder, recipe_of
from tests.training.simulation.few_cases import both

DENSE = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 11,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 64000,
}
EXPERTS = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 12,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 768,
    "head_dim": 128,
    "mlp_only_layers": [0],
}
WINDOWS = DENSE | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 27,
    "head_dim": 128,
    "sliding_window": 1024,
    "hidden_activation": "gelu_pytorch_tanh",
    # Each kind has more layers than are kept.
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 5 + ["sliding_attention"] * 2,
}
CHECKPOINTED = {"gradient_checkpointing": True}
SHAPES = {
    "FSDP": (DENSE, {"shard": 8}, {"rows_per_step": 8} | CHECKPOINTED),
    "Ulysses with offload": (
        DENSE,
        {"sequence": 8},
        {"offload_activations": True, "keep_attention": True} | CHECKPOINTED,
    ),
    "ring": (DENSE, {"ring": 4}, CHECKPOINTED),
    "experts": (EXPERTS, {"sequence": 8}, CHECKPOINTED),
    "windows": (WINDOWS, None, {}),
}


def test_two_layers_at_each_end_of_a_kind_are_kept():
    kinds = ("a", "a", "b", "a", "a", "b", "a", "a")
    assert some_of_each(kinds) == (0, 1, 2, 5, 6, 7)
    assert some_of_each(kinds, "a") == (0, 1, 2, 3, 5, 6, 7)
    # A kind of fewer layers is kept whole.
    assert some_of_each(("a", "b", "b")) == (0, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_a_few_layers_take_what_all_of_them_take(aside, tmp_path, name):
    model, mesh, stage = SHAPES[name]
    recipe = recipe_of(
        model_folder(tmp_path / "model", **model), parallel=mesh, context=2**15, pattern="full", **stage
    )
    few, whole = aside(both, recipe, math.prod((mesh or {}).values()))
    assert few["layers"] < model["num_hidden_layers"]
    for key in ("operations", "sent", "waits", "host"):
        assert few[key] == whole[key]
    for key in ("seconds", "moved"):
        assert few[key] == pytest.approx(whole[key], rel=1e-9)
    assert few["peak"] == pytest.approx(whole["peak"], rel=1e-3)
    assert few["moments"] == pytest.approx(whole["moments"], rel=1e-3)
