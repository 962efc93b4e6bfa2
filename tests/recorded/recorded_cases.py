"""What both compatibility tests share: the script that runs cases, and what may differ between machines."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "command_outputs.py"

TOLERANCE = 5e-4
"""Relative, of floats. Losses are float32 sums over up to 1,000 terms, which another CPU adds up in another order: an
error of some 2^-24 each, relative 6e-8, that two layers, a softmax and an exponential of the loss make larger, and
training steps by Adam, whose first ones take the sign of a gradient, larger again. Between PyTorch's kernels for this
CPU and its plain ones (ATEN_CPU_CAPABILITY=default), evaluations and searches differed by up to 2.1e-6; on another CPU
a model trained for some steps had a perplexity that differed by 1.5e-4."""

SMALLEST = 1e-9
"""Floats that are both below this are rounding errors, whichever they are."""

ROUNDING_ITSELF = {"audit"}
"""Scenarios that measure rounding errors: another CPU makes other ones, so of these alone names, types and verdicts are
compared. On one machine the script compares the numbers too."""

OF_TRAINED_WEIGHTS = re.compile(
    r"\.safetensors$|mean of checkpoints\.json\..*model_sha256$|factors-short\.json\.model\.digest$"
)
"""Digests of weights that were trained, whose last bits depend on the CPU."""

OF_THE_INSTALLED_TRANSFORMERS = re.compile(r"config\.json\.transformers_version$")
"""The version that wrote a config."""

SENTENCES = re.compile(r"\.(action|caveats?|compared|formula|notes?|reasons?|source)(\[\d+\])?$")
"""Keys of sentences for readers, whose words may improve while their numbers stay."""


def _may_differ(place: str) -> bool:
    always = (OF_TRAINED_WEIGHTS, OF_THE_INSTALLED_TRANSFORMERS)
    return any(each.search(place) for each in always)


def _load() -> Any:
    spec = spec_from_file_location("command_outputs", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    # Dataclasses look their module up.
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


command_outputs = _load()


def differences_from_before(part: str, scenario: str, now: Mapping[str, Any]) -> list[str]:
    """What steps say otherwise than they did, but for rounding; each with its place.

    Args:
        part: ``commands`` or ``artifacts``.
        scenario: the steps are of.
        now: what steps say, by name; all of a scenario, or some.
    """
    kept = command_outputs.read_kept(part)[scenario]
    if part == "commands" and now.keys() != kept.keys():
        return [f"{scenario}: its steps are {sorted(now)} and were {sorted(kept)}"]
    sides = {step: kept[step] for step in now}, command_outputs.condensed(now)
    if scenario in ROUNDING_ITSELF:
        sides = _without_rounding(sides[0]), _without_rounding(sides[1])
    found = command_outputs.differences(*sides, TOLERANCE, SMALLEST, scenario)
    return [str(each) for each in found if not _may_differ(each.place) and not is_reworded(each)]


def is_reworded(each: Any) -> bool:
    """Whether a sentence for readers differs in words alone: every number in it is still there."""
    sides = each.first, each.second
    if not SENTENCES.search(each.place) or not all(isinstance(side, str) for side in sides):
        return False
    first, second = (sorted(re.findall(r"\d+(?:[.,]\d+)*", side)) for side in sides)
    return first == second


def _without_rounding(value: Any) -> Any:
    """A value with its floats, and texts that hold decimals, replaced by what they are."""
    if isinstance(value, dict):
        return {key: _without_rounding(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_rounding(each) for each in value]
    if isinstance(value, float):
        return "a float"
    return "a text with numbers" if isinstance(value, str) and re.search(r"\d\.\d|e-\d", value) else value
