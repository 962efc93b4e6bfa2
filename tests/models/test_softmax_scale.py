"""A softmax scale in the weights is the scale of the softmax, in every family that may lose its RoPE."""

import pytest
import torch

from ropewalk.errors import RopewalkError
from ropewalk.models.compute.float64 import KeepFloat64
from ropewalk.models.config.write import STAND_STILL
from ropewalk.models.softmax_scale import fold_softmax_scale
from tests.models.every_family import tiny_config, tiny_model
from tests.models.sharded_model_cases import folded_on_shards

SCALE = 1.3
WITH_NORMS = {"stablelm": {"qk_layernorm": True}, "cohere": {"use_qk_norm": True}}


def made(family, own):
    import transformers

    if not own:
        return tiny_model(family, torch.float64)
    config = tiny_config(family)
    for key, value in own.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        # Norms of queries that are not 1.
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model.to(torch.float64).eval()


@pytest.mark.parametrize(
    ("family", "own"), [*((each, {}) for each in STAND_STILL), *WITH_NORMS.items()], ids=str
)
def test_a_folded_scale_is_the_scale_of_the_softmax(family, own):
    model = made(family, own)
    ids = torch.randint(3, 90, (1, 60), generator=torch.Generator().manual_seed(0))
    attentions = [module for name, module in model.named_modules() if name.endswith("self_attn")]
    # Code that casts to float32 on the way, as the softmax, stays in float64.
    with torch.no_grad(), KeepFloat64():
        before = model(ids).logits
        for attention in attentions:
            attention.scaling *= SCALE
        expected = model(ids).logits
        for attention in attentions:
            attention.scaling /= SCALE
        assert (model(ids).logits - before).abs().max() < 1e-12
        fold_softmax_scale(model, SCALE)
        assert (model(ids).logits - expected).abs().max() < 1e-12
    assert (before - expected).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["phi3", "qwen3"])
def test_shards_are_folded_as_the_whole_model(two_ranks, tmp_path, family):
    """Phi-3's queries are a part of a matrix, whose shards may be cut anywhere."""
    model = tiny_model(family, torch.float64)
    if family == "phi3":
        # Its class has a longer original length than the tiny model's context.
        model.config.original_max_position_embeddings = model.config.max_position_embeddings
    model.save_pretrained(tmp_path)
    inside, after = two_ranks.run(folded_on_shards, tmp_path, SCALE)[0]
    before = model.state_dict()
    assert all(torch.equal(weight, before[name]) for name, weight in after.items())
    fold_softmax_scale(model, SCALE)
    folded = model.state_dict()
    assert all(torch.equal(weight, folded[name]) for name, weight in inside.items())


def test_an_attention_that_makes_its_queries_otherwise_is_refused():
    with pytest.raises(RopewalkError, match="cannot fold a softmax scale into its queries"):
        fold_softmax_scale(tiny_model("deepseek_v3", torch.float32), SCALE)
