"""vLLM 0.25 and 0.33 as recorded with their own modules."""

import json
import math
import shlex
from dataclasses import replace

import pytest

from ropewalk.compatibility.reader import UnreadConfigError
from ropewalk.compatibility.table import checkpoint_of
from ropewalk.compatibility.vllm import VLLM, VLLM_BEFORE_030, deepseek_yarn
from ropewalk.rope import Linear, Yarn
from tests.compatibility.recorded import checkpoint, differing, only, with_entry
from tests.compatibility.test_reader import BY_LAYER


def test_it_computes_what_vllm_computed() -> None:
    assert differing(VLLM, "vllm") == []
    assert differing(VLLM_BEFORE_030, "vllm-0.22") == []


@pytest.mark.parametrize("dropped", ["served", "chooses", "methods"])
def test_a_wrong_reader_is_noticed(dropped: str) -> None:
    wrong = {
        "served": replace(VLLM, served=lambda read: read.length),
        "chooses": replace(VLLM, chooses="input"),
        "methods": replace(VLLM, methods=VLLM_BEFORE_030.methods),
    }
    assert differing(wrong[dropped], "vllm")


def test_yarn_needs_an_override_before_0_30() -> None:
    read = checkpoint("llama yarn-attention newer")
    assert only(VLLM.methods(read)).attention_factor == 1.0
    assert math.isclose(only(VLLM_BEFORE_030.methods(read)).attention_factor, 0.1 * math.log(4) + 1)
    line = VLLM_BEFORE_030.option("my/model", read)
    assert line is not None
    command, name, *_, flag, overrides = shlex.split(line)
    entry = json.loads(overrides)["rope_parameters"]
    assert (command, name, flag) == ("vllm", "serve", "--hf-overrides")
    # Its attention factor is the formula times attn_factor; the override replaces the mapping, base included.
    assert math.isclose(entry["attn_factor"] * (0.1 * math.log(4) + 1), 1)
    assert entry["rope_theta"] == 5e4


def test_lengths_without_an_option() -> None:
    assert VLLM.served(checkpoint("llama linear newer")) == 4 * 4096
    longer = checkpoint("llama yarn newer", max_position_embeddings=3000)
    assert (VLLM.served(longer), VLLM_BEFORE_030.served(longer)) == (3000, 4096)
    assert VLLM.launch("m", longer) == "vllm serve m --max-model-len 3000"
    # Gemma 3 states its scaled length.
    assert VLLM.served(checkpoint_of(BY_LAYER)) == 4096


def test_layer_types_are_read_for_models_with_code_for_them() -> None:
    assert VLLM.methods(checkpoint_of(BY_LAYER))["full_attention"] == Linear(16, 1e6, 8.0)
    olmo = checkpoint_of({**BY_LAYER, "model_type": "olmo3"})
    assert VLLM.methods(olmo) == olmo.methods()
    with pytest.raises(UnreadConfigError, match="code for models with 2 layer types"):
        VLLM_BEFORE_030.methods(olmo)


def test_latent_attention_reads_the_mscales_alone() -> None:
    method = Yarn(16, 5e4, 4.0, 1024, attention_factor=9.0, mscale=1.0, mscale_all_dim=0.5)
    expected = (0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    assert math.isclose(deepseek_yarn(method).frequencies().attention_factor, expected)


def test_gpt_oss_passes_no_attention_factor() -> None:
    odd = with_entry("llama yarn-attention newer")
    odd = replace(odd, completed={**odd.completed, "model_type": "gpt_oss"})
    assert only(VLLM.methods(odd)).attention_factor != 1.0
    assert VLLM.option("m", odd) is None
