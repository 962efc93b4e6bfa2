"""A written config states its RoPE in the keys of transformers 4 as well, for programs that know only those."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, Gemma3TextConfig, Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from ropewalk.compatibility import readings
from ropewalk.compatibility.table import checkpoint_of, readings_of
from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.export import export
from ropewalk.models.config.file import config_from_json
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import with_both_spellings, with_rope, written_config
from ropewalk.models.support import ModelsSettings, supported
from ropewalk.rope import Default, Linear, Llama3, LongRope, RopeMethod, Yarn, methods_from_config
from tests.cli.byte_checkpoint import save_byte_checkpoint
from tests.places import ROOT

GEMMA_3 = Gemma3TextConfig(
    head_dim=8,
    sliding_window=24,
    num_hidden_layers=6,
    hidden_size=32,
    num_attention_heads=4,
    max_position_embeddings=256,
)
METHODS: tuple[RopeMethod, ...] = (
    Default(8, 5e5),
    Linear(8, 1e4, 4.0),
    Yarn(8, 1e4, 4.0, 64),
    Llama3(8, 1e4, 4.0, 1.0, 4.0, 64),
    LongRope(8, 1e4, (1.0,) * 4, (2.0,) * 4, 1.154700538379252, 64),
)


def without(stated: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in stated.items() if key not in keys}


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_an_exported_checkpoint_is_read_by_programs_that_know_only_the_older_keys(
    method: RopeMethod, tmp_path: Path
) -> None:
    folder = save_byte_checkpoint(tmp_path / "old", 64, 0.3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found = export(folder, method, 256, tmp_path / "new", tokenizer)
    stated = json.loads((found.out / "config.json").read_text())
    older, newer = without(stated, "rope_parameters"), without(stated, "rope_theta", "rope_scaling")
    assert methods_from_config(older) == methods_from_config(newer) == {None: method}
    verdicts = {each.key: each.verdict for each in readings(str(found.out))}
    assert verdicts["transformers"] == verdicts["transformers-4"] == verdicts["vllm"] == "same" or (
        method.name == "longrope"
    )
    config = transformers.AutoConfig.from_pretrained(found.out)
    assert config.rope_parameters == newer["rope_parameters"]


def test_every_family_reads_the_same_from_both_spellings() -> None:
    """transformers takes the older keys first, and some classes read them in their own way."""
    both = 0
    for family in supported(ModelsSettings()).families:
        # The class of Gemma 4's assistant refuses its own defaults.
        if family not in CONFIG_MAPPING or family == "gemma4_assistant":
            continue
        stated = written_config(CONFIG_MAPPING[family]().get_text_config())
        text = CONFIG_MAPPING[stated["model_type"]]
        newer = without(stated, "rope_theta", "rope_scaling")
        if newer == stated or "rope_parameters" not in stated:
            continue
        read, expected = (
            text.from_dict(without(each, "time_step_limit")).rope_parameters for each in (stated, newer)
        )
        assert read == expected, family
        both += 1
    assert both > 50


def test_keys_without_an_older_place_are_left_as_they_are() -> None:
    entry = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 1, 1]}
    for stated in (
        {"model_type": "llama", "rope_parameters": entry},
        {"model_type": "unheard_of", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"model_type": "llama"},
    ):
        assert with_both_spellings(dict(stated)) == stated


@pytest.mark.parametrize("attention_factor", [math.sqrt(1 + math.log(64) / math.log(4096)), 1.1])
def test_phi_3_is_written_as_older_programs_read_it_or_refuse_it(
    attention_factor: float, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((ROOT / "tests/configs/phi-3-mini-128k-instruct.json").read_text())
    config = read_config(tmp_path)
    method = replace(config.methods[None], attention_factor=attention_factor)
    stated = written_config(with_rope(config, method, 64 * 4096).source)
    published = attention_factor > 1.2
    assert (list(stated["rope_scaling"]) == ["type", "short_factor", "long_factor"]) == published
    found = {each.key: each.verdict for each in readings_of(checkpoint_of(stated), "my/model")}
    # transformers 4 and mlx-lm have no place for another attention factor.
    wrong = {} if published else dict.fromkeys(("transformers-4", "mlx-lm"), "refuses")
    if not published:
        # Its converter writes the formula's factor, and export --gguf the model's.
        wrong["llama.cpp"] = "with an option"
    # Servers choose longrope's list when they start.
    right = ("same", "long inputs only")
    assert {key: verdict for key, verdict in found.items() if verdict not in right} == wrong
    # The three keys come first in transformers 5, where they mean the same.
    read = Phi3Config.from_dict(stated)
    rotary = Phi3RotaryEmbedding(read)
    for length in (4096, 4097):
        cosine, _ = rotary(torch.zeros(1), torch.tensor([[0, length - 1]]))
        assert float(cosine[0, 0, 0]) == pytest.approx(attention_factor, rel=1e-6)
        wanted = torch.cos((length - 1) * method.frequencies(length).inv_freq).float() * attention_factor
        torch.testing.assert_close(cosine[0, 1, : len(wanted)], wanted, rtol=0, atol=2e-3)


@pytest.mark.parametrize("method", [Default(8, 7e6), Linear(8, 1e6, 8.0), Yarn(8, 1e6, 4.0, 256)])
def test_gemma_3_is_written_with_both_bases_for_older_programs(method: RopeMethod) -> None:
    """transformers 4 and mlx-lm read ``rope_theta`` and ``rope_local_base_freq``; transformers 5 reads the same."""
    config = ModelConfig.of(GEMMA_3)
    changed = with_rope(config, method, 1024)
    stated = written_config(changed.source)
    local = config.other_ropes["sliding_attention"].rope_theta
    assert (stated["rope_theta"], stated["rope_local_base_freq"]) == (method.rope_theta, local)
    read = Gemma3TextConfig.from_dict(dict(stated))
    assert ModelConfig.of(read).methods == config_from_json(stated).methods == changed.methods
    verdicts = {each.key: each.verdict for each in readings_of(checkpoint_of(stated), "my/model")}
    assert [verdicts[key] for key in ("transformers", "transformers-4", "mlx-lm")] == ["same"] * 3
    # Without the older keys, both would compute something else.
    alone = without(stated, "rope_theta", "rope_local_base_freq", "rope_scaling")
    others = {each.key: each.verdict for each in readings_of(checkpoint_of(alone), "my/model")}
    assert [others[key] for key in ("transformers-4", "mlx-lm")] == ["differs"] * 2


def test_two_spellings_of_gemma_3_that_say_different_things_are_refused() -> None:
    changed = with_rope(ModelConfig.of(GEMMA_3), Linear(8, 1e6, 8.0), 1024)
    stated = written_config(changed.source)
    for scaling in ({"rope_type": "linear", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0}):
        with pytest.raises(RopewalkError):
            methods_from_config({**stated, "rope_scaling": scaling})
    with pytest.raises(RopewalkError, match=r"rope_scaling .*factor': 4.* contradicts rope_parameters"):
        methods_from_config({**stated, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
