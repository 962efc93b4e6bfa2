"""A scaling rule that only this file knows: registered here, and nothing else is touched."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropewalk.cli import app as program
from ropewalk.compatibility import readings
from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.config.file import read_model_config
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.write import with_rope
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.rope import (
    METHODS,
    Default,
    RopeFrequencies,
    RopeMethod,
    RotaryEmbedding,
    method_for_target,
    method_from_config,
    register,
    unscaled_inv_freq,
)
from ropewalk.rope.config import for_all_readers, replace_methods
from ropewalk.rope.methods.base import FACTOR, ORIGINAL, Origin
from ropewalk.training.recipe.file import dump_recipe, parse_recipe
from ropewalk.training.stage_rope.decide import bounds_of

RECIPE = """
model: some/model
output: runs/x
data: {sources: [a.jsonl]}
stages: [{context: 32k, steps: 5, rope: {method: eased, sharpness: 3.0}}]
"""
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 8192,
    "rope_theta": 1e4,
}


@dataclass(frozen=True)
class Eased(RopeMethod):
    """``θ_i / (1 + (s - 1)·x^p)`` with ``x`` from 0 for the fastest pair to 1 for the slowest."""

    factor: float
    original_max_position_embeddings: int
    sharpness: float = 2.0

    name: ClassVar[str] = "eased"
    parameters: ClassVar[Mapping[str, str]] = {**FACTOR, "sharpness": ""}
    config_keys: ClassVar[tuple[str, ...] | None] = ("factor", "sharpness", ORIGINAL)
    origin: ClassVar[Origin | None] = Origin(
        "θ / (1 + (s - 1)·x^p)", "made up for a test", "nobody trained it"
    )

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        x = torch.linspace(0, 1, self.rotary_dim // 2, dtype=torch.float64)
        divided = 1 + (self.factor - 1) * x**self.sharpness
        return RopeFrequencies(unscaled_inv_freq(self.rotary_dim, self.rope_theta) / divided, 1.0)


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register(Eased)
    yield
    del METHODS["eased"]
    ROPE_INIT_FUNCTIONS.pop("eased", None)


def possible_methods(recipe, checkpoint):
    """The methods of each stage with the smallest and the largest base that it may get."""
    return [(each.low, each.high) for each in bounds_of(recipe, checkpoint)]


def test_a_recipe_chooses_it_and_sets_its_parameters() -> None:
    recipe = parse_recipe(RECIPE, "x")
    ((low, high),) = possible_methods(recipe, (Default(16, 1e4), 8192))
    assert low == high == Eased(16, 1e4, 4.0, 8192, 3.0)
    assert parse_recipe(dump_recipe(recipe), "y") == recipe


def test_a_parameter_of_another_method_is_refused_by_name() -> None:
    with pytest.raises(RopewalkError, match="sharpness"):
        parse_recipe(RECIPE.replace("eased", "linear"), "x")


def test_a_config_says_it_and_gives_it_back() -> None:
    method = method_for_target("eased", Default(16, 1e4), 8192, 32768)
    for spelling in ("5.x", "4.x"):
        said = replace_methods({**CONFIG, "max_position_embeddings": 32768}, method, spelling=spelling)
        assert method_from_config(json.loads(json.dumps(for_all_readers(said)))) == method
    further = method_for_target("eased", method, 32768, 65536)
    assert further == Eased(16, 1e4, 8.0, 8192)
    with pytest.raises(RopewalkError, match="already has eased RoPE"):
        method_for_target("yarn", method, 32768, 65536)


def test_the_config_of_a_model_says_it_to_a_file_and_back(tmp_path: Path) -> None:
    method = Eased(16, 1e4, 4.0, 8192, 3.0)
    config = ModelConfig.of(transformers.LlamaConfig(**CONFIG))
    said = with_rope(config, method, 32768)
    assert said.methods == {None: method}
    said.source.save_pretrained(tmp_path)
    assert read_model_config(str(tmp_path)).methods == {None: method}
    # Other programs have never heard of it.
    assert {each.verdict for each in readings(str(tmp_path))} == {"refuses"}


def test_the_rotary_module_turns_with_it() -> None:
    method = Eased(16, 1e4, 4.0, 8192)
    cos, _ = RotaryEmbedding(method)(torch.empty(1, 1, 64), torch.tensor([[7]]))
    torch.testing.assert_close(cos[0, 0, :8], (7 * method.frequencies().inv_freq).cos().float())


def test_a_model_trained_with_it_is_saved_loaded_and_turned_the_same_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 64, "vocab_size": 50}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, **sizes)).save_pretrained(
        tmp_path / "before"
    )
    method = Eased(16, 1e4, 4.0, 8192, 3.0)
    extended = load_model(tmp_path / "before", ModelSetup(rope=method, max_position_embeddings=32768))
    save_model(extended, tmp_path / "after")
    ids = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = extended(ids).logits
        plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "after")
        torch.testing.assert_close(plain(ids).logits, expected)
        unscaled = load_model(tmp_path / "before")
        assert not torch.allclose(unscaled(ids).logits, expected)
    assert ModelConfig.of(plain.config).methods == {None: method}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    def command(*arguments: str) -> dict[str, Any]:
        assert program.main([*arguments, "--json"]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return command


def test_inspect_shows_it_and_plans_with_it(tmp_path: Path, run: Callable[..., dict[str, Any]]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    settings = run("inspect", str(path), "--target", "32k")["target"]["settings"]
    (eased,) = [setting for setting in settings if setting["rule"] == "eased"]
    assert (eased["method"], eased["factor"], eased["source"]) == ("eased", 4.0, "made up for a test")
    path.write_text(
        json.dumps(replace_methods({**CONFIG, "max_position_embeddings": 32768}, Eased(16, 1e4, 4.0, 8192)))
    )
    (shown,) = run("inspect", str(path))["methods"]
    assert shown["name"] == "eased"
    assert shown["parameters"] == {"factor": 4.0, ORIGINAL: 8192, "sharpness": 2.0}
    planned = run("rope", "plan", str(path), "--to", "128k")
    assert [stage["method"] for stage in planned["stages"]] == ["eased"]
    assert planned["stages"][0]["factor"] == 16.0
