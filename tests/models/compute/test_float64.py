"""What a model computes in float64 stays float64, though its classes ask for float32, and its experts can run so."""

import torch

from ropewalk.models.compute.float64 import KeepFloat64, compute_decays_again, run_experts_one_by_one
from tests.models.families import tiny_model


def as_float32(x):
    return [x.float(), x.to(torch.float32), x.to(dtype=torch.float32), x.softmax(-1, dtype=torch.float32)]


def test_float64_stays_and_every_other_dtype_is_cast():
    wide = torch.rand(3, dtype=torch.float64)
    with KeepFloat64() as keeping:
        kept, narrow = as_float32(wide), as_float32(wide.bfloat16())
        keeping.paused = True
        asked = as_float32(wide)
    assert {x.dtype for x in kept} == {torch.float64}
    assert all(torch.equal(x, wide) for x in kept[:3])
    assert {x.dtype for x in (*narrow, *asked, *as_float32(wide))} == {torch.float32}


def test_experts_run_in_float64_one_by_one_until_it_is_undone():
    model, ids = tiny_model("qwen3_moe").double(), torch.arange(8)[None]
    model.set_experts_implementation("grouped_mm")
    before = model.get_experts_implementation()
    undo = run_experts_one_by_one(model)
    assert undo == before
    with torch.no_grad():
        assert model(ids).logits.dtype == torch.float64
    model.set_experts_implementation(undo)
    assert model.get_experts_implementation() == before


def test_a_model_without_experts_is_not_changed():
    model = tiny_model("llama")
    before = model.get_experts_implementation()
    run_experts_one_by_one(model)
    assert model.get_experts_implementation() == before


def test_decays_that_were_rounded_to_float32_are_computed_again():
    model = tiny_model("minimax", torch.float64, sharp=True)
    mixer = model.model.layers[0].self_attn
    rounded = mixer.query_decay
    compute_decays_again(model)
    places = torch.arange(1, mixer.block_size + 1, dtype=torch.float64)
    exact = torch.exp(-mixer.slope_rate.flatten()[:, None] * places)[..., None]
    assert torch.equal(mixer.query_decay, exact)
    assert 2.0**-40 < float((rounded - exact).abs().max()) < 2.0**-23
    assert dict(model.named_buffers()).keys() >= {"model.layers.0.self_attn.query_decay"}
