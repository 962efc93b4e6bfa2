"""The meshes of ``python -m benchmarks.gpu``: a step over FSDP2 and NCCL with one rank, and on all devices.

Beside a whole model's stand the same step with one rank, and on meshes of all devices, started with torchrun: loss,
gradient norm, and tokens a second.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from benchmarks.attention_cpu import document_lengths
from benchmarks.gpu_sizes import (
    LARGE,
    SMALL,
    NotRunError,
    Sizes,
    finish,
    free,
)
from ropewalk import PackedLayout, Row
from ropewalk.attention.layout import next_token_labels
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import checkpoint_activations, load_model
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import Mesh, MeshShape, World, joined, make_mesh
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import ForwardPass, StepResult, micro_batches, train_step

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 240
"""Patience with torchrun: a collective that hangs must not take the other figures with it."""
RATE = 1e-4


def step_of_one_rank(sizes: Sizes, device: str) -> dict[str, Any]:
    """A step of a whole model, and the same on a mesh of one rank."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama"
        save_llama(folder, sizes)
        whole = whole_step(folder, sizes, device)
        return {
            "whole_model": whole,
            "one_rank": compared(one_rank_step(folder, Path(scratch), sizes, device), whole),
        }


def steps_of_several(sizes: Sizes, device: str) -> dict[str, Any]:
    """The same step on meshes of all devices, or of some processes on a CPU."""
    devices = torch.cuda.device_count() if device == "cuda" else sizes.processes
    if devices < 2:
        raise NotRunError("needs two CUDA devices")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama"
        save_llama(folder, sizes)
        whole = whole_step(folder, sizes, device)
        meshes = several(folder, Path(scratch), devices, whole, sizes, device)
    failed = [each["failed"] for each in meshes if "failed" in each]
    return {"meshes": meshes} | ({"failed": failed} if failed else {})


def save_llama(folder: Path, sizes: Sizes) -> None:
    """A random Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes.mesh_model, max_position_embeddings=sizes.mesh)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def packed_rows(count: int, length: int, vocabulary: int, mean: int) -> list[Row]:
    """Rows of random tokens, the same in every process."""
    generator, rows = torch.Generator().manual_seed(0), []
    for seed in range(count):
        layout = PackedLayout.from_lengths(document_lengths(length - 1, mean, seed), "anchor", 1)
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        rows.append(Row(ids, next_token_labels(ids, layout), layout))
    return rows


def steps(model: LossModel, rows: list[Row], mesh: Mesh | None, sizes: Sizes) -> dict[str, Any]:
    """Loss and gradient norm of the first step, and the tokens a second of the steps behind it."""
    device = model.device
    checkpoint_activations(model.train().model)
    optimizer = MasterAdamW(model.named_parameters(), Optimizer())
    batches, forward = micro_batches(rows, 1, mesh), ForwardPass("bfloat16-autocast")
    results: list[StepResult] = []
    seconds = []
    for _ in range(sizes.mesh_steps):
        finish(device)
        began = time.perf_counter()
        results.append(train_step(model, batches, optimizer, RATE, forward, mesh))
        finish(device)
        seconds.append(time.perf_counter() - began)
    tokens = results[0].tokens / statistics.median(seconds[1:])
    return {"loss": results[0].loss, "grad_norm": results[0].grad_norm, "tokens_per_s": tokens}


def whole_step(folder: Path, sizes: Sizes, device: str) -> dict[str, Any]:
    """A step of a whole model on one device."""
    model = load_model(folder, dtype=torch.float32, device=device)
    whole = LossModel(model, OutputHead.of(model))
    rows = packed_rows(sizes.mesh_rows, sizes.mesh, model.config.vocab_size, sizes.mean_document)
    found = steps(whole, rows, None, sizes)
    del model, whole
    free()
    return found


def one_rank_step(folder: Path, scratch: Path, sizes: Sizes, device: str) -> dict[str, Any]:
    """The same step on a mesh of one: everything that FSDP2 adds but messages to others."""
    with _group_of_one(scratch, device):
        found = mesh_step(folder, make_mesh(MeshShape(), device), World(), sizes)
    free()
    return found


@contextmanager
def _group_of_one(scratch: Path, device: str) -> Iterator[None]:
    """torchrun's processes join a group only where there are several."""
    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{scratch / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_step(folder: Path, mesh: Mesh, world: World, sizes: Sizes) -> dict[str, Any]:
    """The same step on any mesh."""
    model = load_sharded(folder, mesh, world)
    vocabulary = model.model.config.vocab_size
    rows = packed_rows(sizes.mesh_rows, sizes.mesh, vocabulary, sizes.mean_document)
    return steps(model, rows[mesh.data_rank :: mesh.shape.data_degree], mesh, sizes)


def compared(found: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """A mesh's figures with its differences from one device; the bound of each is one bfloat16 rounding, and for the
    norm, which is a root of a sum over parameters, four (as in tests/training/update/test_step_sharded.py)."""
    unit = torch.finfo(torch.bfloat16).eps
    for name, bound in (("loss", unit), ("grad_norm", 4 * unit)):
        found[f"{name}_difference"] = abs(found[name] / whole[name] - 1)
        found[f"{name}_bound"] = bound
    return found


def several(
    folder: Path, scratch: Path, devices: int, whole: dict[str, Any], sizes: Sizes, device: str
) -> list[dict[str, Any]]:
    """The same step on meshes of all devices, each in processes of its own."""
    devices = 2 ** (min(devices, sizes.mesh_rows).bit_length() - 1)
    meshes = [{"shard": devices}, {"sequence": devices}, {"ring": devices}]
    if devices >= 4:
        meshes += [{"shard": devices // 4, "ring": 2, "sequence": 2}, {"replicate": 2, "shard": devices // 2}]
    found = []
    for number, shape in enumerate(meshes[-1:] if sizes.small else meshes):
        out = scratch / f"mesh{number}.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(devices),
        ]
        command += ["-m", "benchmarks.parallel_gpu", json.dumps(shape), str(folder), str(out), device]
        command += ["--small"] if sizes.small else []
        row: dict[str, Any] = {"mesh": str(MeshShape(**shape))}
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
        except subprocess.TimeoutExpired:
            row["failed"] = f"no end within {SECONDS} seconds"
        else:
            if ended.returncode == 0:
                row.update(compared(json.loads(out.read_text()), whole))
            else:
                row["failed"] = ended.stderr.strip()[-2000:]
        found.append(row)
        print(row, flush=True)
    return found


def worker(shape: str, folder: str, out: str, device: str, small: str = "") -> None:
    """One of torchrun's processes; the first one writes the file."""
    with joined(device) as world:
        mesh = make_mesh(MeshShape(**json.loads(shape)), device)
        found = mesh_step(Path(folder), mesh, world, SMALL if small else LARGE)
        if world.is_rank_0:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    worker(*sys.argv[1:])
