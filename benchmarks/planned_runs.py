"""Plans of long contexts on many GPUs: memory, bytes and time of a step, from dry runs. Takes half an hour.

    python -m benchmarks.planned_runs
    python -m benchmarks.planned_runs --table public

The models are configs of the published shapes; nothing is downloaded. Results are kept as they come, so a run that is
stopped goes on with the next one.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from benchmarks.common import RESULTS, parsed, parser_of, write
from benchmarks.gpu_sizes import TINY
from ropewalk.dry_run import HardwareSettings, plan
from ropewalk.io.lengths import parse_length
from ropewalk.models.compute import losses
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.simulation.rank_costs import Player, RankCosts, play, played_by

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
QWEN3 = MODELS["Qwen3 8B"]
MODELS |= {
    "Qwen3 0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3 32B": QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "Qwen3 30B-A3B": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
}
MODELS["tiny"] = LLAMA | TINY
MODELS["Llama 2 7B"] = MODELS["Llama 3.1 8B"] | {
    "vocab_size": 32000,
    "intermediate_size": 11008,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
}


@dataclass(frozen=True)
class Run:
    """A run to plan; layers are checkpointed, and a data-parallel group gets one row a step.

    Attributes:
        model: a key of ``MODELS``.
        context: tokens of a row.
        mesh: degrees of parallelism.
        offload: whether activations are offloaded to CPU memory.
        gpu: kind of GPU.
        beside: whose published run it stands beside.
        all_logits: hold the logits of all tokens at once, as the published run does and ropewalk never would.
        documents: tokens of each document; "" for one document per row.
        table: the table of ``docs/scaling.md`` that it is for: ``meshes``, ``fewest``, ``documents``, ``published`` or
            ``public``.
        settings: further settings of the stage.
        published: seconds of a step and bytes of a GPU, as they were published; None where they were not.
    """

    model: str
    context: str
    mesh: dict[str, int]
    offload: bool = False
    gpu: str = "h100"
    beside: str = ""
    all_logits: bool = False
    documents: str = ""
    table: str = "meshes"
    settings: tuple[tuple[str, Any], ...] = ()
    published: tuple[float | None, float | None] = (None, None)

    @property
    def gpus(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def name(self) -> str:
        mesh = " x ".join(f"{degree} {name}" for name, degree in self.mesh.items())
        parts = [self.model, self.context, f"{self.gpus} {self.gpu}", mesh]
        parts += (
            ["offload"] * self.offload + ["all logits"] * self.all_logits + [self.beside] * bool(self.beside)
        )
        parts += [f"documents of {self.documents}"] * bool(self.documents)
        parts += [f"{key} {value}" for key, value in self.settings]
        return ", ".join(parts)


LLAMA_8B, LLAMA_70B = "Llama 3.1 8B", "Llama 3.1 70B"
# The most telling ones first: a run that is stopped leaves the rest for later.
RUNS = (
    Run("Qwen3 8B", "1M", {"sequence": 8}, offload=True, beside="TRL", table="published"),
    Run(LLAMA_8B, "1M", {"sequence": 8}, offload=True),
    Run(LLAMA_8B, "1100000", {"sequence": 8}, beside="ALST", table="published"),
    Run(LLAMA_8B, "2400000", {"sequence": 8}, offload=True, beside="ALST", table="published"),
    Run(LLAMA_8B, "256k", {"ring": 8}, beside="torchtitan", table="published", all_logits=True),
    Run("Llama 2 7B", "700000", {"ring": 8}, gpu="a100", beside="EasyContext", table="published"),
    Run(LLAMA_70B, "2M", {"shard": 4, "ring": 16, "sequence": 8}),
    Run(LLAMA_8B, "128k", {"shard": 4, "sequence": 2}),
    Run(LLAMA_8B, "1M", {"shard": 4, "ring": 2, "sequence": 8}),
    Run(LLAMA_8B, "4M", {"ring": 8, "sequence": 8}),
    Run(LLAMA_70B, "128k", {"shard": 8, "sequence": 8}),
    Run(LLAMA_70B, "1M", {"shard": 2, "ring": 8, "sequence": 8}),
    Run(LLAMA_70B, "4M", {"shard": 2, "ring": 32, "sequence": 8}),
    Run("Qwen3 8B", "1M", {"ring": 8}, offload=True, beside="TRL", table="published"),
    Run("Llama 2 7B", "64k", {"shard": 8}, gpu="a100", beside="EasyContext", table="published"),
    Run("Llama 2 7B", "512k", {"ring": 8}, gpu="a100", beside="EasyContext", table="published"),
    Run(LLAMA_8B, "256k", {"ring": 8}, beside="torchtitan", table="published"),
    Run(LLAMA_8B, "1M", {"shard": 16, "ring": 8, "sequence": 8}),
    Run(LLAMA_8B, "128k", {"shard": 32, "sequence": 2}),
    Run(LLAMA_70B, "1M", {"ring": 8, "sequence": 8}),
    Run(LLAMA_8B, "4M", {"ring": 4, "sequence": 8}, offload=True),
    Run(LLAMA_70B, "4M", {"ring": 16, "sequence": 8}, offload=True),
    Run(LLAMA_70B, "128k", {"shard": 128, "sequence": 8}),
    Run(LLAMA_70B, "1M", {"shard": 16, "ring": 8, "sequence": 8}),
    Run(LLAMA_70B, "4M", {"shard": 4, "ring": 32, "sequence": 8}),
    Run(LLAMA_8B, "4M", {"shard": 4, "ring": 8, "sequence": 8}),
    Run(LLAMA_8B, "4M", {"shard": 4, "ring": 32, "sequence": 8}),
    Run(LLAMA_8B, "1M", {"ring": 2, "sequence": 8}),
    Run(LLAMA_8B, "128k", {"shard": 128, "sequence": 8}),
    Run(LLAMA_8B, "32k", {"shard": 8}, beside="torchtitan", table="published", all_logits=True),
    Run(LLAMA_8B, "128k", {"shard": 8, "sequence": 2}),
    Run(LLAMA_8B, "1M", {"shard": 8, "ring": 2, "sequence": 8}),
    Run(LLAMA_70B, "1M", {"shard": 4, "ring": 8, "sequence": 8}),
    Run(LLAMA_70B, "4M", {"shard": 2, "ring": 16, "sequence": 8}, offload=True),
    Run(LLAMA_70B, "128k", {"shard": 16, "sequence": 8}),
    Run(LLAMA_70B, "128k", {"shard": 32, "sequence": 8}),
    Run(LLAMA_8B, "1M", {"shard": 16, "ring": 2, "sequence": 8}),
    Run(LLAMA_8B, "4M", {"shard": 2, "ring": 8, "sequence": 8}),
    Run(LLAMA_8B, "128k", {"shard": 64, "sequence": 2}),
    Run(LLAMA_8B, "128k", {"shard": 128, "sequence": 2}),
    Run(LLAMA_70B, "1M", {"shard": 8, "ring": 8, "sequence": 8}),
    Run(LLAMA_70B, "128k", {"shard": 64, "sequence": 8}),
    Run(LLAMA_8B, "1M", {"shard": 16, "ring": 4, "sequence": 8}),
    Run(LLAMA_8B, "4M", {"shard": 4, "ring": 16, "sequence": 8}),
    Run(LLAMA_8B, "128k", {"shard": 128, "sequence": 4}),
)
# Fewer GPUs than the rows of the table, to find how few will do, with offload and without.
FEWER = (
    Run(LLAMA_8B, "128k", {"sequence": 4}, table="fewest"),
    Run(LLAMA_8B, "128k", {"sequence": 2}, table="fewest"),
    Run(LLAMA_8B, "128k", {"sequence": 2}, offload=True, table="fewest"),
    Run(LLAMA_8B, "1M", {"sequence": 8}, table="fewest"),
    Run(LLAMA_8B, "1M", {"sequence": 4}, offload=True, table="fewest"),
    Run(LLAMA_8B, "4M", {"ring": 4, "sequence": 8}, table="fewest"),
    Run(LLAMA_8B, "4M", {"ring": 2, "sequence": 8}, offload=True, table="fewest"),
    Run(LLAMA_70B, "128k", {"shard": 2, "ring": 2, "sequence": 8}, table="fewest"),
    Run(LLAMA_70B, "128k", {"ring": 2, "sequence": 8}, offload=True, table="fewest"),
    Run(LLAMA_70B, "128k", {"ring": 2, "sequence": 8}, table="fewest"),
    Run(LLAMA_70B, "1M", {"shard": 2, "ring": 4, "sequence": 8}, offload=True, table="fewest"),
    Run(LLAMA_70B, "1M", {"ring": 4, "sequence": 8}, table="fewest"),
    Run(LLAMA_70B, "1M", {"ring": 4, "sequence": 8}, offload=True, table="fewest"),
    Run(LLAMA_70B, "1M", {"ring": 2, "sequence": 8}, offload=True, table="fewest"),
    Run(LLAMA_70B, "2M", {"ring": 16, "sequence": 8}, table="fewest"),
    Run(LLAMA_70B, "2M", {"ring": 8, "sequence": 8}, table="fewest"),
    Run(LLAMA_70B, "2M", {"ring": 8, "sequence": 8}, offload=True, table="fewest"),
    Run(LLAMA_70B, "2M", {"ring": 4, "sequence": 8}, offload=True, table="fewest"),
    Run(LLAMA_70B, "4M", {"ring": 32, "sequence": 8}, table="fewest"),
    Run(LLAMA_70B, "4M", {"ring": 16, "sequence": 8}, table="fewest"),
    Run(LLAMA_70B, "4M", {"ring": 8, "sequence": 8}, offload=True, table="fewest"),
)
KEPT, AGAIN = ("keep_attention", True), ("keep_attention", False)
FULL = (("pattern", "full"), KEPT, ("tiled_mlp", "64k"))
ON_CPU = (*FULL, ("offload_optimizer", True))
TRL: dict[str, Any] = {"offload": True, "beside": "TRL", "table": "public"}
# One row of full attention on nodes of eight H100: trl's pull requests 6845 and 6846.
KEEPING = (
    Run("Qwen3 0.6B", "1M", {"sequence": 8}, settings=FULL, published=(137, 27.9e9), **TRL),
    Run("Qwen3 8B", "1M", {"sequence": 8}, settings=FULL, published=(364, 56.2e9), **TRL),
    Run("Qwen3 30B-A3B", "1M", {"sequence": 8}, settings=ON_CPU, published=(483, 46.0e9), **TRL),
    Run("Qwen3 32B", "1M", {"sequence": 8}, settings=ON_CPU, published=(1295, 60.8e9), **TRL),
    Run("Qwen3 0.6B", "4M", {"sequence": 8}, settings=FULL, published=(2135, 73.7e9), **TRL),
    Run("Qwen3 8B", "2M", {"ring": 2, "sequence": 8}, settings=FULL, published=(696, None), **TRL),
    Run("Qwen3 8B", "4M", {"ring": 4, "sequence": 8}, settings=FULL, published=(1346, None), **TRL),
)
# As trl does, attention is run again in the backward.
PUBLIC = KEEPING + tuple(
    replace(run, settings=tuple(AGAIN if each == KEPT else each for each in run.settings)) for run in KEEPING
)
SMALL = Run("tiny", "9k", {"sequence": 2}, all_logits=True, documents="100")
PACKED = tuple(replace(run, documents="8k", table="documents") for run in RUNS if run.table == "meshes")


def play_with_all_logits(*arguments: Any) -> RankCosts:
    """Play a rank whose loss is not computed in chunks."""
    with mock.patch.object(losses, "LOGITS_BYTES", 2**62):
        return play(*arguments)


@contextmanager
def in_own_process() -> Iterator[Player]:
    """As in ``rank_costs``, for :func:`play_with_all_logits`."""
    with (
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process,
        played_by(lambda *arguments: process.submit(play_with_all_logits, *arguments).result()) as player,
    ):
        yield player


def planned(run: Run) -> dict[str, Any]:
    """One plan, without the course of the memory."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[run.model]))
        stage = {
            "context": run.context,
            "steps": 1,
            "rows_per_step": run.mesh.get("shard", 1),
            "learning_rate": 1e-5,
            "gradient_checkpointing": True,
            "offload_activations": run.offload,
            "rope": {"method": "ntk"},
            **dict(run.settings),
        }
        recipe = {
            "model": folder,
            "output": "run",
            "data": {"sources": [{"path": "embedded"}]},
            "parallel": run.mesh,
            "stages": [stage],
        }
        # Longer than every row unless the run says otherwise.
        length = parse_length(run.documents) if run.documents else 2**30
        hardware = HardwareSettings(gpus=run.gpus, gpu=run.gpu, document_length=length)
        began = time.perf_counter()
        with in_own_process() if run.all_logits else nullcontext():
            result = plan(parse_recipe(yaml.safe_dump(recipe), "recipe.yaml"), hardware).to_json()
    (found,) = result["stages"]
    for name in ("course", "course_moments"):
        del found["memory"][name]
    return {
        "model": run.model,
        "gpus": run.gpus,
        "gpu": run.gpu,
        "offload": run.offload,
        "beside": run.beside,
        "all_logits": run.all_logits,
        "table": run.table,
        "settings": dict(run.settings),
        "published": run.published,
        "seconds_to_plan": time.perf_counter() - began,
        **found,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--table", help="plan the runs of this table alone, and plan them anew")
    options = parsed(parser, {}, arguments)
    out = Path(options.out) if options.out else RESULTS / "planned_runs.json"
    known = json.loads(out.read_text())["runs"] if out.exists() else {}
    for run in (SMALL,) if options.small else (*PUBLIC, *RUNS, *FEWER, *PACKED):
        if options.table not in (None, run.table):
            continue
        if run.name not in known or options.table:
            known[run.name] = planned(run)
            write("planned_runs", {"runs": known}, options)
        found = known[run.name]
        print(
            f"{run.name}: {found['memory']['peak'] / 1e9:.1f} GB, {found['time']['seconds']:,.0f} s a step; planned in "
            f"{found['seconds_to_plan']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
