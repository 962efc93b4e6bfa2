"""Sizes of the benchmarks that need a GPU, and what all their parts do with a device."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ropewalk import EngineError

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
        attention, ring: row lengths.
        mean_document: mean length of a document.
        product: rows and columns of the matrix product that attention is held against.
        repeats: times that a median is taken of.
        audit_model, audit: shape of the audited model, and its row.
        step_model, step, step_rows, steps: the model, row length, rows and number of steps that one device, one rank
            and several are compared with.
        training_model, training: the model and row length of whole training steps.
        search_model, search_trained, search, search_batches: the model, its trained length, the lengths to search for,
            and the candidates of a forward pass.
        processes: ranks on a CPU, which has no devices to count.
        tests: the tests to run.
        small: for a test of the benchmarks themselves: on a CPU, and with the least of meshes.
    """

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    attention: tuple[int, ...] = (8192, 32768, 131072)
    ring: tuple[int, ...] = (8192, 32768)
    mean_document: int = 2048
    product: int = 8192
    repeats: int = 5
    audit_model: dict[str, Any] = field(default_factory=lambda: LLAMA_7B)
    audit: int = 4096
    step_model: dict[str, Any] = field(default_factory=lambda: LLAMA_200M)
    step: int = 8192
    step_rows: int = 8
    steps: int = 4
    training_model: dict[str, Any] = field(default_factory=lambda: LLAMA_1B)
    training: int = 32768
    search_model: dict[str, Any] = field(default_factory=lambda: LLAMA_1B)
    search_trained: int = 4096
    search: tuple[int, ...] = (4096, 16384)
    search_batches: tuple[int, ...] = (1, 2, 4, 8)
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
    ring=(128,),
    mean_document=32,
    product=64,
    repeats=1,
    audit_model=TINY,
    audit=64,
    step_model=TINY,
    step=128,
    step_rows=2,
    steps=2,
    training_model=TINY,
    training=128,
    search_model=TINY,
    search_trained=64,
    search=(64, 128),
    search_batches=(1, 2),
    processes=2,
    tests="tests/dry_run/test_simulated.py",
    small=True,
)


def milliseconds(work: Callable[[], Any], device: str, repeats: int) -> float:
    """Median time of a piece of work after a warm-up, by CUDA's events on a GPU."""
    for _ in range(2):
        work()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            times.append(float(start.elapsed_time(end)))
        else:
            began = time.perf_counter()
            work()
            times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def tried(row: dict[str, Any], work: Callable[[], Any]) -> dict[str, Any]:
    """A row of figures, or why there is none: an engine that cannot, or memory that does not suffice."""
    try:
        work()
    except (EngineError, torch.OutOfMemoryError) as error:
        row["refused"] = str(error).splitlines()[0]
    free()
    print(row, flush=True)
    return row


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


def free() -> None:
    """Give back what no figure needs any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
