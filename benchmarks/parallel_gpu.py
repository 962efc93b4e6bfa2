"""The parallel part of ``python -m benchmarks.gpu``; what needs several devices is left out where there is one.

On one device no rank can send to another. There: the blocks of a ring of four ranks, all in turn, through varlen
kernels and plain ones, beside attention of the whole row; a step over FSDP2 and NCCL with one rank beside a whole
model's; and a training step by what is kept for its backward, beside transformers' own. On several: the same step on
meshes of all devices, started with torchrun, its loss and gradient norm beside one device's, and tokens a second.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from benchmarks.attention_cpu import document_lengths
from benchmarks.gpu_sizes import (
    LARGE,
    SMALL,
    Sizes,
    allocated_gib,
    finish,
    free,
    milliseconds,
    peak_gib,
    tried,
)
from ropewalk import PackedLayout, Row, attend
from ropewalk.attention import AttentionSpec, check_engine
from ropewalk.attention.choices import Pattern
from ropewalk.attention.layout import next_token_labels
from ropewalk.models import losses
from ropewalk.models.load import attach, checkpoint_activations, load_model
from ropewalk.models.losses import LossModel, OutputHead
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import Mesh, MeshShape, ShardedLayouts, World, joined, make_mesh
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.training.optimizer import MasterAdamW
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.step import ForwardPass, StepResult, micro_batches, train_step

ROOT = Path(__file__).resolve().parents[1]
RING = 4
SECONDS = 240
"""Patience with torchrun: a collective that hangs must not take the other figures with it."""
RATE = 1e-4


def ring_of_ranks(length: int, sizes: Sizes, device: str) -> list[dict[str, Any]]:
    """Forward and backward of all ranks of a ring in turn; the bound is attention of the whole row by varlen."""
    from tests.parallel.ring.ring_cases import ranks_in_turn

    layouts = {
        "full": PackedLayout.from_lengths([length], "full", 0),
        "anchor": PackedLayout.from_lengths(document_lengths(length - 1, sizes.mean_document), "anchor", 1),
    }
    torch.manual_seed(0)
    heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads, sizes.heads)
    shapes = [(1, each, length, sizes.head_dim) for each in heads]
    q, k, v, cotangent = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    qkv = [x.requires_grad_() for x in (q, k, v)]
    found = []
    for pattern, layout in layouts.items():
        rows = ShardedLayouts.of([layout], SequenceGroups(ring=RING)).rows

        def whole_row(layout: PackedLayout = layout) -> Tensor:
            return attend(q, k, v, layout, "varlen")

        def ring(engine: str, layout: PackedLayout = layout, rows: Any = rows) -> Tensor:
            checked = check_engine(engine, AttentionSpec(device, torch.bfloat16, sizes.head_dim, ring=True))
            output: Tensor = ranks_in_turn(q, k, v, [layout], rows, checked)
            return output

        ways: dict[str, Callable[[], Tensor]] = {
            "whole row, varlen": whole_row,
            **{f"ring, {engine}": partial(ring, engine) for engine in ("varlen", "segments")},
        }
        for name, attention in ways.items():
            row: dict[str, Any] = {"length": length, "pattern": pattern, "way": name}

            def step(row: dict[str, Any] = row, attention: Callable[[], Tensor] = attention) -> None:
                def once() -> None:
                    torch.autograd.grad(attention(), qkv, cotangent)

                row["ms"] = milliseconds(once, device, sizes.repeats)

            found.append(tried(row, step))
    return found


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


def steps_of_several(sizes: Sizes, device: str) -> list[dict[str, Any]] | str:
    """The same step on meshes of all devices, or of some processes on a CPU; a sentence where there is one device."""
    devices = torch.cuda.device_count() if device == "cuda" else sizes.processes
    if devices < 2:
        return f"left out: {devices} device"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama"
        save_llama(folder, sizes)
        return several(folder, Path(scratch), devices, whole_step(folder, sizes, device), sizes, device)


def save_llama(folder: Path, sizes: Sizes) -> None:
    """A random Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes.step_model, max_position_embeddings=sizes.step)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def packed_rows(
    count: int, length: int, vocabulary: int, mean: int, pattern: Pattern = "anchor"
) -> list[Row]:
    """Rows of random tokens, the same in every process."""
    generator, rows = torch.Generator().manual_seed(0), []
    for seed in range(count):
        if pattern == "full":
            layout = PackedLayout.from_lengths([length], pattern, 0)
        else:
            layout = PackedLayout.from_lengths(document_lengths(length - 1, mean, seed), pattern, 1)
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
    for _ in range(sizes.steps):
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
    rows = packed_rows(sizes.step_rows, sizes.step, model.config.vocab_size, sizes.mean_document)
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
    rows = packed_rows(sizes.step_rows, sizes.step, vocabulary, sizes.mean_document)
    return steps(model, rows[mesh.data_rank :: mesh.shape.data_degree], mesh, sizes)


def compared(found: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """A mesh's figures with its differences from one device; the bound of each is one bfloat16 rounding, and for the
    norm, which is a root of a sum over parameters, four (as in tests/training/test_step_sharded.py)."""
    unit = torch.finfo(torch.bfloat16).eps
    for name, bound in (("loss", unit), ("grad_norm", 4 * unit)):
        found[f"{name}_difference"] = abs(found[name] / whole[name] - 1)
        found[f"{name}_bound"] = bound
    return found


def several(
    folder: Path, scratch: Path, devices: int, whole: dict[str, Any], sizes: Sizes, device: str
) -> list[dict[str, Any]]:
    """The same step on meshes of all devices, each in processes of its own."""
    devices = 2 ** (min(devices, sizes.step_rows).bit_length() - 1)
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


def training(sizes: Sizes, device: str) -> list[dict[str, Any]]:
    """Seconds and peak memory of a step of one row: transformers' own, ours by pattern, and by what is kept for the
    backward."""
    config = transformers.LlamaConfig(**sizes.training_model, max_position_embeddings=sizes.training)
    whole_logits = 4 * sizes.training * config.vocab_size
    found = []
    row: dict[str, Any] = {"way": "plain transformers, SDPA", "pattern": "full", "kept": "checkpointing"}
    found.append(tried(row, lambda: row.update(plain_step(config, sizes, device))))
    ways: tuple[tuple[Pattern, str, bool, bool, int], ...] = (
        ("full", "checkpointing", True, False, losses.LOGITS_BYTES),
        ("intra_document", "checkpointing", True, False, losses.LOGITS_BYTES),
        ("anchor", "checkpointing", True, False, losses.LOGITS_BYTES),
        ("anchor", "all activations", False, False, losses.LOGITS_BYTES),
        ("anchor", "checkpointing, offload", True, True, losses.LOGITS_BYTES),
        ("anchor", "checkpointing, all logits at once", True, False, whole_logits),
    )
    for pattern, kept, checkpointing, offload, logits_bytes in ways:
        row = {"way": "ropewalk", "pattern": pattern, "kept": kept, "logits_gib": logits_bytes / 2**30}
        rows = packed_rows(1, sizes.training, config.vocab_size, sizes.mean_document, pattern)

        def step(
            row: dict[str, Any] = row,
            rows: list[Row] = rows,
            checkpointing: bool = checkpointing,
            offload: bool = offload,
            logits_bytes: int = logits_bytes,
        ) -> None:
            with patch.object(losses, "LOGITS_BYTES", logits_bytes):
                row.update(own_step(config, rows, checkpointing, offload, device))

        found.append(tried(row, step))
    return found


def own_step(
    config: Any, rows: list[Row], checkpointing: bool, offload: bool, device: str
) -> dict[str, float]:
    """The second step of a new model: the first one makes the optimizer's state."""
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    attach(model)
    trained = LossModel(model, OutputHead.of(model)).train()
    if checkpointing:
        checkpoint_activations(model)
    optimizer = MasterAdamW(trained.named_parameters(), Optimizer())
    batches, forward = micro_batches(rows), ForwardPass("bfloat16", offload)
    return timed_step(lambda: train_step(trained, batches, optimizer, RATE, forward), config, device)


def plain_step(config: Any, sizes: Sizes, device: str) -> dict[str, float]:
    """The same of a loop without ropewalk: transformers with SDPA, full attention, and torch's AdamW in bfloat16."""
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    checkpoint_activations(model.train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
    ids = torch.randint(0, config.vocab_size, (1, sizes.training), device=device)

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return timed_step(step, config, device)


def timed_step(step: Callable[[], Any], config: Any, device: str) -> dict[str, float]:
    """Seconds, tokens a second and memory of the second of two steps."""
    step()
    finish(torch.device(device))
    before = allocated_gib(device)
    began = time.perf_counter()
    step()
    finish(torch.device(device))
    seconds = time.perf_counter() - began
    tokens = config.max_position_embeddings / seconds
    return {"seconds": seconds, "tokens_per_s": tokens, "before_gib": before, **peak_gib(device)}


def worker(shape: str, folder: str, out: str, device: str, small: str = "") -> None:
    """One of torchrun's processes; the first one writes the file."""
    with joined(device) as world:
        mesh = make_mesh(MeshShape(**json.loads(shape)), device)
        found = mesh_step(Path(folder), mesh, world, SMALL if small else LARGE)
        if world.is_rank_0:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    worker(*sys.argv[1:])
