"""Plan the shipped recipes for the machines in tests/recipe-plans.json, and write the figures there and into the heads.

python -m scripts.recipe_plans [RECIPE…] [--heads]

Without names, plans what has changed since its figures were written; a plan takes up to a few minutes of CPU. With
--heads, plans nothing, and writes the stored figures into the recipes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ropewalk.errors import RopewalkError
from ropewalk.recipes import recipe_text

ROOT = Path(__file__).resolve().parents[1]
PLANS = ROOT / "tests" / "recipe-plans.json"
CONFIGS = ROOT / "tests" / "configs" / "planned"
RECIPES = ROOT / "src" / "ropewalk" / "recipes"
WIDTH = 118
"""Characters of a line of a head."""


def stored() -> list[dict[str, Any]]:
    """A recipe, model and machine each, with the figures of its plan, or why ``ropewalk plan`` refuses it."""
    plans: list[dict[str, Any]] = json.loads(PLANS.read_text(encoding="utf-8"))
    return plans


def config_of(case: Mapping[str, Any]) -> dict[str, Any]:
    """The published config of a case's model."""
    config: dict[str, Any] = json.loads((CONFIGS / f"{case['config']}.json").read_text())["config"]
    return config


def digest(case: Mapping[str, Any]) -> str:
    """What a case's figures depend on: the recipe's values, the published config and the machine."""
    values = yaml.safe_load(recipe_text(case["recipe"]))
    asked = [values, config_of(case), case["gpus"], case["gpu"], *case.get("set", ())]
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def planned(case: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The figures of a case's plan, from its published config alone, which is written to ``folder``.

    Raises:
        RuntimeError: if a stage does not fit; a recipe is for a machine that it fits.
    """
    from ropewalk.dry_run import HardwareSettings, plan
    from ropewalk.training import load_recipe

    (folder / "config.json").write_text(json.dumps(config_of(case)))
    recipe = load_recipe(case["recipe"], [f"model={folder}", *case.get("set", ())])
    try:
        result = plan(recipe, HardwareSettings(gpus=case["gpus"], gpu=case["gpu"]))
    except RopewalkError as error:
        return {"refused": str(error).replace(str(folder), case["model"])}
    if not result.fits:
        raise RuntimeError(f"{case['recipe']} does not fit: {[stage.changes for stage in result.stages]}")
    stages = []
    for stage in result.stages:
        assert stage.time is not None
        stages.append(
            {
                "mesh": stage.mesh,
                "peak_gb": round(stage.memory.peak / 1e9, 1),
                "tokens_per_second": float(f"{stage.time.tokens_per_second:.3g}"),
                "hours": float(f"{stage.time.hours:.3g}"),
            }
        )
    return {"memory_gb": round(result.device_bytes / 1e9), "stages": stages}


def head_lines(recipe: str, cases: Iterable[Mapping[str, Any]]) -> list[str]:
    """The comment lines on a recipe's plans."""
    lines = [
        f"Planned for rows of one document each: ropewalk plan {recipe} --set model=MODEL --gpus N --gpu GPU. "
        "Nothing of it was measured."
    ]
    for case in cases:
        changed = f" with {' and '.join(case['set'])}" if "set" in case else ""
        where = f"- {case['model']} on {case['gpus']} x {case['gpu']}{changed}: "
        if "refused" in case:
            lines.append(f"{where}cannot be planned ({case['refused']})")
            continue
        stages = [
            f"{stage['peak_gb']:g} of {case['memory_gb']} GB, {stage['tokens_per_second']:,.0f} tokens/s, "
            f"{stage['hours']:g} hours, {stage['mesh']}"
            for stage in case["stages"]
        ]
        if len(stages) > 1:
            stages = [f"stage {number}, {each}" for number, each in enumerate(stages, start=1)]
        lines.append(where + "; ".join(stages))
    wrapped = []
    for line in lines:
        indent = "  " if line.startswith("-") else ""
        wrapped += textwrap.wrap(line, WIDTH - 2, subsequent_indent=indent, break_on_hyphens=False)
    return [f"# {line}" for line in wrapped]


def with_head(text: str, lines: Iterable[str]) -> str:
    """A recipe with these lines instead of the last paragraph of its head, which begins with ``# Planned``."""
    before, _, after = text.partition("# Planned")
    rest = after.splitlines()
    rest = rest[next(n for n, line in enumerate(rest) if n and not line.startswith("#")) :]
    return before + "\n".join([*lines, *rest]) + "\n"


def write_heads(cases: Iterable[Mapping[str, Any]]) -> None:
    """Write the stored figures into the recipes."""
    by_recipe: dict[str, list[Mapping[str, Any]]] = {}
    for case in cases:
        by_recipe.setdefault(case["recipe"], []).append(case)
    for recipe, of_it in by_recipe.items():
        text = with_head(recipe_text(recipe), head_lines(recipe, of_it))
        (RECIPES / f"{recipe}.yaml").write_text(text, encoding="utf-8")


def main() -> int:
    names = [argument for argument in sys.argv[1:] if argument != "--heads"]
    cases = stored()
    for number, case in enumerate(cases):
        asked = case["recipe"] in names if names else case.get("digest") != digest(case)
        if "--heads" in sys.argv[1:] or not asked:
            continue
        keys = ("recipe", "model", "config", "gpus", "gpu", "set")
        kept: dict[str, Any] = {key: case[key] for key in keys if key in case}
        with tempfile.TemporaryDirectory() as folder:
            cases[number] = {**kept, "digest": digest(kept), **planned(kept, Path(folder))}
        print(cases[number], flush=True)
        text = ",\n".join(f" {json.dumps(each)}" for each in cases)
        PLANS.write_text(f"[\n{text}\n]\n", encoding="utf-8")
    write_heads([case for case in cases if "digest" in case])
    return 0


if __name__ == "__main__":
    sys.exit(main())
