"""RoPE as it is loaded: the precision casts parameters alone, and angles are read however a module lays them out."""

from dataclasses import replace

import pytest
import torch

from ropewalk.rope import STYLES, Default, RotaryEmbedding
from ropewalk.verification.checks import effective_rope
from ropewalk.verification.checks.effective_rope import cos_sin_of, rope_as_loaded
from tests.verification.test_run_families import case_of
from tests.verification.verification_cases import OTHER_FAULTS, in_precision


def test_the_precision_casts_parameters_alone(case, monkeypatch):
    """ropewalk's own module has no buffer to round; that of transformers keeps its frequencies, as in a run."""
    half = in_precision(case, "bfloat16")
    stock = replace(half, setup=replace(case.setup, exact_rope=False))
    assert rope_as_loaded(stock).passed
    assert rope_as_loaded(half).passed
    OTHER_FAULTS["whole model cast"](monkeypatch)
    rounded = rope_as_loaded(stock)
    assert rounded.passed is False
    assert "inv_freq is rounded to bfloat16" in rounded.note


@pytest.mark.parametrize("style", STYLES)
def test_angles_are_read_in_every_style(style):
    method, positions = Default(8, 10000.0), torch.tensor([0, 1, 2, 255])
    cos, sin = cos_sin_of(RotaryEmbedding(method, style=style)(torch.empty(1), positions[None]))
    angles = positions.double()[:, None] * method.frequencies()[0]
    assert torch.equal(cos, angles.cos().float())
    assert torch.equal(sin, angles.sin().float())


def test_layers_of_every_type_are_read(tmp_path, monkeypatch):
    """A fault in the layers with a window is found, though those of full attention rotate as the recipe says."""
    base = case_of("gemma3", tmp_path / "model", tmp_path)
    local = {"sliding_attention": Default(base.rope.rotary_dim, 3e4)}
    case = replace(base, setup=replace(base.setup, other_ropes=local))
    sound = rope_as_loaded(case)
    assert sound.passed
    assert "sliding_attention" in sound.note
    assert "full_attention" in sound.note
    load = effective_rope.load_model

    def without_local(path, setup, *arguments):
        return load(path, replace(setup, other_ropes={}), *arguments)

    monkeypatch.setattr(effective_rope, "load_model", without_local)
    faulty = rope_as_loaded(case)
    assert faulty.passed is False
    assert "in layers of type sliding_attention, the model's RoPE angles are not those of" in faulty.note
    assert "rope_theta 30,000" in faulty.note
