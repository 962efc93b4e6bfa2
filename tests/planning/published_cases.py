"""Published configs that advice is asked for, and the table of it in docs/published-advice.csv.

``configs/`` holds the publishers' own files; ``published.json`` more of them, each with its source and only the keys
that say something of position, shape or layers. ``python -m tests.planning.published_cases`` writes the table.
"""

from __future__ import annotations

import csv
import json
from functools import cache
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.models.config.file import config_from_json
from ropewalk.models.config.model import ModelConfig
from ropewalk.planning.advice import Advice
from ropewalk.planning.inspection import advise_on
from ropewalk.rope import Default
from tests.places import CONFIGS, ROOT

TABLE = ROOT / "docs" / "published-advice.csv"
TARGETS = {"128K": 2**17, "1M": 2**20}

MORE: dict[str, Any] = json.loads((ROOT / "tests" / "planning" / "published.json").read_text())
PUBLISHED: dict[str, dict[str, Any]] = {
    **{path.stem: json.loads(path.read_text()) for path in CONFIGS.glob("*.json")},
    **{name: each["config"] for name, each in MORE.items()},
}
NAMES = sorted(PUBLISHED)


@cache
def config_of(name: str) -> ModelConfig | str:
    """The config, or why it is refused."""
    try:
        config = config_from_json(PUBLISHED[name], name)
        _ = config.full_attention_rope
    except RopewalkError as error:
        return str(error)
    return config


@cache
def advice_of(name: str, target: int) -> Advice | None:
    """None where the config is refused."""
    config = config_of(name)
    return None if isinstance(config, str) else advise_on(config, target)


def judgement(name: str, target: int) -> str:
    """What the advice comes to, in a few words."""
    advice = advice_of(name, target)
    if advice is None:
        return "refused"
    if advice.lifted is not None:
        return f"lift the windows or stay; lifted: {_setting(advice.lifted)}"
    if advice.target_length <= advice.trained_length:
        return "as it is"
    first = [f"lift {limit}" for limit in advice.lift] + ["dropout to 0" for _ in advice.first]
    return ", ".join([*first, _setting(advice)])


def _setting(advice: Advice) -> str:
    many = f" in {len(advice.stages)} stages" if len(advice.stages) > 1 else ""
    if advice.chosen is None or advice.chosen.method is None:
        return f"RoPE stays{many}" if advice.stages else "search factors"
    method = advice.chosen.method
    if advice.chosen.rule == "current":
        return f"base stays{many and f', train{many}'}"
    if isinstance(method, Default):
        return f"theta {method.rope_theta:.3g}{many}"
    return f"{method.name} {method.factor:g}{many}"  # type: ignore[attr-defined]


def row(name: str) -> list[str]:
    """One model's row."""
    config = config_of(name)
    told = [judgement(name, target) for target in TARGETS.values()]
    if isinstance(config, str):
        return [name, "", "", "", *told]
    method, trained = config.full_attention_rope, config.trained_length
    limiting, layers = len(config.context_layers(trained)), len(config.layers)
    # Longrope has a factor for each pair, so none to show.
    factor = f" {method.factor:g}" if hasattr(method, "factor") else ""
    rope = "" if isinstance(method, Default) else f"{method.name}{factor}, "
    return [name, str(trained), f"{rope}{method.rope_theta:.3g}", f"{limiting} of {layers}", *told]


def table() -> list[list[str]]:
    """All rows below a head."""
    return [["model", "trained for", "RoPE", "layers that limit", "for 128K", "for 1M"], *map(row, NAMES)]


def stored() -> list[list[str]]:
    """The table of the documentation."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


if __name__ == "__main__":
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(table())
