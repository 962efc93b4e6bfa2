"""A whole run on CUDA, with the default precision and engine."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.stage_engine import CHOICES
from tests.training.run_cases import extend


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["auto", "bfloat16", "float32"])
def test_a_run_on_cuda(recipe_values, precision):
    recipe_values["precision"] = precision
    summary = extend(parse_recipe(yaml.safe_dump(recipe_values), "test"))
    assert summary["device"] == "cuda"
    lines = (Path(summary["output"]) / "metrics.jsonl").read_text().splitlines()
    assert all(json.loads(line)["applied"] for line in lines)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_auto_measures_its_engine_once(recipe_values):
    output = Path(recipe_values["output"])
    summary = extend(parse_recipe(yaml.safe_dump(recipe_values), "test"))
    (choice,) = json.loads((output / CHOICES).read_text())
    assert choice["measured_on"]["gpu"] == torch.cuda.get_device_name()
    assert summary["stages"][0]["engine"]["name"] == choice["engine"]
    recipe_values["stages"][0]["steps"] += 1
    extend(parse_recipe(yaml.safe_dump(recipe_values), "test"), resume=True)
    assert json.loads((output / CHOICES).read_text()) == [choice]
