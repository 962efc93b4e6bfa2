"""Plans of long contexts on many GPUs: memory, bytes and time of a step, from dry runs. Takes half an hour.

    python -m benchmarks.planned_runs

The models are configs of the published shapes; nothing is downloaded. Results are kept as they come, so a run that is
stopped goes on with the next one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import RESULTS, machine
from ropewalk.dry_run import HardwareSettings, plan
from ropewalk.training.recipe.file import parse_recipe

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3.1 8B": LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama 3.1 70B": LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "Qwen3 8B": LLAMA
    | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    },
}
RUNS: tuple[tuple[str, str, int, dict[str, int], bool], ...] = (
    ("Qwen3 8B", "1M", 8, {"sequence": 8}, True),
    ("Llama 3.1 8B", "128k", 8, {"shard": 4, "sequence": 2}, False),
    ("Llama 3.1 8B", "512k", 8, {"sequence": 8}, False),
    ("Llama 3.1 8B", "1M", 8, {"sequence": 8}, True),
    ("Llama 3.1 8B", "1M", 64, {"shard": 4, "ring": 2, "sequence": 8}, False),
    ("Llama 3.1 70B", "128k", 64, {"shard": 8, "sequence": 8}, False),
    ("Llama 3.1 8B", "4M", 64, {"ring": 8, "sequence": 8}, False),
    ("Llama 3.1 70B", "1M", 64, {"ring": 8, "sequence": 8}, False),
    ("Llama 3.1 70B", "2M", 512, {"shard": 8, "ring": 8, "sequence": 8}, False),
    ("Llama 3.1 70B", "4M", 1024, {"shard": 8, "ring": 16, "sequence": 8}, False),
)
"""Model, context, GPUs, mesh, and whether activations are offloaded; each row is one document, checkpointed."""


def planned(model: str, context: str, gpus: int, mesh: dict[str, int], offload: bool) -> dict[str, Any]:
    """One plan, without the course of the memory."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
        stage = {
            "context": context,
            "steps": 1,
            "rows_per_step": mesh.get("shard", 1),
            "learning_rate": 1e-5,
            "gradient_checkpointing": True,
            "offload_activations": offload,
            "rope": {"method": "ntk"},
        }
        recipe = {
            "model": folder,
            "output": "run",
            "data": {"sources": [{"path": "embedded"}]},
            "parallel": mesh,
            "stages": [stage],
        }
        began = time.perf_counter()
        result = plan(
            parse_recipe(yaml.safe_dump(recipe), "recipe.yaml"),
            HardwareSettings(gpus=gpus, document_length=2**30),
        ).to_json()
    (found,) = result["stages"]
    for name in ("course", "course_moments"):
        del found["memory"][name]
    return {
        "model": model,
        "gpus": gpus,
        "offload": offload,
        "seconds_to_plan": time.perf_counter() - began,
        **found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "planned_runs.json")
    options = parser.parse_args()
    known = json.loads(options.out.read_text())["runs"] if options.out.exists() else {}
    for model, context, gpus, mesh, offload in RUNS:
        name = f"{model}, {context}, {gpus} GPUs"
        if name not in known:
            known[name] = planned(model, context, gpus, mesh, offload)
            text = {"benchmark": "planned_runs", "machine": machine(), "runs": known}
            options.out.write_text(json.dumps(text, indent=2) + "\n")
        run = known[name]
        print(
            f"{name}: {run['memory']['peak'] / 1e9:.1f} GB, {run['time']['seconds']:,.0f} s a step; planned in "
            f"{run['seconds_to_plan']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
