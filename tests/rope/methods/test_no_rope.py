"""No rotation: frequencies of 0, which a config states as longrope factors that no position can turn by."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropewalk.errors import RopewalkError
from ropewalk.rope import (
    Default,
    LongRope,
    NoRope,
    RotaryEmbedding,
    Yarn,
    method_for_target,
    method_from_config,
    replace_methods,
)
from ropewalk.rope.methods.longrope import NO_ROTATION
from ropewalk.training.stage_rope.base import as_json, method_from

STILL = NoRope(8, 1e4, 512)
CONFIG = {"head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 512, "num_hidden_layers": 2}


def test_cos_is_1_and_sin_is_0_at_any_position():
    positions = torch.tensor([[0, 1, 511, 512, 10**9]])
    cos, sin = RotaryEmbedding(STILL)(torch.empty(1), positions)
    assert torch.equal(cos, torch.ones(1, 5, 8))
    assert torch.equal(sin, torch.zeros(1, 5, 8))


def test_transformers_own_function_turns_nothing_within_float64():
    """Of the config that is written: half a unit of float64 at a billion tokens, and no attention factor."""
    parameters = replace_methods(CONFIG, STILL)["rope_parameters"]
    config = LlamaConfig(head_dim=8, max_position_embeddings=512, rope_parameters=parameters)
    for length in (1, 512, 513, 10**9):
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=length)
        assert attention_factor == 1
        assert float(inv_freq.double().max()) * 1e9 < 2**-53


def test_a_config_keeps_it():
    written = replace_methods(CONFIG, STILL)
    assert written["rope_parameters"]["long_factor"] == [NO_ROTATION] * 4
    assert method_from_config(written) == STILL


@pytest.mark.parametrize(
    "changed",
    [
        {"attention_factor": 1.25},
        {"long_factor": (NO_ROTATION, NO_ROTATION, NO_ROTATION, 1e6)},
        {"short_factor": (1.0,) * 4},
        {"start_tokens": 2},
    ],
)
def test_a_longrope_that_turns_something_or_scales_is_no_such_method(changed):
    longrope = replace(STILL.as_written(), **changed)
    assert NoRope.instead_of(longrope) is longrope


@pytest.mark.parametrize("current", [Default(8, 1e4), Yarn(8, 1e4, 4.0, 128), STILL])
def test_any_checkpoint_can_lose_its_rope(current):
    assert method_for_target("none", current, 512, 512) == STILL


@pytest.mark.parametrize("name", ["theta", "linear", "yarn", "ntk", "longrope", "llama3"])
def test_no_method_turns_weights_that_know_no_rotation(name):
    with pytest.raises(RopewalkError, match=f"'{name}' cannot extend a checkpoint without RoPE"):
        method_for_target(name, STILL, 512, 1024)


def test_its_own_settings_are_refused():
    with pytest.raises(RopewalkError, match="original_max_position_embeddings must be a whole number"):
        NoRope(8, 1e4, 1)
    with pytest.raises(RopewalkError, match=r"rope_theta 500000\.0 has no meaning for method 'none'"):
        method_for_target("none", Default(8, 1e4), 512, 512, rope_theta=5e5)


def test_it_is_written_as_longrope_that_no_length_switches():
    written = STILL.as_written()
    assert isinstance(written, LongRope)
    assert written.switch_length is None


def test_other_layers_keep_their_method_and_more_may_lose_it():
    yarn = Yarn(8, 1e4, 4.0, 128)
    some = method_for_target("none", yarn, 512, 512, parameters={"layers": (3, 1, 3)})
    assert some == NoRope(8, 1e4, 512, (1, 3), yarn)
    assert some.rotates
    assert torch.equal(some.frequencies().inv_freq, yarn.frequencies().inv_freq)
    more = method_for_target("none", some, 512, 1024, parameters={"layers": (0,)})
    assert more == NoRope(8, 1e4, 1024, (0, 1, 3), yarn)
    assert method_for_target("none", more, 1024, 1024) == NoRope(8, 1e4, 1024)
    with pytest.raises(RopewalkError, match="'yarn' cannot extend a checkpoint without RoPE in some layers"):
        method_for_target("yarn", some, 512, 1024)


@pytest.mark.parametrize(
    ("current", "layers", "sentence"),
    [
        (Default(8, 1e4), (), r"layers must be a list of layers, counted from 0, got \[\]"),
        (Default(8, 1e4), (-1,), r"got \[-1\]"),
        (STILL, (0,), r"layers \[0\] cannot lose their RoPE, because no layer has any"),
        (STILL.as_written(), (0,), "the others have longrope RoPE, which depends on the length"),
    ],
)
def test_layers_that_cannot_lose_it_alone(current, layers, sentence):
    with pytest.raises(RopewalkError, match=sentence):
        method_for_target("none", current, 512, 512, parameters={"layers": layers})


@pytest.mark.parametrize("method", [STILL, NoRope(8, 1e4, 512, (1, 3), Yarn(8, 1e4, 4.0, 128))])
def test_a_run_remembers_it(method):
    assert method_from(json.loads(json.dumps(as_json(method)))) == method
