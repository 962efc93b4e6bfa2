"""A checkpoint that is saved with longrope factors says the same to every reader of its config."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from ropewalk import RopewalkError
from ropewalk.models.checkpoint.export import export
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import with_rope
from ropewalk.models.load import ModelSetup, generating, load_model
from ropewalk.models.rope.rotary import rotary_module
from ropewalk.rope import (
    Default,
    LongRope,
    Theta,
    Yarn,
    for_all_readers,
    longrope_attention_factor,
    methods_from_config,
)
from tests.cli.byte_checkpoint import save_byte_checkpoint
from tests.longrope_cases import (
    FAMILIES,
    ORIGINAL,
    TARGET,
    factors,
    full_logits,
    rounding_allows,
    tiny,
    token_ids,
)
from tests.marks import slow_after
from tests.programs import run_interpreter

LENGTHS = (ORIGINAL, TARGET, ORIGINAL - 5, ORIGINAL + 1)
PUBLISHED = longrope_attention_factor(TARGET / ORIGINAL, ORIGINAL)
ANGLE_ROUNDING = 6 * 2**-24
"""Relative error of transformers' float32 angles, each rounding 2^-24: the power (two), its product with the factor,
the reciprocal, the factor itself, and the product with the position."""

PLAIN = """
import sys
import torch, transformers
from safetensors.torch import save_file
found = {}
for folder, lengths, ids in eval(sys.argv[1]):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    for length in lengths:
        with torch.no_grad():
            found[f"{folder} {length}"] = model(torch.tensor([ids[:length]]), use_cache=False).logits[0].contiguous()
assert "ropewalk" not in sys.modules
save_file(found, sys.argv[2])
"""


def plainly(asked: list[tuple[str, tuple[int, ...], list[int]]], file: Path) -> dict[str, Tensor]:
    """Logits of folders by name and length, of a process that never heard of ropewalk."""
    done = run_interpreter(PLAIN, repr(asked), file)
    assert done.returncode == 0, done.stderr
    return load_file(file)


def rope_of_family(folder: Path, **more: Any) -> LongRope:
    (current,) = read_config(folder).methods.values()
    return factors(current.rotary_dim, **more)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path, LongRope]]:
    """By family: our model in float64, the folder that it was saved in as it was, and its method."""
    found = {}
    for number, family in enumerate(sorted(FAMILIES)):
        folder = tmp_path_factory.mktemp(family)
        tiny(family).save_pretrained(folder / "old")
        attention_factor = PUBLISHED if number % 2 else 1.3
        rope = rope_of_family(folder / "old", attention_factor=attention_factor, seed=number)
        model = load_model(folder / "old", ModelSetup(rope=rope, max_position_embeddings=TARGET))
        save_model(model, folder / "new")
        found[family] = (model.double(), folder / "new", rope)
    return found


@pytest.fixture(scope="module")
def plain(
    exported: dict[str, tuple[Any, Path, LongRope]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Tensor]:
    asked = [(str(folder), LENGTHS, token_ids(TARGET)) for _, folder, _ in exported.values()]
    return plainly(asked, tmp_path_factory.mktemp("plain") / "logits.safetensors")


@pytest.mark.parametrize("length", slow_after(2, LENGTHS))
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_plain_transformers_computes_the_same_logits(
    exported: dict[str, tuple[Any, Path, LongRope]], plain: dict[str, Tensor], family: str, length: int
) -> None:
    model, folder, _ = exported[family]
    ids = token_ids(length)
    theirs = plain[f"{folder} {length}"]
    ours = full_logits(model, ids)
    # Both are float64, so that the two rotary modules are all that rounds.
    allowed = rounding_allows(model, lambda: full_logits(model, ids), ANGLE_ROUNDING, length)
    assert float((ours - theirs).abs().max()) < allowed
    # The other factors are a thousand times that away.
    with generating(model, ORIGINAL + 1 if length <= ORIGINAL else ORIGINAL):
        assert float((full_logits(model, ids) - theirs).abs().max()) > max(1000 * allowed, 0.05)


def test_a_real_checkpoint_computes_the_same_logits(stories260k: Path, tmp_path: Path) -> None:
    """In this process: above, a class of transformers computes the same where ropewalk was never imported."""
    rope = LongRope(8, 1e4, (1.0, 1.0, 1.03, 1.2), (1.0, 1.7, 3.1, 4.6), 1.15, 512)
    model = load_model(stories260k, ModelSetup(rope=rope, max_position_embeddings=2048))
    save_model(model, tmp_path / "new")
    ids = token_ids(700, vocabulary=512)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float64).eval()
    model.double()
    for length in (500, 700):

        def logits(length: int = length) -> Tensor:
            return full_logits(model, ids[:length])

        allowed = rounding_allows(model, logits, ANGLE_ROUNDING, length)
        with torch.no_grad():
            found = plain(torch.tensor([ids[:length]]), use_cache=False).logits[0]
        assert float((logits() - found).abs().max()) < allowed
        with generating(model, 513 if length <= 512 else 512):
            assert float((logits() - found).abs().max()) > 100 * allowed


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_saved_is_what_is_loaded(
    exported: dict[str, tuple[Any, Path, LongRope]], family: str, tmp_path: Path
) -> None:
    _, folder, rope = exported[family]
    read = read_config(folder)
    config = read.source
    assert read.methods == methods_from_config(config.to_dict()) == {None: rope}
    assert methods_from_config(json.loads((folder / "config.json").read_text())) == {None: rope}
    assert config.max_position_embeddings == TARGET
    config.save_pretrained(tmp_path)
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert {**again.to_dict(), "_name_or_path": str(folder)} == config.to_dict()
    # transformers drops the older keys, which are for programs that know no others.
    newer, both = (json.loads((place / "config.json").read_text()) for place in (tmp_path, folder))
    older = {"rope_theta", "rope_scaling", "partial_rotary_factor"} & both.keys()
    assert {"rope_theta", "rope_scaling"} <= older
    # Phi-3 is written in its three older keys, from which transformers derives the rest.
    assert methods_from_config(newer) == {None: rope}
    own = {"rope_parameters"} if family == "phi3" else set()
    assert {key: value for key, value in newer.items() if key not in own} == {
        key: value for key, value in both.items() if (key in newer or key not in older) and key not in own
    }
    assert methods_from_config({**both, "rope_parameters": None}) == {None: rope}
    old, new = (load_file(place / "model.safetensors") for place in (folder.parent / "old", folder))
    assert old.keys() == new.keys()
    for name, weight in old.items():
        assert torch.equal(weight, new[name])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_second_extension_keeps_the_original_length(
    exported: dict[str, tuple[Any, Path, LongRope]], family: str, tmp_path: Path
) -> None:
    _, folder, rope = exported[family]
    longer = factors(rope.rotary_dim, seed=9)
    save_model(
        load_model(folder, ModelSetup(rope=longer, max_position_embeddings=4 * TARGET)), tmp_path / "new"
    )
    config = read_config(tmp_path / "new")
    (found,) = config.methods.values()
    assert found == longer
    assert config.max_position_embeddings == 4 * TARGET
    said = json.loads((tmp_path / "new" / "config.json").read_text())
    assert said["original_max_position_embeddings"] == ORIGINAL
    assert said["rope_parameters"]["factor"] == 4 * TARGET / ORIGINAL


def as_vllm_reads(config: dict[str, Any], max_model_len: int) -> tuple[list[float], float]:
    """inv_freq and factor on cos and sin, by the rules that vLLM has: one choice for a whole server."""
    entry = config["rope_parameters"]
    original = entry["original_max_position_embeddings"]
    ratio = config["max_position_embeddings"] / original
    published = math.sqrt(1 + math.log(ratio) / math.log(original))
    kind = "long" if max_model_len > original else "short"
    dim = 2 * len(entry["short_factor"])
    scales = entry[f"{kind}_factor"]
    inv_freq = [1 / (scale * entry["rope_theta"] ** (2 * i / dim)) for i, scale in enumerate(scales)]
    return inv_freq, entry.get(f"{kind}_mscale", published)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_vllm_reads_the_same_numbers(exported: dict[str, tuple[Any, Path, LongRope]], family: str) -> None:
    model, folder, rope = exported[family]
    config = json.loads((folder / "config.json").read_text())
    for length in (ORIGINAL, TARGET):
        ours = rotary_module(model)[2].frequencies(total_length=length)
        inv_freq, attention_factor = as_vllm_reads(config, length)
        assert ours.inv_freq.tolist() == pytest.approx(inv_freq, rel=1e-14)
        assert ours.attention_factor == pytest.approx(attention_factor, rel=2**-24)
    assert ("short_mscale" in config["rope_parameters"]) == (rope.attention_factor != PUBLISHED)


def test_the_factor_is_the_ratio_of_lengths_and_readers_of_other_ropes_see_no_change() -> None:
    config = ModelConfig.of(tiny("llama").config)
    for attention_factor, told in ((PUBLISHED, False), (PUBLISHED * (1 + 1e-9), False), (1.01, True)):
        entry = with_rope(config, factors(8, attention_factor), TARGET).source.to_dict()["rope_parameters"]
        assert entry["factor"] == TARGET / ORIGINAL
        assert [entry.get(key) for key in ("short_mscale", "long_mscale")] == [
            attention_factor if told else None
        ] * 2
    # Without a longer input nothing is scaled, and the attention factor of that is 1.
    assert with_rope(config, factors(8, 1.0)).source.to_dict()["rope_parameters"].get("long_mscale") is None
    theta = with_rope(config, Theta(8, 5e5), TARGET).source.to_dict()
    assert for_all_readers(theta) == theta
    assert methods_from_config(theta) == {None: Default(8, 5e5)}


def test_attention_factors_that_readers_would_not_agree_on_are_refused() -> None:
    said = with_rope(ModelConfig.of(tiny("llama").config), factors(8, 1.01), TARGET).source.to_dict()
    assert methods_from_config(said) == {None: factors(8, 1.01)}
    for key in ("short_mscale", "long_mscale"):
        other = {**said, "rope_parameters": {**said["rope_parameters"], key: 1.02}}
        with pytest.raises(RopewalkError, match=rf"{key} 1\.02 differs from the attention factor 1\.01"):
            methods_from_config(other)
    # Extended again, the old ones do not stay.
    config = ModelConfig.of(type(tiny("llama").config).from_dict(said))
    again = with_rope(config, factors(8, 1.3), 2 * TARGET).source.to_dict()
    assert again["rope_parameters"]["long_mscale"] == 1.3


def test_the_door_writes_any_method_into_a_new_folder(tmp_path: Path) -> None:
    folder = save_byte_checkpoint(tmp_path / "old", 64, 0.3)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    method = Yarn(8, 1e4, 4.0, 64)
    found = export(folder, method, 256, tmp_path / "new", tokenizer)
    assert ModelConfig.of(transformers.AutoConfig.from_pretrained(found.out)).methods == {None: method}
    said = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (said["max_position_embeddings"], said["factor"], said["factors"]) == (256, 4.0, None)
    assert transformers.AutoTokenizer.from_pretrained(found.out).model_max_length >= 256
    old, new = (load_file(each / "model.safetensors") for each in (folder, found.out))
    assert all(torch.equal(old[key], new[key]) for key in {*old, *new})
    with pytest.raises(RopewalkError, match="already exists"):
        export(folder, method, 256, found.out, tokenizer)
