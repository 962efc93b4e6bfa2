"""DroPE in a run: a stage at the original length without RoPE, measured at lengths that it never saw."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ropewalk import RopewalkError
from ropewalk.models.config.read import read_config
from ropewalk.rope import Default, NoRope
from ropewalk.rope.methods.longrope import NO_ROTATION
from tests.training.resume_cases import Notes, recipe_of, with_stage
from tests.training.run_cases import extend, extended

LENGTHS = [32, 64, 128]


@pytest.fixture
def without_rope(recipe_values):
    """The checkpoint's 32 tokens, and perplexity at up to four times as many."""
    stage = {"context": 32, "rope": "none", "steps": 2, "rows_per_step": 2, "pattern": "full"}
    evaluation = {"suites": ["perplexity"], "rows": 2, "lengths": LENGTHS}
    return {**recipe_values, "stages": [stage], "evaluation": evaluation}


def permuted(model, ids):
    """The difference that the order of all earlier tokens makes to the last one's logits."""
    other = torch.cat((ids[:, :-1].flip(1), ids[:, -1:]), dim=1)
    with torch.no_grad():
        return (model(ids).logits[0, -1] - model(other).logits[0, -1]).abs().max()


def test_the_result_knows_no_positions_and_states_the_largest_measured_length(without_rope):
    notes = Notes()
    summary = extend(recipe_of(without_rope), reporter=notes)
    assert [result["length"] for result in summary["before"]] == LENGTHS
    assert [result["length"] for result in summary["after"]] == LENGTHS
    folder = Path(without_rope["output"]) / "model"
    config = read_config(folder)
    assert config.methods == {None: NoRope(8, 1e4, 128)}
    stated = json.loads((folder / "config.json").read_text())
    assert stated["max_position_embeddings"] == 128
    assert stated["rope_parameters"]["short_factor"] == [NO_ROTATION] * 4
    assert any("states max_position_embeddings 128, the longest length" in line for line in notes.told)
    # Of one layer of attention without RoPE the last token sees a set; two layers see more than a set through the mask.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    model.model.layers = model.model.layers[:1]
    ids = torch.randint(3, 15, (1, 100), generator=torch.Generator().manual_seed(0))
    assert permuted(model, ids) < 1e-12
    before = AutoModelForCausalLM.from_pretrained(without_rope["model"], dtype=torch.float64).eval()
    before.model.layers = before.model.layers[:1]
    assert permuted(before, ids) > 1e-6


def test_a_run_that_measures_nothing_states_its_context(without_rope):
    notes, values = Notes(), {**without_rope, "evaluation": {"suites": []}}
    extend(recipe_of(values), reporter=notes)
    assert read_config(Path(values["output"]) / "model").max_position_embeddings == 32
    assert any(
        "states max_position_embeddings 32, the context of the last stage" in line for line in notes.told
    )


def test_two_processes_and_an_adapter_export_no_rope_either(without_rope, two_ranks, tmp_path):
    values = with_stage(without_rope, gradient_checkpointing=True, parallel={"sequence": 2})
    values = {**values, "adapter": {"rank": 2}, "evaluation": {"suites": []}}
    two_ranks.run(extended, values)
    assert read_config(Path(values["output"]) / "model").methods == {None: NoRope(8, 1e4, 32)}


def test_a_further_stage_keeps_a_model_without_rope_as_it_is(without_rope, tmp_path):
    values = {**without_rope, "evaluation": {"suites": []}}
    extend(recipe_of(values))
    model = Path(values["output"]) / "model"
    further = with_stage(values, rope="default", context=64)
    further = {**further, "model": str(model), "output": str(tmp_path / "further")}
    extend(recipe_of(further))
    assert read_config(tmp_path / "further" / "model").methods == {None: NoRope(8, 1e4, 64)}
    again = {**with_stage(further, rope="theta", context=64), "output": str(tmp_path / "again")}
    with pytest.raises(RopewalkError, match="has no layer with RoPE, so another RoPE would extend nothing"):
        extend(recipe_of(again))


def test_a_stage_may_drop_the_rope_of_one_layer(without_rope, tmp_path):
    rope = {"method": "none", "layers": [1]}
    values = {**with_stage(without_rope, rope=rope), "evaluation": {"suites": ["perplexity"], "rows": 2}}
    extend(recipe_of(values))
    config = read_config(Path(values["output"]) / "model")
    assert [layer.rotates for layer in config.layers] == [True, False]
    assert config.methods == {None: Default(8, 1e4)}
    # The layer that rotates still limits the context, so only what was trained is stated.
    assert config.max_position_embeddings == 32
    extend(recipe_of(values), resume=True)


def test_norms_of_queries_and_keys_are_trained_and_sharded(without_rope, two_ranks, tmp_path):
    rope = {
        "method": "none",
        "qk_norm": True,
        "softmax_scale": {"lengths": [64], "scales": [4.0], "documents": 2},
    }
    values = with_stage(without_rope, rope=rope, steps=2)
    values = {**values, "evaluation": {"suites": []}}
    alone = extend(recipe_of(values))
    weights = load_file(Path(values["output"]) / "model" / "model.safetensors")
    scale = alone["softmax_scale"]["scale"]
    norms = {name: weight for name, weight in weights.items() if "q_norm" in name or "k_norm" in name}
    assert len(norms) == 4
    # A step of AdamW is at most the learning rate and a share of decay.
    assert all(
        (weight / (scale if "q_norm" in name else 1) - 1).abs().max() < 0.1 for name, weight in norms.items()
    )
    assert any(float((weight - weight[0]).abs().max()) > 0 for weight in norms.values())
    together = {**with_stage(values, parallel={"shard": 2}), "output": str(tmp_path / "together")}
    two_ranks.run(extended, together)
    sharded = load_file(tmp_path / "together" / "model" / "model.safetensors")
    assert all(
        torch.allclose(sharded[name], weight, rtol=1e-4, atol=1e-5) for name, weight in weights.items()
    )


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"adapter": {"rank": 2}}, "qk_norm is not possible with an adapter"),
        ({"first": "default"}, r"stages\.1\.rope\.qk_norm adds norms that earlier stages do not train"),
        ({"layers": [0]}, r"qk_norm is not possible with layers \[0\]"),
    ],
)
def test_norms_that_would_not_be_trained_are_refused(without_rope, changed, sentence):
    rope = {"method": "none", "qk_norm": True, **{k: v for k, v in changed.items() if k == "layers"}}
    stage = {**without_rope["stages"][0], "rope": rope}
    first = [{**stage, "rope": changed["first"]}] if "first" in changed else []
    values = {**without_rope, "stages": [*first, stage], "adapter": changed.get("adapter")}
    with pytest.raises(RopewalkError, match=sentence):
        extend(recipe_of(values))


def test_short_rows_with_rope_and_long_rows_without_are_refused(without_rope):
    values = with_stage(without_rope, context=64, short_rows=0.5, steps=4)
    with pytest.raises(
        RopewalkError, match="short rows with the checkpoint's RoPE, which a stage with rope none drops"
    ):
        extend(recipe_of(values))
