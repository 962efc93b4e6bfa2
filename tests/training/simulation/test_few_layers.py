"""Steps of deep models, extended from a few layers, beside the same steps of all layers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.training.simulation.few_layers import LEAST_LAYERS, Kind, further, layers_of_run, some_of_each
from ropewalk.training.simulation.memory import _Points
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
    "num_hidden_layers": 18,
    "head_dim": 128,
    "sliding_window": 1024,
    "hidden_activation": "gelu_pytorch_tanh",
    # Each kind has more layers than are kept.
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 3 + ["sliding_attention"] * 3,
}
RECURRENT = DENSE | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "head_dim": 128,
    "num_hidden_layers": 12,
    "layer_types": ["linear_attention"] * 5 + ["full_attention"] + ["linear_attention"] * 6,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
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
    "recurrent": (RECURRENT, {"ring": 4}, CHECKPOINTED),
    "windows": (WINDOWS, {"shard": 8}, {"rows_per_step": 8} | CHECKPOINTED),
}


def kinds_from(letters):
    """A layer for each letter: small ones have the shape of each other, and so have capitals."""
    return tuple(Kind(letter.isupper(), letter) for letter in letters)


@pytest.mark.parametrize(
    ("letters", "kept", "more"),
    [
        ("aaaaaaa", (0, 1, 5, 6), {2: 3}),
        # Kinds of one shape share its ends; one that is at neither has a layer between.
        ("aaaaabaaaaabaaa", (0, 1, 5, 13, 14), {2: 9, 11: 1}),
        ("abababab", (0, 1, 6, 7), {2: 2, 3: 2}),
        ("bbaaaaaa", (0, 1, 6, 7), {2: 4}),
        # Another shape has ends of its own, and a kind of few layers is kept whole.
        ("AaaaaaaA", (0, 1, 2, 5, 6, 7), {3: 2}),
    ],
)
def test_the_ends_of_a_shape_and_one_of_each_other_kind_are_kept(letters, kept, more):
    kinds = kinds_from(letters)
    assert some_of_each(kinds) == kept
    assert further(kinds) == more
    assert len(kept) + sum(more.values()) == len(kinds)


def test_all_layers_are_played_unless_a_few_are_fewer():
    whole, deep = kinds_from("a" * LEAST_LAYERS), kinds_from("a" * (LEAST_LAYERS + 1))
    assert [layers_of_run(whole, which) for which in (0, 1)] == [tuple(range(LEAST_LAYERS)), None]
    runs = [layers_of_run(deep, which) for which in (0, 1, 2)]
    assert runs == [(0, 1, 8, 9), (0, 1, 2, 8, 9), None]


BYTES = st.tuples(*[st.integers(0, 1000)] * 4)


@given(
    st.text("abc", min_size=12, max_size=40),
    st.fixed_dictionaries(dict.fromkeys("abc", BYTES)),
)
def test_points_of_few_layers_are_those_of_all(letters, each):
    """By letter: states, what the forward keeps, the gradient, and what it needs while it runs."""
    kinds = kinds_from(letters)

    def held(numbers):
        """The highest point of each layer's backward, and of the update."""
        states = sum(each[letters[number]][0] for number in numbers)
        found = {("update", 0): {"total": states + sum(each[letters[number]][2] for number in numbers)}}
        for layer in numbers:
            kept = sum(each[letters[number]][1] for number in numbers if number < layer)
            made = sum(each[letters[number]][2] for number in numbers if number > layer)
            found["backward", layer] = {"total": states + kept + made + each[letters[layer]][3]}
        return found

    kept = some_of_each(kinds)
    more = {one: held(sorted((*kept, one))) for one in further(kinds)}
    points, whole = _Points(kinds, kept, held(kept), more), held(range(len(kinds)))
    found = {
        (moment, position): points.extended(moment, layer, position)
        for moment, layer, position in points.all()
    }
    assert found == {key: whole[key] for key in found}
    # A layer stands for none on the other side of a kind whose layers are all kept.
    assert found == whole or {kinds[one] for one in more} != set(kinds)


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
