"""NTK and YaRN with a given critical pair (LongRoPE2's NTK-rcd and YaRN-rcd), up to the config that is exported."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropewalk.compatibility.table import checkpoint_of, readings_of
from ropewalk.errors import RopewalkError
from ropewalk.rope import Default, Yarn, method_for_target, unscaled_inv_freq
from ropewalk.rope.config import methods_from_config, replace_methods, with_older_keys
from ropewalk.rope.methods.base import RopeMethod
from ropewalk.rope.target import candidate
from tests.rope.rope_cases import FLOAT32_ORACLE, FLOAT64_ORACLE, examples

LLAMA_3 = Default(128, 5e5)
LENGTHS = (8192, 131072)


def at_pair(name: str, pair: int, current: RopeMethod = LLAMA_3, **parameters: Any) -> RopeMethod:
    return method_for_target(name, current, *LENGTHS, parameters={"critical_pair": pair, **parameters})


def factors(method: RopeMethod) -> torch.Tensor:
    return unscaled_inv_freq(method.rotary_dim, 5e5) / method.frequencies().inv_freq


def exported(method: RopeMethod, kind: str = "llama") -> dict[str, Any]:
    """A config.json with the method, as a checkpoint is exported."""
    plain = {
        "model_type": kind,
        "hidden_size": 256,
        "num_attention_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": LENGTHS[1],
    }
    return with_older_keys(replace_methods(plain, method.as_written()))


def test_ntk_divides_the_critical_pair_by_the_factor() -> None:
    method = at_pair("ntk", 30)
    # Computed by hand from λ_30 = 16: 5e5 · 16^(128/60).
    assert isinstance(method, Default)
    assert method.rope_theta == pytest.approx(185_250_462.4, rel=1e-9)
    found = factors(method)
    assert found[[0, 1, 30, 63]].tolist() == pytest.approx([1, 1.09682, 16, 337.794], rel=1e-5)
    pairs = torch.arange(64, dtype=torch.float64)
    torch.testing.assert_close(found, 16 ** (pairs / 30), rtol=FLOAT64_ORACLE, atol=0)


def test_ntk_at_the_last_pair_is_ntk() -> None:
    assert at_pair("ntk", 63) == method_for_target("ntk", LLAMA_3, *LENGTHS).as_written()


def test_ntk_in_two_steps_is_ntk_in_one() -> None:
    step = {"critical_pair": 30}
    middle = method_for_target("ntk", LLAMA_3, 8192, 32768, parameters=step)
    found = method_for_target("ntk", middle, 32768, 131072, parameters=step)
    assert found.rope_theta == pytest.approx(at_pair("ntk", 30).rope_theta, rel=FLOAT64_ORACLE)


def test_ntk_at_the_theoretical_pair_before_rounding_is_the_rule_critical_dimension() -> None:
    pair = 64 * math.log(8192 / (2 * math.pi), 5e5)
    law = candidate("critical-dimension", LLAMA_3, *LENGTHS).rope_theta
    # The exponent is linear in 1/pair, so two whole pairs give it for the fraction.
    logs = {c: math.log(at_pair("ntk", c).rope_theta / 5e5) for c in (34, 35)}
    assert logs[34] * 34 == pytest.approx(logs[35] * 35, rel=FLOAT64_ORACLE)
    assert logs[34] * 34 / pair == pytest.approx(math.log(law / 5e5), rel=FLOAT64_ORACLE)


def test_yarn_ends_its_ramp_at_the_critical_pair_and_keeps_its_start() -> None:
    method = at_pair("yarn", 30)
    assert isinstance(method, Yarn)
    assert (method.ramp_range(), method.truncate) == ((18, 30), True)
    # 8192 / (2π · 5e5^(59/128)): half a pair before the end. The exact end would be 2.77854788.
    assert method.beta_slow == pytest.approx(3.078514, abs=5e-7)
    found = factors(method)
    # Along the ramp 1/λ is linear: at 7 of 12 pairs 1 - 7/12 · 15/16.
    assert float(found[25]) == pytest.approx(1 / (1 - 7 / 12 * 15 / 16), rel=FLOAT64_ORACLE)
    assert float(found[25]) == pytest.approx(2.206897, abs=5e-7)
    assert found[[0, 18, 30, 63]].tolist() == pytest.approx([1, 1, 16, 16], rel=FLOAT64_ORACLE)


@pytest.mark.parametrize("change", [-1e-3, -1e-6, 1e-6, 1e-3])
def test_rounding_beta_slow_does_not_move_the_end_of_the_ramp(change: float) -> None:
    method = at_pair("yarn", 30)
    assert isinstance(method, Yarn)
    moved = Yarn(128, 5e5, 16.0, 8192, beta_slow=method.beta_slow * (1 + change))
    assert torch.equal(moved.frequencies().inv_freq, method.frequencies().inv_freq)
    # The value that gives pair 30 exactly is unsafe: the same change moves the end by a pair.
    exact = Yarn(128, 5e5, 16.0, 8192, beta_slow=8192 / (2 * math.pi * 5e5 ** (60 / 128)) * (1 - 1e-9))
    assert exact.ramp_range() == (18, 31)


def test_yarn_with_a_ramp_that_is_not_rounded_ends_exactly_there() -> None:
    method = at_pair("yarn", 30, truncate=False)
    assert isinstance(method, Yarn)
    assert method.ramp_range()[1] == pytest.approx(30, rel=FLOAT64_ORACLE)


@examples
@given(st.integers(20, 63), st.booleans(), st.floats(1.0, 64.0))
def test_the_ramp_ends_at_every_pair_that_is_asked_for(pair: int, truncate: bool, factor: float) -> None:
    method = at_pair("yarn", pair, truncate=truncate, factor=factor)
    assert isinstance(method, Yarn)
    assert method.ramp_range()[1] == pytest.approx(pair, rel=FLOAT64_ORACLE)


@pytest.mark.parametrize(("name", "pair"), [("ntk", 30), ("yarn", 30), ("yarn", 25), ("yarn", 35)])
def test_transformers_computes_the_same_from_the_exported_config(name: str, pair: int) -> None:
    method = at_pair(name, pair)
    stated = exported(method)
    config = LlamaConfig(**stated)
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        theirs, attention = 1 / config.rope_parameters["rope_theta"] ** (torch.arange(0, 128, 2) / 128), 1.0
    else:
        theirs, attention = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    own = method.frequencies()
    torch.testing.assert_close(own.inv_freq, theirs.double(), rtol=FLOAT32_ORACLE, atol=0)
    assert attention == pytest.approx(own.attention_factor, rel=FLOAT64_ORACLE)
    assert kind == {"ntk": "default", "yarn": "yarn"}[name]
    assert methods_from_config(stated) == {None: method}


def test_a_further_stage_keeps_the_end_of_the_ramp() -> None:
    first = method_for_target("yarn", LLAMA_3, 8192, 32768, parameters={"critical_pair": 30})
    assert method_for_target("yarn", first, 32768, 131072) == at_pair("yarn", 30)
    again = method_for_target("yarn", first, 32768, 131072, parameters={"critical_pair": 30})
    assert again == at_pair("yarn", 30)


@pytest.mark.parametrize(
    ("kind", "verdict"), [("llama", "with an option"), ("qwen2", "differs"), ("qwen3", "differs")]
)
def test_llama_cpp_drops_the_end_of_the_ramp_and_its_verdict_says_so(kind: str, verdict: str) -> None:
    stated = {**exported(at_pair("yarn", 30), kind), "vocab_size": 10, "num_hidden_layers": 1}
    found = {each.key: each for each in readings_of(checkpoint_of(stated), "my/model")}
    reading = found.pop("llama.cpp")
    assert reading.verdict == verdict
    assert reading.detail.startswith("it computes yarn with beta_slow 1, not 3.078513688; angles off by")
    assert {each.verdict for each in found.values()} == {"same"}


@pytest.mark.parametrize(
    ("name", "method", "pair"),
    [("ntk-rcd=30", "ntk", 30), ("yarn-rcd=30", "yarn", 30), ("ntk-rcd=7", "ntk", 7)],
)
def test_a_rule_names_method_and_pair(name: str, method: str, pair: int) -> None:
    assert candidate(name, LLAMA_3, *LENGTHS) == at_pair(method, pair)


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("ntk", {"critical_pair": 0}, "from 1 to 63 .*, got 0"),
        ("ntk", {"critical_pair": 64}, "from 1 to 63 .*, got 64"),
        ("yarn", {"critical_pair": 64}, "from 1 to 63 .*, got 64"),
        ("yarn", {"critical_pair": True}, "got True"),
        ("yarn", {"critical_pair": 18}, "starts near pair 18 .* cannot end at critical_pair 18"),
        ("yarn", {"critical_pair": 30, "beta_slow": 2.0}, "either critical_pair 30 or beta_slow 2"),
        ("ntk", {"critical_pair": 1, "factor": 1e6}, "too large for float64; choose a larger critical_pair"),
        ("linear", {"critical_pair": 30}, "'critical_pair' has no meaning for method 'linear'"),
    ],
)
def test_what_cannot_be_is_refused(name: str, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(RopewalkError, match=said):
        method_for_target(name, LLAMA_3, *LENGTHS, parameters=parameters)


@pytest.mark.parametrize("name", ["ntk-rcd=", "yarn-rcd=x", "ntk-rcd=1.5", "yarn-rcd=-3"])
def test_a_rule_without_a_pair_is_refused(name: str) -> None:
    with pytest.raises(RopewalkError, match="is not the index of a rotary pair, counted from 0"):
        candidate(name, LLAMA_3, *LENGTHS)
