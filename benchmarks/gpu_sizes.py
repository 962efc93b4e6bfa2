"""Sizes of the benchmarks that need a GPU, and what all their parts do with a device."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import median
from typing import Any

import torch

LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
LLAMA_200M = {
    "vocab_size": 32003,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
"""Heads that 2, 4, 8 and 16 ranks divide."""
LLAMA_7B = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
"""Four layers of Llama 3.1 8B: its shapes, in the memory of one GPU."""
TINY = {
    "vocab_size": 67,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Sizes:
    """What is measured, in tokens where nothing else is said.

    Attributes:
        heads, kv_heads, head_dim: of the attention alone.
        attention: row lengths, the most telling first.
        means: mean lengths of the documents in them.
        most_flops: operations of a call of attention from which a longer row is measured with fewer heads.
        mean_document: mean length of a document elsewhere.
        product: rows and columns of the matrix product that everything is held against.
        repeats: rows or repetitions that a figure is taken over.
        ring: row lengths of one rank of a ring.
        models: shapes of the models that take training steps.
        steps: lengths of rows of training steps, the longest last.
        audit_model, audit: shape of the audited model, and its row.
        mesh_model, mesh, mesh_rows, mesh_steps: the model, row length, rows and number of steps that one device, one
            rank and several are compared with.
        search_model, search_trained, search, search_batches: the model, its trained length, the lengths to search for,
            and the candidates of a forward pass.
        prompt, prompts, answer: tokens of a prompt, the number of prompts, and the tokens of an answer.
        processes: ranks on a CPU, which has no devices to count.
        tests: the tests to run.
        small: for a test of the benchmarks themselves: on a CPU, and with the least of meshes.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    attention: tuple[int, ...] = (131072, 32768, 8192, 524288)
    means: tuple[int, ...] = (2048, 512, 8192)
    most_flops: float = 1e15
    mean_document: int = 2048
    product: int = 8192
    repeats: int = 5
    ring: tuple[int, ...] = (32768,)
    models: dict[str, dict[str, Any]] = field(
        default_factory=lambda: {"1B": LLAMA_1B, "8B, 4 layers": LLAMA_8B}
    )
    steps: tuple[int, ...] = (32768, 131072)
    audit_model: dict[str, Any] = field(default_factory=lambda: LLAMA_7B)
    audit: int = 4096
    mesh_model: dict[str, Any] = field(default_factory=lambda: LLAMA_200M)
    mesh: int = 8192
    mesh_rows: int = 8
    mesh_steps: int = 4
    search_model: dict[str, Any] = field(default_factory=lambda: LLAMA_1B)
    search_trained: int = 4096
    search: tuple[int, ...] = (4096, 16384)
    search_batches: tuple[int, ...] = (1, 2, 4, 8)
    prompt: int = 32768
    prompts: int = 8
    answer: int = 32
    processes: int = 1
    tests: str = "tests"
    small: bool = False


LARGE = Sizes()
SMALL = replace(
    LARGE,
    heads=4,
    kv_heads=2,
    head_dim=16,
    attention=(128,),
    means=(32,),
    mean_document=32,
    product=64,
    repeats=1,
    ring=(128,),
    models={"tiny": TINY},
    steps=(128,),
    audit_model=TINY,
    audit=64,
    mesh_model=TINY,
    mesh=128,
    mesh_rows=2,
    mesh_steps=2,
    search_model=TINY,
    search_trained=64,
    search=(64, 128),
    search_batches=(1, 2),
    prompt=1024,
    prompts=2,
    answer=2,
    processes=2,
    tests="tests/test_fused.py",
    small=True,
)


@dataclass(frozen=True)
class Case:
    """A row of figures: what tells it from the others, and the work that finds its figures."""

    row: dict[str, Any]
    work: Callable[[], Mapping[str, Any]]


class NotRunError(Exception):
    """A case that this machine cannot run, for lack of a package or a device; its message says what."""


def timed_ms(work: Callable[[], Any], device: str) -> float:
    """Time of a piece of work, by CUDA's events on a GPU."""
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end))
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def milliseconds(work: Callable[[], Any], device: str, repeats: int) -> float:
    """Median time of a piece of work after a warm-up."""
    for _ in range(2):
        work()
    return median(timed_ms(work, device) for _ in range(repeats))


@cache
def matmul_rate(size: int, device: str, repeats: int) -> float:
    """FLOP/s of a square bfloat16 product: the roof that all else is held against."""
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    return 2 * size**3 / (milliseconds(lambda: a @ a, device, repeats) / 1000)


def finish(device: torch.device) -> None:
    """Wait for the work that a GPU was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated_gib(device: str) -> float:
    """GiB allocated now, from which the peak is counted anew; 0 on a CPU."""
    if device != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**30


def peak_gib(device: str) -> dict[str, float]:
    """The peak since :func:`allocated_gib`; nothing on a CPU."""
    return {"peak_gib": torch.cuda.max_memory_allocated() / 2**30} if device == "cuda" else {}


def beyond(device: str, before: float) -> dict[str, float]:
    """What the peak is above the GiB that :func:`allocated_gib` had found; nothing on a CPU."""
    return {"gib_beyond_inputs": peak_gib(device)["peak_gib"] - before} if device == "cuda" else {}


def free() -> None:
    """Give back what no figure needs any more."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
