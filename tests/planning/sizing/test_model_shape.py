"""The shape of a model and of a run: parameters are those that transformers counts, and what cannot be is refused."""

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from ropewalk import RopewalkError
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import MeshShape
from ropewalk.planning.sizing.model_shape import MIXTURES, ModelShape, ShardedRun, numel
from tests.models import every_family
from tests.planning.sizing.sizing_cases import (
    DEEPSEEK_V3,
    LLAMA_4_SCOUT,
    LLAMA_8B,
    LLAMA_70B,
    MIXTRAL_8X7B,
    QWEN3_30B_A3B,
    SMALL,
)


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_those_of_a_transformers_model(tied):
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config)
    shape = ModelShape.from_config(ModelConfig.of(config))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert sorted(shape.layer_sizes) == sorted(tuple(p.shape) for p in model.model.layers[0].parameters())
    matrices = [p.numel() for p in model.model.layers.parameters() if p.dim() == 2]
    assert shape.layer_matrices == sum(matrices)
    assert shape.head_parameters == model.lm_head.weight.numel()


def test_parameters_are_the_published_ones():
    assert round(LLAMA_8B.parameters / 1e9, 2) == 8.03
    assert round(LLAMA_70B.parameters / 1e9, 1) == 70.6
    assert LLAMA_8B.active_parameters == LLAMA_8B.parameters
    # The model cards: 46.7B and 12.9B active; 30.5B and 3.3B.
    assert round(MIXTRAL_8X7B.parameters / 1e9, 1) == 46.7
    assert round(MIXTRAL_8X7B.active_parameters / 1e9, 1) == 12.9
    assert round(QWEN3_30B_A3B.parameters / 1e9, 1) == 30.5
    assert int(QWEN3_30B_A3B.active_parameters / 1e8) == 33
    # 671B and 37B active, without the layer that predicts a second token.
    assert round(DEEPSEEK_V3.parameters / 1e9) == 671
    assert int(DEEPSEEK_V3.active_parameters / 1e9) == 37
    # 109B and 17B active, 1 % of them in the vision encoder.
    assert round(LLAMA_4_SCOUT.parameters / 1e9) == 108
    assert round(LLAMA_4_SCOUT.active_parameters / 1e9) == 17


NOT_COUNTED = ("bias", "sinks", "q_norm.weight", "k_norm.weight")
"""Ends of names of parameters that a shape leaves out: biases, sinks, and norms of heads."""
WITH_MORE = [
    ("granitemoeshared", {"shared_intermediate_size": 16}),
    ("qwen3_moe", {"mlp_only_layers": [1]}),
    ("qwen2_moe", {"decoder_sparse_step": 2}),
    ("llama4_text", {"moe_layers": [1, 3], "intermediate_size_mlp": 40}),
    ("deepseek_v2", {"q_lora_rank": None}),
    ("deepseek_v3", {"num_key_value_heads": 4, "first_k_dense_replace": 2, "n_shared_experts": 3}),
]
"""What families may have that their class leaves out."""


@pytest.mark.parametrize(("family", "more"), [*((family, {}) for family in MIXTURES), *WITH_MORE])
def test_parameters_of_a_mixture_are_those_of_a_transformers_model(family, more):
    config = every_family.tiny_config(family)
    config = type(config)(**{**config.to_dict(), **more})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(ModelConfig.of(config))
    counted = {n: p for n, p in model.named_parameters() if not n.endswith(NOT_COUNTED)}
    assert shape.parameters == sum(p.numel() for p in counted.values())
    idle = shape.experts.number - shape.experts.per_token
    one = [p.numel() // len(p) for n, p in counted.items() if ".experts." in n]
    assert shape.active_parameters == shape.parameters - idle * sum(one)
    assert len(one) == 2 * shape.experts.layers


@pytest.mark.parametrize("family", ["youtu", "minicpm3"])
def test_parameters_of_dense_latent_attention_are_those_of_a_transformers_model(family):
    config = every_family.tiny_config(family)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    shape = ModelShape.from_config(ModelConfig.of(config))
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape.layer_matrices == sum(p.numel() for p in model.model.layers.parameters() if p.dim() > 1)


def test_every_expert_of_llama_4_multiplies_every_token():
    shape = ModelShape.from_config(ModelConfig.of(every_family.tiny_config("llama4_text")))
    assert shape.experts.copies == shape.experts.number > shape.experts.per_token
    expert = 3 * shape.hidden * shape.experts.intermediate
    attention = 2 * shape.hidden * (shape.heads + shape.kv_heads) * shape.head_dim
    # All experts, the shared one and the router.
    assert shape.layer_matrices == shape.layers * (
        attention + (shape.experts.number + 1) * expert + shape.experts.number * shape.hidden
    )


def test_what_a_config_leaves_out_is_what_transformers_takes():
    config = {key: SMALL[key] for key in SMALL if key not in ("num_key_value_heads", "head_dim")}
    shape = ModelShape.from_config(ModelConfig(config))
    assert (shape.kv_heads, shape.head_dim) == (4, 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_local_experts": 8, "model_type": "qwen3_next"},
            r"not counted for the 8 experts of this qwen3_next model, but only for .* deepseek_v2, .*qwen3_moe",
        ),
        ({"hidden_size": None}, r"needs hidden_size, which the model's config lacks"),
        (
            {"per_layer_config": {"1": {"head_dim": 8}}},
            r"with per_layer_config in their config, because",
        ),
        (
            {"hidden_size_per_layer_input": 8},
            r"with hidden_size_per_layer_input in their config, because",
        ),
        ({"num_hidden_layers": 0}, r"'layers' of the model must be a whole number of 1 or more, got 0"),
        (
            {"num_attention_heads": [4, 8]},
            r"'heads' of the model must be a whole number of 1 or more, got \[4, 8\]",
        ),
    ],
)
def test_a_config_that_cannot_be_estimated_is_refused(change, message):
    with pytest.raises(RopewalkError, match=message):
        ModelShape.from_config(ModelConfig({**SMALL, **change}))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5))
def test_padding_makes_the_first_dimension_a_multiple(first, ranks, other):
    padded = numel(((first, other),), ranks)
    assert padded == sum(chunk.numel() for chunk in torch.zeros(padded // other, other).chunk(ranks))
    assert padded % (ranks * other) == 0
    assert 0 <= padded - first * other < ranks * other


def test_experts_fewer_than_ranks_are_cut_and_not_padded():
    for ranks in (2, 3, 8, 16, 64):
        layer = numel(MIXTRAL_8X7B.layer_sizes, ranks)
        assert 0 <= layer - numel(MIXTRAL_8X7B.layer_sizes) < 0.001 * layer or ranks == 3
    # Nothing of an expert of 5 x 7 is divided by four.
    assert numel(((3, 5, 7),), 4) == 4 * 5 * 7
    assert numel(((3, 5, 8),), 4) == 3 * 5 * 8


def run(world=8, length=2**17, **changes):
    return ShardedRun(
        **{"model": LLAMA_8B, "mesh": MeshShape(sequence=world), "row_length": length, **changes}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length": 0}, r"row_length must be 1 or more, got 0"),
        ({"rows_per_batch": 0}, r"rows_per_batch must be 1 or more, got 0"),
        ({"dtype": "int8"}, r"unknown dtype 'int8'; choose one of bfloat16, float16, float32"),
    ],
)
def test_an_impossible_run_is_refused(change, message):
    with pytest.raises(RopewalkError, match=message):
        run(**change)


@pytest.mark.parametrize(
    "family", ["qwen3_5_text", "qwen3_next", "falcon_h1", "bamba", "lfm2", "granitemoehybrid"]
)
def test_recurrent_layers_are_not_counted_as_attention(family):
    config = ModelConfig.of(every_family.tiny_config(family))
    assert config.recurrent_layers
    with pytest.raises(
        RopewalkError, match=rf"recurrent layers, and \d of 4 layers of this {family} model are recurrent$"
    ):
        ModelShape.from_config(config)
