"""Softmax scales of a model without RoPE: measured after training, and in the exported weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ropewalk.attention.layout import IGNORED
from ropewalk.models.config.read import read_config
from ropewalk.training import softmax_scale
from ropewalk.training.stage_rope.search import rows_for_search
from tests.training.resume_cases import recipe_of, with_stage
from tests.training.run_cases import extend


@pytest.fixture
def without_rope(recipe_values):
    stage = {"context": 32, "rope": "none", "steps": 2, "rows_per_step": 2, "pattern": "full"}
    return {**recipe_values, "stages": [stage]}


def test_the_best_softmax_scale_is_folded_into_the_exported_weights(without_rope):
    scale = {"lengths": [32, 64], "scales": [0.25, 4.0], "documents": 2}
    values = with_stage(without_rope, rope={"method": "none", "softmax_scale": scale}, steps=4)
    values = {**values, "evaluation": {"suites": ["perplexity"], "rows": 2, "lengths": [32]}}
    found = extend(recipe_of(values))["softmax_scale"]
    measured = {each["scale"]: each["objective"] for each in found["scales"]}
    assert list(measured) == [1.0, 0.25, 4.0]
    assert measured[found["scale"]] == min(measured.values())
    assert [len(each["losses"]) for each in found["scales"]] == [2, 2, 2]
    output = Path(values["output"])
    assert read_config(output / "model").max_position_embeddings == 64
    trained = load_file(next((output / "checkpoints").glob("*-step000004/model.safetensors")))
    exported = load_file(output / "model" / "model.safetensors")
    for name, weight in exported.items():
        assert torch.equal(weight, trained[name] * (found["scale"] if "q_proj" in name else 1)), name
    # Measured anew, and exported again, with other scales; the training stays.
    other = {**scale, "scales": [100.0]}
    changed = with_stage(values, rope={"method": "none", "softmax_scale": other})
    again = extend(recipe_of(changed), resume=True)["softmax_scale"]
    assert [each["scale"] for each in again["scales"]] == [1.0, 100.0]
    assert again["scales"][0] == found["scales"][0]


def test_the_losses_of_a_scale_are_those_of_the_scaled_model_at_each_length(without_rope):
    """By plain transformers on the exported model, whose weights have the chosen scale: the mean over its tokens."""
    scale = {"lengths": [32, 64], "scales": [2.0], "documents": 2}
    values = with_stage(without_rope, rope={"method": "none", "softmax_scale": scale})
    rows = []

    def kept(wanted, at):
        data = rows_for_search(wanted, at)
        rows.extend(data.rows)
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_scale, "rows_for_search", kept)
        found = extend(recipe_of({**values, "evaluation": {"suites": []}}))["softmax_scale"]
    folder = Path(values["output"]) / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    chosen = next(each for each in found["scales"] if each["scale"] == found["scale"])
    for length, loss in zip(found["lengths"], chosen["losses"], strict=True):
        sums = count = 0
        for row in rows:
            ids, labels = row.input_ids[None, :length], row.labels[: length - 1]
            with torch.no_grad():
                each = torch.nn.functional.cross_entropy(
                    model(ids).logits[0, :-1], labels, ignore_index=IGNORED, reduction="sum"
                )
            sums, count = sums + float(each), count + int((labels != IGNORED).sum())
        assert loss == pytest.approx(sums / count, rel=1e-5)


@pytest.mark.parametrize(
    ("scale", "without", "sentence"),
    [
        (
            1.2,
            3.5,
            "1.2, folded into the weights: mean loss 3.2500 nats per token at 64 tokens, 3.5000 without",
        ),
        (
            1.2,
            None,
            "1.2, folded into the weights: mean loss 3.2500 nats per token at 64 tokens, not finite without",
        ),
        (1.0, 3.25, "1, because no other is better: mean loss 3.2500 nats per token at 64 tokens"),
    ],
)
def test_the_choice_in_one_sentence(scale, without, sentence):
    scales = [{"scale": 1.0, "objective": without}, {"scale": 1.2, "objective": 3.25}]
    found = {"scale": scale, "lengths": [64], "scales": scales}
    assert softmax_scale.describe_softmax_scale(found) == sentence
