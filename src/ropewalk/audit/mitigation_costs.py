"""Cost of each mitigation: time and memory of one forward pass, on the user's model and machine.

Errors are measured with an emulation that can round every step separately. Costs are measured here with what a user
would run instead: fused kernels in one dtype each.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.mitigations import anchored, separated
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.attention.mitigated import (
    attending,
    copy_in_dtype,
    exact_rotary,
    fused_refusal,
    mitigated,
)
from ropewalk.models.config import ModelConfig
from ropewalk.models.load import attach
from ropewalk.models.losses import decoder_of

LAYOUT_MITIGATIONS = ("anchor layout", "positions reset")
FLOAT32_MITIGATIONS = ("tf32 attention", "split product", "float32 attention")
"""Mitigations that need queries and keys in float32 after the rotation."""

REFERENCES = ("fused attention", "eager attention")
"""Denominators of the ratios: the first of these that runs."""

EAGER_BYTES = 2**32
"""Largest attention scores in bytes that eager attention may materialise on the CPU."""

FEWEST_ROUNDS = 3
"""Fewest rounds for a meaningful median."""

TURN_SECONDS, TURN_PASSES = 0.1, 10
"""A turn repeats a short pass for this many seconds, at most this many times, and keeps the fastest. The scheduler can
interrupt a pass for 20 ms, which would double its time."""


@dataclass(frozen=True)
class Cost:
    """Cost of one forward pass of the decoder, without its output head.

    Attributes:
        seconds: median over rounds of the fastest pass of a turn.
        peak_bytes: most bytes allocated at once during the pass, beyond those allocated before it.
        time_ratio: median over rounds of its time divided by that of fused attention in the same round (eager
            attention for a model that does not support fused attention).
        memory_ratio: the same ratio of ``peak_bytes``.
    """

    seconds: float
    peak_bytes: int
    time_ratio: float
    memory_ratio: float


@dataclass(frozen=True)
class TimeLimit:
    """Limit on the time and rounds in which costs are measured.

    Attributes:
        rounds: maximum number of rounds.
        seconds: after the third round, start no round that would end later than this many seconds.
    """

    rounds: int = 5
    seconds: float = 20.0


FIVE_ROUNDS = TimeLimit()


def mitigation_costs(
    model: Any,
    input_ids: Tensor,
    layout: PackedLayout,
    dtype: torch.dtype,
    names: Sequence[str],
    limit: TimeLimit = FIVE_ROUNDS,
) -> dict[str, Cost | str]:
    """Time and memory of one forward pass with each mitigation, relative to fused attention.

    The mitigations take turns in each round, so a temporarily busy machine affects all of them. The pass runs one row
    with plain causal attention, without cache or gradients.

    Args:
        model: a causal decoder from transformers with its own rotary module; it is not changed.
        input_ids: int64 ``[length]``.
        layout: layout of the row, as returned by :func:`~ropewalk.audit.mitigations.documents_of`.
        dtype: dtype to run in: bfloat16, float16 or float32.
        names: mitigations to measure, from :func:`~ropewalk.audit.mitigations.changes`.
        limit: how long to measure.

    Returns:
        For each name, in the given order: its cost, or one sentence that says why it could not be measured.

    Raises:
        RopewalkError: if the model already runs ropewalk's rotary module.
    """
    started = time.perf_counter()
    try:
        bench = _Bench(model, input_ids, layout, dtype)
    except torch.OutOfMemoryError:
        reason = f"memory is too small for a second copy of the model, in {_name(dtype)}"
        return dict.fromkeys(names, reason)
    # The reference first, even if nobody asked for it.
    wanted = dict.fromkeys((*REFERENCES[:1], *names))
    if bench.fused_refusal is not None:
        # Eager attention is the only reference left.
        wanted |= {"eager attention": None}
    memory: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for name in wanted:
        try:
            # Memory after the warm-up, because a first pass also allocates what libraries keep for later ones.
            bench.warm_up(name)
            memory[name] = bench.peak_bytes(name)
        except RopewalkError as error:
            reasons[name] = str(error)
        except torch.OutOfMemoryError:
            reasons[name] = f"{bench.device.type} memory is too small for {name} with {len(input_ids)} tokens"
    # Chosen by what ran, not by what should: fused attention can be supported and still run out of memory.
    reference = next((name for name in REFERENCES if name in memory), None)
    if reference is None:
        nothing = "neither fused nor eager attention runs here, so there is nothing to compare with"
        return {name: reasons.get(name, nothing) for name in names}
    times: list[dict[str, float]] = []
    longest = 0.0
    while len(times) < limit.rounds:
        start = time.perf_counter()
        if len(times) >= FEWEST_ROUNDS and start - started + longest > limit.seconds:
            break
        # All take a turn in each round, so that ratios compare passes under the same load.
        times.append({name: bench.seconds(name) for name in memory})
        longest = max(longest, time.perf_counter() - start)
    costs: dict[str, Cost | str] = dict(reasons)
    for name, held in memory.items():
        # Medians, because a shared machine delays single rounds by any amount.
        took = statistics.median(found[name] for found in times)
        ratio = statistics.median(found[name] / found[reference] for found in times)
        costs[name] = Cost(took, held, ratio, held / memory[reference])
    return {name: costs[name] for name in names}


class _Bench:
    """Copies of one model, and the passes that are measured on them."""

    def __init__(self, model: Any, input_ids: Tensor, layout: PackedLayout, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.model = copy_in_dtype(model, dtype)
        self.device = torch.device(self.model.device)
        self.ids = input_ids[None].to(self.device)
        self.layouts = {"anchor layout": anchored(layout), "positions reset": separated(layout)}
        self.fused_refusal = fused_refusal(self.model)
        # Made when first needed, because not every list of mitigations uses them.
        self._exact: Any = None
        self._attached: Any = None
        self._passes: dict[str, int] = {}

    def warm_up(self, name: str) -> None:
        """Run a pass that is not counted, to learn how many passes fit in a turn.

        Raises:
            RopewalkError: if it cannot run; the message is the reason.
        """
        self._refuse(name)
        with self._ready(name) as arrived:
            took = self._timed(self._pass(name))
        if name in FLOAT32_MITIGATIONS and arrived is not None and torch.float32 not in arrived:
            raise EngineError(
                f"the layers of {type(self.model).__name__} round queries and keys to {_name(self.dtype)} after the "
                "rotation, so q·k does not get the precision of a float32 rotation"
            )
        # Short passes are repeated until a turn is long enough for the clock and for scheduling noise.
        self._passes[name] = max(1, min(TURN_PASSES, int(TURN_SECONDS / took)))

    def seconds(self, name: str) -> float:
        """Time of one pass in seconds: the fastest of a turn."""
        with self._ready(name):
            run = self._pass(name)
            return min(self._timed(run) for _ in range(self._passes[name]))

    def _timed(self, run: Callable[[], None]) -> float:
        # CUDA kernels run asynchronously; without this the time would be that of launching them.
        self._synchronize()
        started = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - started

    def peak_bytes(self, name: str) -> int:
        """Most bytes that one pass allocates at once."""
        with self._ready(name):
            return peak_bytes(self._pass(name), self.device)

    def _refuse(self, name: str) -> None:
        if name not in (*LAYOUT_MITIGATIONS, "eager attention") and self.fused_refusal is not None:
            raise EngineError(self.fused_refusal)
        if name == "tf32 attention" and not has_tf32(self.device):
            raise EngineError(f"this machine's {self.device.type} has no TF32")
        if name == "eager attention":
            heads = ModelConfig.of(self.model.config).num_heads
            assert heads is not None
            # Scores, their softmax and the weights, each counted in the model's dtype: a lower bound.
            needed = self.ids.shape[1] ** 2 * heads * self.dtype.itemsize * 3
            cuda = self.device.type == "cuda"
            limit = torch.cuda.mem_get_info(self.device)[0] if cuda else EAGER_BYTES
            if needed > limit:
                raise EngineError(
                    f"eager attention would materialise {needed / 2**30:.1f} GiB of scores for {self.ids.shape[1]} "
                    f"tokens, more than the {limit / 2**30:.1f} GiB of "
                    f"{'free GPU memory' if cuda else 'memory that the audit allows on a CPU'}"
                )

    def _ready(self, name: str) -> AbstractContextManager[set[torch.dtype] | None]:
        if name in LAYOUT_MITIGATIONS:
            # A second model, because attaching changes it for good; the weights are shared.
            if self._attached is None:
                self._attached = copy_in_dtype(self.model, self.dtype)
                attach(self._attached, exact_rope=False)
            return nullcontext()
        if name in REFERENCES:
            return attending(self.model, "sdpa" if name == "fused attention" else "eager")
        if self._exact is None:
            self._exact = exact_rotary(self.model)
        return mitigated(self.model, name, self._exact)

    def _pass(self, name: str) -> Callable[[], None]:
        model = decoder_of(self._attached if name in LAYOUT_MITIGATIONS else self.model)
        layout = {"layout": self.layouts[name]} if name in LAYOUT_MITIGATIONS else {}

        def run() -> None:
            with torch.no_grad():
                model(self.ids, use_cache=False, **layout)

        return run

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def has_tf32(device: torch.device) -> bool:
    """Whether a device multiplies in TF32: NVIDIA GPUs since Ampere do."""
    return (
        # ROCm devices have the type cuda too.
        device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes that a call allocates at once, beyond those allocated before it.

    On CUDA the allocator's statistics give it. Resident memory of a CPU process would depend on what ran before, so on
    the CPU PyTorch's profiler reports what each operation allocated and freed, and Python between them. Memory
    that oneDNN or a BLAS allocates elsewhere is not included. Tensors from before the call should outlive it.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        # Weights and inputs are held before the pass and are no cost of it.
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # The profiler's library reads this once; without it, it writes a line to stderr at each start and end.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        run()
    # Replay allocations in order of time: each event reports only its own change of memory.
    changes = sorted((event.time_range.end, event.self_cpu_memory_usage) for event in found.events() or ())
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak
