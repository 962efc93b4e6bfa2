"""Try a tiny random model of every causal family of transformers, with and without images, and write which work.

python scripts/supported_models.py [--check | --page | FAMILY ...]

Without arguments it tries all and writes src/ropewalk/models/families.json, docs/supported-models.md and the table of
docs/models.md; with names, these families are tried again; --page writes the pages from the JSON, and --check compares
them.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "src" / "ropewalk" / "models" / "families.json"
PAGES = tuple(ROOT / "docs" / name for name in ("supported-models.md", "models.md"))
BEGIN, END = "<!-- families: written by scripts/supported_models.py -->", "<!-- /families -->"
OFTEN_USED = {
    "Llama 2 and 3": ("llama",),
    "Llama 4": ("llama4",),
    "Mistral, Mixtral": ("mistral", "mixtral"),
    "Mistral Small 3": ("mistral3",),
    "Qwen2.5, Qwen3": ("qwen2", "qwen3", "qwen3_moe"),
    "Qwen2.5-VL, Qwen3-VL": ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"),
    "Qwen3-Next": ("qwen3_next",),
    "Qwen3.5": ("qwen3_5", "qwen3_5_moe"),
    "Gemma 3": ("gemma3", "gemma3_text"),
    "Gemma 4": ("gemma4",),
    "Phi-3, Phi-4": ("phi3",),
    "OLMo 3": ("olmo3",),
    "SmolLM3": ("smollm3",),
    "gpt-oss": ("gpt_oss",),
    "DeepSeek-V3, Kimi K2": ("deepseek_v3",),
    "DeepSeek-V3.2, GLM-5": ("deepseek_v32", "glm_moe_dsa"),
    "GLM-4.5": ("glm4_moe",),
    "Kimi K2.5": ("kimi_k25",),
    "Kimi Linear": ("kimi_linear",),
    "Granite 4": ("granitemoehybrid",),
    "Falcon-H1": ("falcon_h1",),
    "LFM2": ("lfm2", "lfm2_moe"),
    "Nemotron-H": ("nemotron_h",),
    "InternVL": ("internvl",),
    "Step 3.7": ("step3p7",),
}
"""The model types of the families that people use most."""


def tried(names: list[str]) -> dict[str, Any]:
    """The table, with some families tried again; with all, if none is named."""
    import torch
    import transformers

    from ropewalk.testing import Ranks
    from tests.models.every_family import families, has_rope, support_of

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    found = json.loads(TABLE.read_text(encoding="utf-8"))["families"] if names else {}
    with Ranks(2) as ranks:
        for name in names or families():
            if has_rope(name):
                found[name] = support_of(name, ranks)
                words = (cell["status"] for cell in found[name].values())
                print(f"{name}: {', '.join(words)}", flush=True)
    return {
        "transformers": transformers.__version__,
        "without_rope": sorted(set(families()) - set(found)),
        "families": dict(sorted(found.items())),
    }


def page() -> str:
    """Which families train on packed sequences, which are refused, and which have no RoPE, as Markdown."""
    from ropewalk.models.support import ModelsSettings, _table, supported

    # The tests that tried models have read the table before it was written.
    _table.cache_clear()
    result = supported(ModelsSettings())
    packed: dict[str, list[str]] = {}
    for name, cells in result.families.items():
        packed.setdefault(cells["packed_training"].status, []).append(name)
    return "\n\n".join(
        [
            f"transformers {result.transformers}: {len(result.families)} families with RoPE.",
            *(f"- Packed training **{status}**: {', '.join(names)}." for status, names in packed.items()),
            f"- Without RoPE: {', '.join(result.without_rope)}.",
        ]
    )


def often_used() -> str:
    """What works with the families that people use most, as a Markdown table with the reasons below."""
    from ropewalk.models.support import COLUMNS, ModelsSettings, supported

    families = supported(ModelsSettings()).families
    rows: list[str] = []
    reasons: list[tuple[str, str, str]] = []
    for name, types in OFTEN_USED.items():
        kinds = ", ".join(f"`{each}`" for each in types)
        if types[0] not in families:
            rows.append(f"| {name} | {kinds} | {_layers(types[0])}; has no RoPE |" + " – |" * len(COLUMNS))
            continue
        cells = []
        for column in COLUMNS:
            (status,) = {families[each][column].status for each in types}
            cells.append("yes" if status == "tested" else "no")
            why = families[types[0]][column].reason
            if status == "refused" and not any(why == said for _, _, said in reasons):
                reasons.append((name, COLUMNS[column], why))
        rows.append(f"| {name} | {kinds} | {_layers(types[0])} | {' | '.join(cells)} |")
    heads = ["models", "`model_type`", "may have, beside full attention with RoPE", *COLUMNS.values()]
    lines = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads), *rows]
    notes = [f"- {name}, {column}: {why}." for name, column, why in reasons]
    return "\n".join([*lines, "", *notes])


def _layers(name: str) -> str:
    """What a family's models have beside full attention with RoPE, in the words of the page."""
    from ropewalk.models.config.auto_class import is_part
    from ropewalk.models.config.model import ModelConfig
    from tests.models.every_family import tiny_config

    source = tiny_config(name)
    config = ModelConfig.of(source)
    layers = config.layers
    widths = {layer.kind for layer in layers if layer.window is not None}
    found = {
        "windows": "sliding_attention" in widths,
        "chunks": "chunked_attention" in widths,
        "sinks": config.has_sinks,
        "latent attention": bool(config.values.get("kv_lora_rank")),
        "indexers": bool(config.indexed_layers),
        config.mixer.recurrence if config.mixer else "": bool(config.recurrent_layers),
        "layers without RoPE": len({layer.rotates for layer in layers if layer.attends}) > 1,
        "experts": bool(config.num_experts),
        "encoders": is_part(source),
    }
    return ", ".join(word for word, has in found.items() if has) or "–"


def main() -> int:
    arguments = sys.argv[1:]
    sys.path.insert(0, str(ROOT))
    if not {"--check", "--page"} & set(arguments):
        TABLE.write_text(json.dumps(tried(arguments), indent=1) + "\n", encoding="utf-8")
    stale = 0
    for path, written in zip(PAGES, (page(), often_used()), strict=True):
        text = path.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        wanted = f"{before}{BEGIN}\n\n{written}\n\n{END}{rest.split(END)[1]}"
        if "--check" in arguments:
            stale += wanted != text
        else:
            path.write_text(wanted, encoding="utf-8")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
