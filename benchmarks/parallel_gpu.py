"""The parallel part of ``python -m benchmarks.gpu``; what needs several devices is left out where there is one.

On one device no rank can send to another. There: the blocks of a ring of four ranks, all in turn, through varlen
kernels and plain ones, beside attention of the whole row; a step over FSDP2 and NCCL with one rank beside a whole
model's; and the memory of a step by what is kept for its backward. On several: the same step on meshes of all devices,
started with torchrun, its loss and gradient norm beside one device's, and tokens a second.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from benchmarks.attention_cpu import document_lengths
from ropewalk import EngineError, PackedLayout, Row, attend
from ropewalk.attention import AttentionSpec, check_engine
from ropewalk.attention.layout import next_token_labels
from ropewalk.models import losses
from ropewalk.models.load import attach, checkpoint_activations, load_model
from ropewalk.models.losses import LossModel, OutputHead
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import Mesh, MeshShape, ShardedLayouts, World, joined, make_mesh
from ropewalk.parallel.mesh import SequenceGroups
from ropewalk.training.optimizer import MasterAdamW
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.step import StepResult, train_step

ROOT = Path(__file__).resolve().parents[1]
RING = 4
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
STEP_LENGTH, STEP_ROWS, STEPS = 8192, 8, 4
MEMORY_LENGTH = 32768
SECONDS = 240
"""Patience with torchrun: a collective that hangs must not take the other figures with it."""


def measure(milliseconds: Callable[[Callable[[], Any]], float], device: str = "cuda") -> dict[str, Any]:
    """Every figure that this machine can give; what fails says why in its place."""
    _free()
    found: dict[str, Any] = {"ring": []}
    for length in (8192, 32768):
        found["ring"] += ring_of_ranks(length, milliseconds, device)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "llama"
        save_llama(folder)
        whole, one = whole_step(folder, device), one_rank_step(folder, Path(scratch), device)
        found["step"] = {"whole_model": whole, "one_rank": compared(one, whole)}
        devices = torch.cuda.device_count() if device == "cuda" else 1
        found["several_devices"] = (
            several(folder, Path(scratch), devices, whole) if devices > 1 else f"left out: {devices} device"
        )
    found["memory"] = memory(device)
    return found


def ring_of_ranks(
    length: int, milliseconds: Callable[[Callable[[], Any]], float], device: str
) -> list[dict[str, Any]]:
    """Forward and backward of all ranks of a ring in turn; the bound is attention of the whole row by varlen."""
    from tests.parallel.ring.ring_cases import ranks_in_turn

    lengths = document_lengths(length - 1, 2048)
    layouts = {
        "full": PackedLayout.from_lengths([length], "full", 0),
        "anchor": PackedLayout.from_lengths(lengths, "anchor", 1),
    }
    torch.manual_seed(0)
    qkv = [
        torch.randn(1, heads, length, HEAD_DIM, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]
    cotangent = torch.randn(1, HEADS, length, HEAD_DIM, device=device, dtype=torch.bfloat16)
    found = []
    for pattern, layout in layouts.items():
        rows = ShardedLayouts.of([layout], SequenceGroups(ring=RING)).rows
        ways: dict[str, Callable[..., Tensor]] = {
            "whole row, varlen": lambda q, k, v, layout=layout: attend(q, k, v, layout, "varlen"),
            **{
                f"ring, {engine}": lambda q, k, v, layout=layout, rows=rows, engine=engine: ranks_in_turn(
                    q, k, v, [layout], rows, _checked(engine, device)
                )
                for engine in ("varlen", "segments")
            },
        }
        for name, attention in ways.items():
            row: dict[str, Any] = {"length": length, "pattern": pattern, "way": name}

            def step(attention: Callable[..., Tensor] = attention) -> None:
                torch.autograd.grad(attention(*qkv), qkv, cotangent)

            found.append(_tried(row, lambda row=row, step=step: row.update(ms=milliseconds(step))))
    return found


def _checked(engine: str, device: str) -> str:
    """Raises EngineError where the ring cannot have this engine."""
    return check_engine(engine, AttentionSpec(device, torch.bfloat16, HEAD_DIM, ring=True))


def save_llama(folder: Path) -> None:
    """A random Llama of about 200 million parameters whose heads 2, 4, 8 and 16 ranks divide."""
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32003,
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=8,
            tie_word_embeddings=True,
            max_position_embeddings=STEP_LENGTH,
        )
    ).save_pretrained(folder)


def packed_rows(count: int, length: int, vocabulary: int) -> list[Row]:
    """Rows of random tokens, the same in every process."""
    generator, rows = torch.Generator().manual_seed(0), []
    for seed in range(count):
        layout = PackedLayout.from_lengths(document_lengths(length - 1, 2048, seed), "anchor", 1)
        ids = torch.randint(0, vocabulary, (length,), generator=generator)
        rows.append(Row(ids, next_token_labels(ids, layout), layout))
    return rows


def steps(model: LossModel, rows: list[Row], mesh: Mesh | None) -> dict[str, Any]:
    """Loss and gradient norm of the first step, and the tokens a second of the steps behind it."""
    device = model.device
    checkpoint_activations(model.train().model)
    optimizer = MasterAdamW(model.named_parameters(), Optimizer())
    results: list[StepResult] = []
    seconds = []
    for _ in range(STEPS):
        _finish(device)
        began = time.perf_counter()
        results.append(train_step(model, rows, optimizer, 1e-4, 1, "bfloat16-autocast", mesh))
        _finish(device)
        seconds.append(time.perf_counter() - began)
    tokens = results[0].tokens / statistics.median(seconds[1:])
    return {"loss": results[0].loss, "grad_norm": results[0].grad_norm, "tokens_per_s": tokens}


def whole_step(folder: Path, device: str) -> dict[str, Any]:
    """A step of a whole model on one device."""
    model = load_model(folder, dtype=torch.float32, device=device)
    whole = LossModel(model, OutputHead.of(model))
    found = steps(whole, packed_rows(STEP_ROWS, STEP_LENGTH, model.config.vocab_size), None)
    del model, whole
    _free()
    return found


def one_rank_step(folder: Path, scratch: Path, device: str) -> dict[str, Any]:
    """The same step on a mesh of one: everything that FSDP2 adds but messages to others."""
    with _group_of_one(scratch, device):
        mesh = make_mesh(MeshShape(), device)
        found = mesh_step(folder, mesh, World(), torch.device(device))
    _free()
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


def mesh_step(folder: Path, mesh: Mesh, world: World, device: torch.device) -> dict[str, Any]:
    """The same step on any mesh."""
    model = load_sharded(folder, mesh, world, device)
    rows = packed_rows(STEP_ROWS, STEP_LENGTH, model.model.config.vocab_size)
    return steps(model, rows[mesh.data_rank :: mesh.shape.data_degree], mesh)


def compared(found: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    """A mesh's figures with its differences from one device; the bound of each is one bfloat16 rounding, and for the
    norm, which is a root of a sum over parameters, four (as in tests/training/test_step_sharded.py)."""
    unit = torch.finfo(torch.bfloat16).eps
    for name, bound in (("loss", unit), ("grad_norm", 4 * unit)):
        found[f"{name}_difference"] = abs(found[name] / whole[name] - 1)
        found[f"{name}_bound"] = bound
    return found


def several(folder: Path, scratch: Path, devices: int, whole: dict[str, Any]) -> list[dict[str, Any]]:
    """The same step on meshes of all devices, each in processes of its own."""
    devices = 2 ** (min(devices, STEP_ROWS).bit_length() - 1)
    meshes = [{"shard": devices}, {"sequence": devices}, {"ring": devices}]
    if devices >= 4:
        meshes += [{"shard": devices // 4, "ring": 2, "sequence": 2}, {"replicate": 2, "shard": devices // 2}]
    found = []
    for number, shape in enumerate(meshes):
        out = scratch / f"mesh{number}.json"
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(devices),
        ]
        command += ["-m", "benchmarks.parallel_gpu", json.dumps(shape), str(folder), str(out)]
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


def memory(device: str) -> list[dict[str, Any]]:
    """Peak memory and seconds of a step of a model of about a billion parameters, by what is kept for its backward."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=True,
        max_position_embeddings=MEMORY_LENGTH,
    )
    rows = packed_rows(1, MEMORY_LENGTH, config.vocab_size)
    whole_logits = 4 * MEMORY_LENGTH * config.vocab_size
    found = []
    for name, checkpointing, offload, logits_bytes in (
        ("all activations", False, False, losses.LOGITS_BYTES),
        ("checkpointing", True, False, losses.LOGITS_BYTES),
        ("checkpointing, offload", True, True, losses.LOGITS_BYTES),
        ("checkpointing, all logits at once", True, False, whole_logits),
    ):
        row = {"kept": name, "length": MEMORY_LENGTH, "logits_gib": logits_bytes / 2**30}

        def step(
            row: dict[str, Any] = row,
            again: bool = checkpointing,
            away: bool = offload,
            size: int = logits_bytes,
        ) -> None:
            with patch.object(losses, "LOGITS_BYTES", size):
                row.update(memory_step(config, rows, again, away, device))

        found.append(_tried(row, step))
    return found


def memory_step(
    config: Any, rows: list[Row], checkpointing: bool, offload: bool, device: str
) -> dict[str, float]:
    """Two steps of a new model: the first one makes the optimizer's state."""
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    attach(model)
    trained = LossModel(model, OutputHead.of(model)).train()
    if checkpointing:
        checkpoint_activations(model)
    optimizer = MasterAdamW(trained.named_parameters(), Optimizer())
    train_step(trained, rows, optimizer, 1e-4, 1, "bfloat16", None, offload)
    _finish(trained.device)
    before = _allocated(device)
    began = time.perf_counter()
    train_step(trained, rows, optimizer, 1e-4, 1, "bfloat16", None, offload)
    _finish(trained.device)
    found = {"seconds": time.perf_counter() - began, "before_gib": before}
    if device == "cuda":
        found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return found


def _tried(row: dict[str, Any], work: Callable[[], Any]) -> dict[str, Any]:
    """A row of figures, or why there is none: an engine that cannot, or memory that does not suffice."""
    try:
        work()
    except (EngineError, torch.OutOfMemoryError) as error:
        row["refused"] = str(error).splitlines()[0]
    _free()
    print(row, flush=True)
    return row


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: str) -> float:
    """GiB allocated now, from which the peak is counted anew."""
    if device != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def worker(shape: str, folder: str, out: str) -> None:
    """One of torchrun's processes; the first one writes the file."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    with joined(device_type) as world:
        mesh = make_mesh(MeshShape(**json.loads(shape)), device_type)
        device = torch.device(device_type, world.local_rank if device_type == "cuda" else None)
        found = mesh_step(Path(folder), mesh, world, device)
        if world.is_rank_0:
            Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    worker(*sys.argv[1:])
