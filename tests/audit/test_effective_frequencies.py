"""Frequencies at each stage of a model's life, against numpy and against what was planted."""

import logging
import math
import types
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ropewalk import RopewalkError
from ropewalk.audit import effective_frequencies as frequencies
from ropewalk.audit.audited_model import AuditedModel
from ropewalk.audit.effective_frequencies import angle_error_with_turns, rope_findings, rope_stages
from ropewalk.models.rope import frequencies as stages_room
from ropewalk.rope import LongRope, RotaryEmbedding

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PAIRS = 8
THETA = 1e4
EXTENDED = {"rope_theta": THETA, "factor": 16.0, "original_max_position_embeddings": 256}
YARN = {"rope_type": "yarn", **EXTENDED}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **EXTENDED}
SHORT, LONG = [1.0 + i / 8 for i in range(PAIRS)], [1.0 + 2 * i for i in range(PAIRS)]
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG, **EXTENDED}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": THETA, "factor": 4.0}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "yarn": ("LlamaConfig", {"rope_parameters": YARN, "max_position_embeddings": 4096}),
    "llama3": ("LlamaConfig", {"rope_parameters": LLAMA3, "max_position_embeddings": 4096}),
    "longrope": ("LlamaConfig", {"rope_parameters": LONGROPE, "max_position_embeddings": 4096}),
    "dynamic": ("LlamaConfig", {"rope_parameters": DYNAMIC}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 128, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    ),
    "cohere2": ("Cohere2Config", {"sliding_window": 128, "num_hidden_layers": 4}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "phi": ("PhiConfig", {"partial_rotary_factor": 0.5}),
}
FLOAT32_FREQUENCY = 3e-7
"""A power, a division and a ramp in float32: some roundings of 6e-8."""


def model_of(family: str = "llama", **changes: Any) -> Any:
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(**{**COMMON, **deepcopy(extra), **changes})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def subject_of(family: str = "llama", **changes: Any) -> AuditedModel:
    return AuditedModel.of(model_of(family, **changes))


def by_name(stages: Any, layer_type: str | None = None) -> dict[str, Any]:
    return {stage.stage: stage for stage in stages if stage.layer_type == layer_type}


def numpy_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, on the bits of float32."""
    bits = x.astype(np.float32).view(np.uint32)
    kept = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return kept.view(np.float32).astype(np.float64)


def numpy_float16(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).astype(np.float16).astype(np.float64)


ROUNDED = {"bfloat16": numpy_bfloat16, "float16": numpy_float16}


def wrapped(angle: np.ndarray) -> np.ndarray:
    return np.abs(np.angle(np.exp(1j * angle)))


def plain(pairs: int = PAIRS, theta: float = THETA) -> np.ndarray:
    return theta ** (-np.arange(pairs) / pairs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("position", [100, 20_000])
def test_only_a_cast_changes_what_a_model_rotates_with(family, position):
    audited_model = subject_of(family)
    stages = rope_stages(audited_model, position)
    for layer_type, method in audited_model.methods.items():
        named = by_name(stages, layer_type)
        assert list(named) == ["config", "loaded", "to bfloat16", "to float16", "saved and loaded"]
        truth = method.frequencies(position + 1).inv_freq.numpy()
        assert named["config"].inv_freq == tuple(truth)
        assert named["config"].frequency_error == named["config"].angle_error == 0
        for stage in ("loaded", "saved and loaded"):
            assert (named[stage].dtype, named[stage].cos_sin_dtype) == ("float32", "float32")
            assert named[stage].frequency_error < FLOAT32_FREQUENCY
            # The error of the frequency, and rounding of the product, of cos and of sin.
            assert named[stage].angle_error < FLOAT32_FREQUENCY * position + 1e-6
            assert named[stage].position == position
    rounded = {finding.split()[1] for finding in rope_findings(stages)}
    anew = family in ("dynamic", "longrope") and computes_anew(audited_model.rotary, position)
    assert anew or family != "dynamic" or position <= 256
    assert rounded == (set() if anew else {".to(bfloat16)", ".to(float16)"})


def computes_anew(rotary: Any, position: int) -> bool:
    """Whether a cast module leaves its rounded frequencies for ones in float32 when it is called for a longer sequence.

    That of dynamic NTK does; that of LongRoPE does in transformers 5.17, later versions round them into the buffer.
    """
    cast = deepcopy(rotary).to(torch.bfloat16)
    cast(torch.zeros(1), torch.tensor([[position]]))
    return cast.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ROUNDED)
def test_a_cast_is_that_of_the_frequencies_held(family, dtype):
    position = 200
    audited_model = subject_of(family)
    stages = rope_stages(audited_model, position)
    for layer_type in audited_model.methods:
        named = by_name(stages, layer_type)
        held = np.array(named["loaded"].inv_freq)
        cast, truth = ROUNDED[dtype](held), np.array(named["config"].inv_freq)
        found = named[f"to {dtype}"]
        assert found.inv_freq == tuple(cast)
        assert (found.dtype, found.cos_sin_dtype) == (dtype, dtype)
        assert found.frequency_error == pytest.approx(np.abs(cast / truth - 1).max(), rel=1e-12)
        # The angle is computed in float32 from what is held: a rounding of up to 200 rad.
        assert found.angle_error == pytest.approx(wrapped(position * (cast - truth)).max(), abs=2e-5)


def test_a_length_dependent_method_is_compared_in_the_same_situation():
    audited_model = subject_of("longrope")
    for position, factors in ((100, SHORT), (1000, LONG)):
        loaded = by_name(rope_stages(audited_model, position))["loaded"]
        np.testing.assert_allclose(loaded.inv_freq, plain() / factors, rtol=FLOAT32_FREQUENCY)
    longer = by_name(rope_stages(audited_model, 100, total_length=1000))["loaded"]
    np.testing.assert_allclose(longer.inv_freq, plain() / LONG, rtol=FLOAT32_FREQUENCY)
    np.testing.assert_allclose(audited_model.rotary.inv_freq, plain() / SHORT, rtol=FLOAT32_FREQUENCY)


@pytest.mark.parametrize("family", ["llama", "longrope", "dynamic", "gemma3"])
def test_the_model_stays_as_it_is(family):
    model = model_of(family)
    model.config.architectures = ["SomethingElse"]
    audited_model = AuditedModel.of(model)
    before, config = deepcopy(dict(audited_model.rotary.named_buffers())), deepcopy(model.config.to_dict())
    attributes = set(audited_model.rotary.__dict__)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    rope_stages(audited_model, 5000)
    after = dict(audited_model.rotary.named_buffers())
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert torch.equal(value, after[name])
        assert value.dtype == after[name].dtype
    assert set(audited_model.rotary.__dict__) == attributes
    assert model.config.to_dict() == config
    assert model.config.architectures == ["SomethingElse"]
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("dtype", ROUNDED)
def test_loading_in_a_dtype_keeps_what_casting_to_it_rounds(dtype, tmp_path):
    model_of().save_pretrained(tmp_path)
    load = transformers.AutoModelForCausalLM.from_pretrained
    loaded = by_name(rope_stages(AuditedModel.of(load(tmp_path, dtype=getattr(torch, dtype)).eval()), 1000))
    assert (loaded["loaded"].dtype, loaded["loaded"].cos_sin_dtype) == ("float32", dtype)
    assert loaded["loaded"].frequency_error < FLOAT32_FREQUENCY
    cast = rope_stages(AuditedModel.of(load(tmp_path).to(getattr(torch, dtype)).eval()), 1000)
    named = by_name(cast)
    assert named["loaded"].dtype == dtype
    assert named["loaded"].inv_freq == tuple(ROUNDED[dtype](plain()))
    assert named["saved and loaded"].frequency_error < FLOAT32_FREQUENCY
    (finding,) = rope_findings(cast)
    assert finding.startswith(f"The model's rotary module holds inv_freq in {dtype}: ")
    assert f"load it again with dtype={dtype}" in finding


@pytest.mark.parametrize("family", ["llama", "llama3", "gemma3"])
@pytest.mark.parametrize("dtype", ROUNDED)
def test_a_cast_there_and_back_is_found_in_float32(family, dtype):
    stages = rope_stages(AuditedModel.of(model_of(family).to(getattr(torch, dtype)).float()), 1000)
    findings = [finding for finding in rope_findings(stages) if "once rounded" in finding]
    assert len(findings) == len({stage.layer_type for stage in stages}) == len(rope_findings(stages))
    assert all(f"inv_freq in float32, once rounded to {dtype}" in finding for finding in findings)


def test_finding_tells_percent_and_angle_with_whole_turns():
    stages = rope_stages(subject_of(), 1_000_000)
    truth, cast = plain(), numpy_bfloat16(plain())
    (finding,) = (found for found in rope_findings(stages) if "bfloat16" in found)
    assert f"off by {100 * np.abs(cast / truth - 1).max():.2g} %" in finding
    assert f"an angle error of {1e6 * np.abs(cast - truth).max():,.0f} rad at position 1,000,000" in finding
    assert by_name(stages)["to bfloat16"].angle_error <= math.pi


@pytest.mark.parametrize("layer_type", [None, "sliding_attention"])
def test_a_wrong_base_in_the_module_is_found(layer_type):
    model = model_of("llama" if layer_type is None else "gemma3")
    rotary = AuditedModel.of(model).rotary
    held = rotary.inv_freq if layer_type is None else rotary.sliding_attention_inv_freq
    wrong = plain(theta=5e5)
    held.copy_(torch.from_numpy(wrong))
    stages = rope_stages(AuditedModel.of(model), 1000)
    named = by_name(stages, layer_type)
    truth = np.array(named["config"].inv_freq)
    assert named["loaded"].frequency_error == pytest.approx(np.abs(wrong / truth - 1).max(), abs=1e-6)
    stretch = np.arange(1000 - 63, 1001)[:, None]
    assert named["loaded"].angle_error == pytest.approx(wrapped(stretch * (wrong - truth)).max(), abs=2e-4)
    with_turns = angle_error_with_turns(named["loaded"], named["config"])
    assert with_turns == pytest.approx(1000 * np.abs(wrong - truth).max(), rel=1e-5)
    assert named["saved and loaded"].frequency_error < FLOAT32_FREQUENCY
    findings = [
        found for found in rope_findings(stages) if "does not compute what the config states" in found
    ]
    assert len(findings) == 1
    assert "base 500,000" in findings[0]
    assert layer_type is None or f"for {layer_type}" in findings[0]


def test_a_model_that_runs_unscaled_is_found():
    model = model_of()
    model.config.rope_parameters = dict(YARN)
    model.config.max_position_embeddings = 4096
    stages = rope_stages(AuditedModel.of(model), 1000)
    named = by_name(stages)
    np.testing.assert_allclose(named["loaded"].inv_freq, plain(), rtol=FLOAT32_FREQUENCY)
    # The slowest pair should turn 16 times slower.
    assert named["loaded"].frequency_error == pytest.approx(15, rel=1e-5)
    assert named["saved and loaded"].frequency_error < FLOAT32_FREQUENCY
    (finding,) = rope_findings(stages)
    assert "1,500 %" in finding
    assert "unscaled RoPE with base 10,000" in finding


def test_a_base_that_the_round_trip_loses_is_found(monkeypatch):
    def save(self: Any, folder: Any, **options: Any) -> None:
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e6}
        own(self, folder, **options)
        config.rope_parameters = before

    audited_model = subject_of()
    config, before = audited_model.model.config, audited_model.model.config.rope_parameters
    own = transformers.LlamaForCausalLM.save_pretrained
    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", save)
    stages = rope_stages(audited_model, 1000)
    named = by_name(stages)
    np.testing.assert_allclose(named["saved and loaded"].inv_freq, plain(theta=1e6), rtol=FLOAT32_FREQUENCY)
    (finding,) = (found for found in rope_findings(stages) if "saved" in found)
    assert finding.startswith("After it is saved and loaded the model holds inv_freq in float32: ")
    assert "base 1,000,000" in finding


@pytest.mark.parametrize("theta", [THETA, 5e5])
def test_frequencies_among_the_weights_are_shown(theta):
    model = model_of()
    for layer in model.model.layers:
        layer.register_module("old", torch.nn.Module())
        layer.old.register_buffer("inv_freq", torch.from_numpy(plain(theta=theta)).float())
        layer.old.register_buffer("original_inv_freq", torch.ones(PAIRS))
    stages = rope_stages(AuditedModel.of(model), 1000)
    (stage,) = (stage for stage in stages if stage.stage == "weights")
    assert stage.dtype == "float32"
    np.testing.assert_allclose(stage.inv_freq, plain(theta=theta), rtol=FLOAT32_FREQUENCY)
    findings = [found for found in rope_findings(stages) if "among its weights" in found]
    assert len(findings) == (0 if theta == THETA else 1)


def test_frequencies_of_another_size_among_the_weights_are_shown():
    model = model_of("gemma3")
    model.model.register_buffer("inv_freq", torch.ones(5))
    stages = rope_stages(AuditedModel.of(model), 1000)
    (stage,) = (stage for stage in stages if stage.stage == "weights")
    assert math.isnan(stage.frequency_error)
    assert math.isnan(stage.angle_error)
    (finding,) = (found for found in rope_findings(stages) if "weights" in found)
    assert "5 frequencies, but the config gives 8" in finding


def test_the_module_is_believed_by_what_comes_out():
    """One that holds the right frequencies and turns by others, and one that holds none."""

    def halved(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return own(self, x, position_ids / 2)

    class BareRotaryEmbedding(torch.nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            angles = position_ids[..., None].double() * torch.from_numpy(plain())
            both = torch.cat((angles, angles), -1)
            return both.cos().to(x.dtype), both.sin().to(x.dtype)

    audited_model = subject_of()
    rotary = deepcopy(audited_model.rotary)
    own = type(rotary).forward
    rotary.forward = types.MethodType(halved, rotary)
    stages = rope_stages(replace(audited_model, rotary=rotary), 1000)
    np.testing.assert_allclose(by_name(stages)["loaded"].inv_freq, plain() / 2, rtol=1e-6)
    assert "does not compute what the config states" in rope_findings(stages)[0]

    stages = rope_stages(replace(audited_model, rotary=BareRotaryEmbedding()), 1000)
    loaded = by_name(stages)["loaded"]
    np.testing.assert_allclose(loaded.inv_freq, plain(), rtol=1e-6)
    assert loaded.dtype == "float32"
    assert rope_findings(stages) == ()


def test_right_frequencies_with_wrong_angles_are_found():
    class BfloatRotaryEmbedding(torch.nn.Module):
        def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            positions = position_ids.bfloat16().float()
            angles = positions[..., None] * torch.from_numpy(plain()).float()
            both = torch.cat((angles, angles), -1)
            return both.cos().to(x.dtype), both.sin().to(x.dtype)

    stages = rope_stages(replace(subject_of(), rotary=BfloatRotaryEmbedding()), 1001)
    # 1001 becomes 1000, and 998, among the 64 positions before it, too.
    assert by_name(stages)["loaded"].angle_error == pytest.approx(2, abs=1e-4)
    assert (
        "the frequencies are right, but an angle is off by 2 rad at position 1,001"
        in rope_findings(stages)[0]
    )


@pytest.mark.parametrize("family", ["llama", "yarn", "longrope", "gemma3"])
def test_the_exact_module_is_exact_at_every_stage(family):
    audited_model = subject_of(family)
    ours = replace(audited_model, rotary=RotaryEmbedding(audited_model.methods))
    stages = rope_stages(ours, 1_000_000)
    assert rope_findings(stages) == ()
    for stage in stages:
        if stage.stage in ("loaded", "to bfloat16", "to float16"):
            assert (stage.dtype, stage.cos_sin_dtype) == ("float64", "float32")
            assert stage.frequency_error == 0
            # cos and sin are rounded to float32, and so is their factor.
            assert stage.angle_error < 2e-7


def test_positions_kept_unscaled_by_the_exact_module_are_no_error():
    audited_model = subject_of("longrope")
    method = audited_model.methods[None]
    assert isinstance(method, LongRope)
    ours = replace(audited_model, rotary=RotaryEmbedding(replace(method, start_tokens=4)))
    assert rope_findings(rope_stages(ours, 1000)) == ()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_large_model_is_judged_by_its_saved_config(family, monkeypatch):
    monkeypatch.setattr(frequencies, "LARGEST_ROUND_TRIP", 0)
    monkeypatch.setattr(stages_room, "save_model", None)
    audited_model = subject_of(family)
    stages = rope_stages(audited_model, 1000)
    for layer_type in audited_model.methods:
        named = by_name(stages, layer_type)
        assert "saved and loaded" not in named
        stage = named["config saved and loaded"]
        assert stage.dtype == "float32"
        assert stage.cos_sin_dtype == "not measured"
        assert stage.frequency_error < FLOAT32_FREQUENCY
    assert not [found for found in rope_findings(stages) if "saved" in found]


def test_a_model_that_cannot_be_saved_is_judged_by_its_config(monkeypatch, caplog):
    def refuse(*args: Any, **options: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "save_pretrained", refuse)
    with caplog.at_level(logging.WARNING, "ropewalk"):
        named = by_name(rope_stages(subject_of(), 1000))
    assert "config saved and loaded" in named
    assert "no room" in caplog.text


def test_the_round_trip_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(stages_room.tempfile, "tempdir", str(tmp_path))
    rope_stages(subject_of(), 100)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr().err == ""


def test_progress_reaches_the_end():
    seen: list[tuple[int, int]] = []
    rope_stages(subject_of(), 100, progress=lambda done, of: seen.append((done, of)))
    assert seen == [(done, 6) for done in range(1, 7)]


@pytest.mark.parametrize(("position", "total_length"), [(-1, None), (100, 100), (100, 5)])
def test_a_position_outside_the_sequence_is_refused(position, total_length):
    with pytest.raises(RopewalkError, match=r"position must be (0 or more|less than total_length)"):
        rope_stages(subject_of(), position, total_length)


def test_the_first_position_has_no_angle_to_be_wrong():
    assert all(stage.angle_error == 0 for stage in rope_stages(subject_of(), 0))


def test_a_real_checkpoint(stories260k):
    model = transformers.AutoModelForCausalLM.from_pretrained(stories260k, dtype=torch.bfloat16)
    named = by_name(rope_stages(AuditedModel.of(model), 1_000_000))
    truth = np.array([1, 0.1, 0.01, 0.001])
    np.testing.assert_allclose(named["config"].inv_freq, truth, rtol=1e-15)
    assert named["loaded"].dtype == named["saved and loaded"].dtype == "float32"
    assert named["loaded"].inv_freq == named["saved and loaded"].inv_freq
    cast = numpy_bfloat16(truth)
    assert named["to bfloat16"].inv_freq == tuple(cast)
    assert named["to bfloat16"].frequency_error == pytest.approx(np.abs(cast / truth - 1).max(), rel=1e-9)


def test_a_lost_attention_factor_is_named():
    audited_model = subject_of("yarn")
    audited_model.rotary.attention_scaling = 1.0  # what a port of yarn forgets: 0.1 ln s + 1
    stages = rope_stages(audited_model, 1000)
    lost, meant = by_name(stages)["loaded"], by_name(stages)["config"]
    assert lost.attention_factor == pytest.approx(1.0, abs=1e-6)
    assert meant.attention_factor == pytest.approx(0.1 * np.log(YARN["factor"]) + 1, rel=1e-12)
    assert lost.frequency_error < 1e-6
    said = rope_findings(stages)[0]
    assert "does not compute what the config states" in said
    assert "the attention factor is 1 and" in said
