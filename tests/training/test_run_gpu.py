"""A whole run on CUDA, with the default precision and engine."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from ropewalk.training.recipe.file import parse_recipe
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
