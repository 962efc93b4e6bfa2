"""Encoders beside a text decoder stay out of memory, and the decoder computes what plain transformers computes."""

import copy

import pytest
import torch

from ropewalk import PackedLayout, load_model
from ropewalk.errors import RopewalkError
from ropewalk.models.compute.float64 import run_experts_one_by_one
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.encoders import SetAside, has_set_aside
from ropewalk.models.load import ModelSetup, attach, empty_model
from tests.models.attention.test_hooks import LENGTHS, documents_alone
from tests.models.every_family import ROUNDING
from tests.models.multimodal import FAMILIES, plain_decoder, save_whole

STOCK = ModelSetup(engine="sdpa", exact_rope=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_alone_and_in_packed_rows_is_that_of_plain_transformers(family, tmp_path):
    """Logits and gradients in float64 of documents in one row, each against plain transformers on it alone."""
    plain = plain_decoder(save_whole(tmp_path, family))
    ours = load_model(tmp_path, STOCK, dtype=torch.float64)
    run_experts_one_by_one(ours)
    layout = PackedLayout.from_lengths(LENGTHS, "intra_document", 0, "reset")
    ids = torch.randint(3, 90, (1, layout.total_length), generator=torch.Generator().manual_seed(1))
    logits = ours(input_ids=ids, layout=layout).logits[0]
    cotangent = torch.randn(logits.shape, dtype=logits.dtype, generator=torch.Generator().manual_seed(2))
    (logits * cotangent).sum().backward()
    loss, largest, worst = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for tokens, alone in documents_alone(plain, ids, layout):
        largest = max(largest, float(alone.detach().abs().max()))
        worst = max(worst, float((logits[tokens] - alone).detach().abs().max()))
        loss = loss + (alone * cotangent[tokens]).sum()
    assert worst <= ROUNDING * largest
    loss.backward()
    theirs = [each.grad for each in plain.parameters() if each.grad is not None and each.grad.any()]
    mine = [each.grad for each in ours.parameters() if each.grad is not None and each.grad.any()]
    assert len(mine) == len(theirs)
    size = max(float(each.abs().max()) for each in theirs)
    for found, expected in zip(mine, theirs, strict=True):
        assert float((found - expected).abs().max()) <= ROUNDING * size


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_only_the_parameters_of_its_decoder(family, tmp_path):
    """The same in memory and on the meta device: what ranks shard, an adapter sees and an optimizer updates."""
    plain = plain_decoder(save_whole(tmp_path, family), torch.float32)
    expected = {id(each): each.shape for each in plain.get_decoder().parameters()}
    expected |= {id(each): each.shape for each in plain.get_output_embeddings().parameters()}
    shapes = sorted(map(tuple, expected.values()))
    model, empty = load_model(tmp_path), empty_model(tmp_path)
    for each in (model, empty):
        assert sorted(tuple(parameter.shape) for parameter in each.parameters()) == shapes
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in empty.named_parameters()]
    assert len(shapes) < len(list(plain.parameters())) or family == "llama4"


def test_an_image_is_refused(tmp_path):
    model = load_model(save_whole(tmp_path, "gemma3"))
    assert has_set_aside(model)
    with pytest.raises(
        RopewalkError, match="vision_tower is not in memory, because ropewalk runs models on text"
    ):
        model(torch.tensor([[3, 4]]), pixel_values=torch.zeros(1, 3, 16, 16))


def test_the_output_head_is_found_beside_encoders(tmp_path):
    model = load_model(save_whole(tmp_path, "qwen3_vl"))
    assert OutputHead.of(model).linear is model.lm_head
    assert isinstance(model.model.visual, SetAside)


def test_a_text_that_sees_another_would_be_noticed(tmp_path):
    """Without the layout, the same row gives other logits than its documents alone."""
    plain = plain_decoder(save_whole(tmp_path, "qwen3_vl"))
    ours = copy.deepcopy(plain)
    attach(ours, "sdpa", exact_rope=False)
    layout = PackedLayout.from_lengths(LENGTHS, "intra_document", 0, "reset")
    ids = torch.randint(3, 90, (1, layout.total_length), generator=torch.Generator().manual_seed(1))
    whole = PackedLayout.from_lengths([sum(LENGTHS)], "full", 0)
    with torch.no_grad():
        packed, mixed = (ours(input_ids=ids, layout=each).logits for each in (layout, whole))
    assert float((packed - mixed).abs().max()) > 1e-3 * float(packed.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_generated_as_plain_transformers_generates_it(family, tmp_path):
    plain = plain_decoder(save_whole(tmp_path, family))
    ours = load_model(tmp_path, STOCK, dtype=torch.float64)
    run_experts_one_by_one(ours)
    ids = torch.randint(3, 90, (1, 12), generator=torch.Generator().manual_seed(1))
    asked = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "do_sample": False, "top_k": None}
    # No token that ends a text, so that all six are compared.
    found, expected = (each.generate(ids, **asked, eos_token_id=96, pad_token_id=0) for each in (ours, plain))
    assert torch.equal(found, expected)
    assert found.shape[1] > 14
