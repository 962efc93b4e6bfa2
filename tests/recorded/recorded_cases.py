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

ROUNDING_ITSELF = {"verify", "audit"}
"""Commands that measure rounding errors: another CPU makes other ones, so of these alone names, types and verdicts are
compared. On one machine the script compares the numbers too."""

OF_TRAINED_WEIGHTS = re.compile(
    r"\.safetensors$|mean of checkpoints\.json\..*model_sha256$|factors-short\.json\.model\.digest$"
)
"""Digests of weights that were trained, whose last bits depend on the CPU."""

OF_OTHER_SUITES = re.compile(
    r"passkey/run\.json\.settings\.(compat|depths|haystack|lines|stride|most_windows|short_context|evaluator|essays|squad"
    r"|hotpotqa|harness\w*)$"
)
"""Settings of suites that a folder did not run, which it said nevertheless."""

OF_THE_INSTALLED_TRANSFORMERS = re.compile(r"config\.json\.transformers_version$")
"""The version that wrote a config."""

OF_READERS = re.compile(r"(\.json\.readers|\.export[^.]*\.json\.notes)(\[\d+\])?$")
"""What other programs make of a model: a verdict on each, where there were sentences."""

SENTENCES = re.compile(r"\.(action|caveats?|compared|formula|notes?|reasons?|source)(\[\d+\])?$")
"""Keys of sentences for readers, whose words may improve while their numbers stay."""

FORMULA = "B(m) ≥ 0"
"""A condition in sentences of version 0.1.0 that words state now: its 0 is not a number of the result."""

GAINED = (
    ".json.source: nothing != {",
    ".own: nothing != ",
    ".trained_tokens: nothing != ",
    ".peak_process_memory: nothing != ",
    ".checkpoint_wait: nothing != ",
    ".rows_wait: nothing != ",
    ".forward_backward: nothing != ",
    ".optimizer_update: nothing != ",
    ".flops_per_second: nothing != ",
    ".json.readers: nothing != ",
    ".samples: nothing != ",
    ".separator_id: nothing != None",
    ".token_dtype: nothing != None",
    ".system_prompt: nothing != None",
    ".thinking_tokens: nothing != 0",
    ".position_bins: nothing != None",
    ".endpoint: nothing != 'completions'",
    "config.json.rope_theta: nothing != ",
    "config.json.rope_scaling: nothing != ",
)
"""Parts that a result has gained, in the middle of a difference that is nothing but such a part."""


def _may_differ(place: str) -> bool:
    always = (OF_TRAINED_WEIGHTS, OF_OTHER_SUITES, OF_THE_INSTALLED_TRANSFORMERS, OF_READERS)
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


def differences_from_before(
    part: str, scenario: str, now: Mapping[str, Any], renamed: Mapping[str, str]
) -> list[str]:
    """What steps say otherwise than they did, but for rounding; each with its place.

    Args:
        part: ``commands`` or ``artifacts``.
        scenario: the steps are of.
        now: what steps say, by name; all of a scenario, or some.
        renamed: keys and names, the old one and the new one.
    """
    kept = command_outputs.read_kept(part)[scenario]
    before = {step: kept[step] for step in now}
    if part == "commands" and now.keys() != kept.keys():
        return [f"{scenario}: its steps are {sorted(now)} and were {sorted(kept)}"]
    sides = _renamed(before, renamed), command_outputs.condensed(now)
    if scenario in ROUNDING_ITSELF:
        sides = _without_rounding(sides[0]), _without_rounding(sides[1])
    found = command_outputs.differences(*sides, TOLERANCE, SMALLEST, scenario)
    others = (str(each) for each in found if not _may_differ(each.place) and not is_reworded(each))
    return [each for each in others if not any(gained in each for gained in GAINED)]


def is_reworded(each: Any) -> bool:
    """Whether a sentence for readers differs in words alone: every number in it is still there."""
    sides = each.first, each.second
    if not SENTENCES.search(each.place) or not all(isinstance(side, str) for side in sides):
        return False
    first, second = (sorted(re.findall(r"\d+(?:[.,]\d+)*", side.replace(FORMULA, ""))) for side in sides)
    return first == second


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(each, names) for key, each in value.items()}
    if isinstance(value, str):
        return names.get(value, value)
    return [_renamed(each, names) for each in value] if isinstance(value, list) else value


def _without_rounding(value: Any) -> Any:
    """A value with its floats, and texts that hold decimals, replaced by what they are."""
    if isinstance(value, dict):
        return {key: _without_rounding(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_rounding(each) for each in value]
    if isinstance(value, float):
        return "a float"
    return "a text with numbers" if isinstance(value, str) and re.search(r"\d\.\d|e-\d", value) else value
