"""A recipe's RoPE by layer type: what the model gets, trains and is saved with is what transformers reads there."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from ropewalk import RopewalkError
from ropewalk.models.config.file import read_model_config
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.models.rope.rotary import rotary_module
from ropewalk.rope import Default, Yarn
from ropewalk.training.preflight import announcement, resolve
from ropewalk.training.recipe.file import dump_recipe, parse_recipe
from ropewalk.training.stage_rope.other_layers import ropes_of_other_layers
from tests.training.resume_cases import recipe_of
from tests.training.run_cases import extend
from tests.training.tiny import save_tiny

FULL, SLIDING = "full_attention", "sliding_attention"
DIM, TRAINED, CONTEXT, LOCAL = 8, 32, 128, 2e4
BY_LAYER = {FULL: {"method": "yarn"}, SLIDING: {"method": "theta", "rope_theta": LOCAL}}
GIVEN = {FULL: Yarn(DIM, 1e6, CONTEXT / TRAINED, TRAINED), SLIDING: Default(DIM, LOCAL)}


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A tiny random Gemma 3: a RoPE for layers with a window, another for those of full attention."""
    return save_tiny(
        tmp_path_factory.mktemp("gemma") / "gemma3",
        "Gemma3Text",
        head_dim=DIM,
        query_pre_attn_scalar=DIM,
        max_position_embeddings=TRAINED,
        sliding_window=16,
        layer_types=[SLIDING, FULL],
        pad_token_id=None,
    )


@pytest.fixture
def values(recipe_values, gemma):
    """A recipe of one short stage with a RoPE for each layer type."""
    stage = {**recipe_values["stages"][0], "rope": BY_LAYER, "steps": 2}
    return {**recipe_values, "model": str(gemma), "stages": [stage], "evaluation": {"suites": []}}


def held_by_transformers(folder):
    """(inv_freq, attention factor) of each layer type in the rotary module that plain transformers makes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    rotary = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    return {
        kind: (getattr(rotary, f"{kind}_inv_freq").double(), getattr(rotary, f"{kind}_attention_scaling"))
        for kind in (FULL, SLIDING)
    }


def same_as(held, methods):
    return all(
        torch.allclose(held[kind][0], method.frequencies().inv_freq, rtol=1e-6, atol=0)
        and held[kind][1] == pytest.approx(method.frequencies().attention_factor, rel=1e-6)
        for kind, method in methods.items()
    )


def test_the_run_trains_saves_and_says_the_rope_of_each_layer_type(values):
    recipe = recipe_of(values)
    summary = extend(recipe)
    folder = Path(values["output"]) / "model"
    assert read_model_config(str(folder)).methods == GIVEN
    held = held_by_transformers(folder)
    assert same_as(held, GIVEN)
    # What the checkpoint has is something else, for both types.
    assert not same_as(held, {FULL: Default(DIM, 1e6)})
    assert not same_as(held, {SLIDING: Default(DIM, 1e4)})
    assert rotary_module(load_model(folder))[2].methods == GIVEN
    (stage,) = summary["stages"]
    assert stage["method"] == "yarn"
    assert stage["other_layers"] == {SLIDING: {"method": "default", "rope_theta": LOCAL}}
    assert (
        "stage 1: this RoPE is for layers of full attention; layers of type sliding_attention: default, "
        "rope_theta 20,000"
    ) in announcement(resolve(recipe))


def test_an_interrupted_run_goes_on_with_the_same_and_refuses_another(values):
    extend(recipe_of(values))
    stage = {**values["stages"][0], "steps": 4}
    longer = {**values, "stages": [stage]}
    other = {**stage, "rope": {**BY_LAYER, SLIDING: {"method": "theta", "rope_theta": 3e4}}}
    with pytest.raises(
        RopewalkError,
        match=r"other_layers\.sliding_attention\.rope_theta \(20000\.0 in the",
    ):
        extend(recipe_of({**longer, "stages": [other]}), resume=True)
    extend(recipe_of(longer), resume=True)
    assert same_as(held_by_transformers(Path(values["output"]) / "model"), GIVEN)


def test_a_checkpoint_trained_with_other_local_frequencies_is_not_trained_on(values, monkeypatch):
    """As if this version of the program came to another method for the same recipe."""
    extend(recipe_of(values))
    path = sorted((Path(values["output"]) / "checkpoints").iterdir())[-1] / "config.json"
    config = json.loads(path.read_text())
    assert config["rope_parameters"][SLIDING]["rope_theta"] == LOCAL
    monkeypatch.setattr(
        "ropewalk.training.preflight.ropes_of_other_layers", lambda *_: ({SLIDING: Default(DIM, 5e4)},)
    )
    with pytest.raises(
        RopewalkError, match=r"stages\.0\.rope\.other_layers\.sliding_attention\.rope_theta \("
    ):
        extend(recipe_of({**values, "stages": [{**values["stages"][0], "steps": 4}]}), resume=True)


def test_a_layer_type_that_is_left_out_keeps_what_it_has_and_later_stages_too(values):
    stage = values["stages"][0]
    stages = [
        {**stage, "context": 64, "rope": {FULL: "yarn"}},
        {**stage, "context": 128, "rope": {SLIDING: {"method": "theta", "rope_theta": LOCAL}}},
        {**stage, "context": 256, "rope": "yarn"},
    ]
    resolved = resolve(recipe_of({**values, "stages": stages}))
    assert resolved.other_ropes == (
        {SLIDING: Default(DIM, 1e4)},
        {SLIDING: Default(DIM, LOCAL)},
        {SLIDING: Default(DIM, LOCAL)},
    )
    assert resolved.methods == tuple(Yarn(DIM, 1e6, factor, TRAINED) for factor in (2.0, 2.0, 4.0))


def test_auto_chooses_the_base_of_full_attention_beside_a_local_one(values):
    values["stages"][0]["rope"] = {
        FULL: {"method": "auto", "candidates": ["current", "ntk"]},
        SLIDING: BY_LAYER[SLIDING],
    }
    extend(recipe_of(values))
    held = held_by_transformers(Path(values["output"]) / "model")
    assert same_as(held, {SLIDING: GIVEN[SLIDING]})


def test_a_recipe_by_layer_type_reads_back_as_it_was_written(values):
    recipe = recipe_of(values)
    assert parse_recipe(dump_recipe(recipe), "again") == recipe
    assert list(recipe.model_dump()["stages"][0]["rope"]) == [FULL, SLIDING]


@pytest.mark.parametrize(
    ("rope", "sentence"),
    [
        ({FULL: "yarn", "method": "theta"}, r"the key 'method' is outside the layer types \(full_attention\); move it"),
        ({FULL: {FULL: "yarn"}}, "full_attention must not contain layer types itself"),
        ({SLIDING: "theta"}, "sliding_attention with method theta needs a rope_theta"),
        ({SLIDING: "yarn"}, "sliding_attention with method yarn needs a factor"),
        ({SLIDING: "auto"}, "fixed frequencies, got auto"),
        ({SLIDING: {"method": "longrope", "long_factor": [1.0] * 4}}, "fixed frequencies, got longrope"),
        ({"chunked_attention": "theta"}, r"stages\.0\.rope\.chunked_attention"),
    ],
)  # fmt: skip
def test_what_a_layer_type_cannot_have_is_refused_when_the_recipe_is_read(values, rope, sentence):
    values["stages"][0]["rope"] = rope
    with pytest.raises(RopewalkError, match=sentence):
        recipe_of(values)


def test_a_layer_type_that_the_checkpoint_has_not_is_refused_by_name(values, tiny_checkpoint):
    values["model"] = str(tiny_checkpoint)
    with pytest.raises(
        RopewalkError, match=r"stages\.0\.rope\.full_attention: all layers of the model share one RoPE"
    ):
        resolve(recipe_of(values))


def test_a_layer_type_without_rope_of_its_own_is_refused_with_those_that_have_one(values, gemma):
    config = read_model_config(str(gemma))
    full_alone = type(config)(
        {**config.values, "rope_parameters": {FULL: config.values["rope_parameters"][FULL]}}
    )
    with pytest.raises(RopewalkError, match=r"no RoPE for this layer type; choose one of full_attention$"):
        ropes_of_other_layers(recipe_of(values), full_alone, TRAINED)


def test_a_method_is_not_stacked_on_another_in_layers_with_a_window(values, tmp_path, gemma):
    values["stages"][0]["rope"] = {SLIDING: {"method": "linear", "factor": 2.0}}
    second = {**values["stages"][0], "context": 256, "rope": {SLIDING: {"method": "yarn", "factor": 2.0}}}
    with pytest.raises(
        RopewalkError, match=r"stages\.1\.rope\.sliding_attention: method 'yarn' cannot extend a checkpoint"
    ):
        resolve(recipe_of({**values, "stages": [*values["stages"], second]}))


def test_a_loaded_model_runs_the_methods_of_its_setup_as_transformers_runs_the_written_config(
    gemma, tmp_path
):
    setup = ModelSetup(GIVEN[FULL], CONTEXT, other_ropes={SLIDING: GIVEN[SLIDING]})
    ours = load_model(gemma, setup, torch.float64)
    ours.save_pretrained(tmp_path / "saved")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float64).eval()
    before = transformers.AutoModelForCausalLM.from_pretrained(gemma, dtype=torch.float64).eval()
    ids = torch.randint(2, 16, (1, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mine, expected, unchanged = (model(ids, use_cache=False).logits for model in (ours, theirs, before))
    # transformers rounds angles of up to 100 rad to float32.
    tolerance = 100 * 2**-24 * expected.abs().max()
    assert (mine - expected).abs().max() <= tolerance
    assert (mine - unchanged).abs().max() > 10 * tolerance
