"""What each mend of RoPE's precision costs: time and memory of one forward pass, on the user's model and machine.

Errors are measured with an emulation that can round every step by itself; costs are measured here, with what a user
would run instead: fused kernels, one dtype each.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.layouts import anchored, separated
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.load import attach
from ropewalk.models.losses import decoder_of
from ropewalk.models.mitigated_attention import attending, exact_rotary, fused_refusal, mended, twin_of

MEND_NAMES = (
    "eager attention",
    "fused attention",
    "exact angles",
    "float32 rotation",
    "tf32 attention",
    "split product",
    "float32 attention",
    "anchor layout",
    "positions reset",
)
"""All that can be measured, the reference among them."""

LAYOUT_MENDS = ("anchor layout", "positions reset")
FLOAT32_MENDS = ("tf32 attention", "split product", "float32 attention")
"""Mends that need queries and keys in float32 after their rotation."""

REFERENCES = ("fused attention", "eager attention")
"""What ratios are over: the first of them that runs."""

EAGER_BYTES = 2**32
"""Largest attention scores that eager attention may materialise on the CPU."""

FEWEST_ROUNDS = 3
"""A median of fewer says little."""

TURN_SECONDS, TURN_PASSES = 0.1, 10
"""A turn repeats a short pass as often as this and keeps the fastest: the scheduler interrupts 20 ms by as much."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

Progress = Callable[[int, int], None]
"""Called with the turns that are done, and with how many there are at most."""


@dataclass(frozen=True)
class Cost:
    """What one forward pass of the decoder costs, without its output head.

    Attributes:
        seconds: median over rounds of the fastest pass of a turn.
        peak_bytes: largest number of bytes held at once during the pass, above what was held before it.
        time_ratio: median over rounds of its time over that of fused attention in the same round (of eager attention
            for a model that fused attention does not serve).
        memory_ratio: likewise of ``peak_bytes``.
    """

    seconds: float
    peak_bytes: int
    time_ratio: float
    memory_ratio: float


def mend_costs(
    model: Any,
    input_ids: Tensor,
    layout: PackedLayout,
    dtype: torch.dtype,
    names: Sequence[str] = MEND_NAMES,
    repeats: int = 5,
    seconds: float = 20.0,
    progress: Progress | None = None,
) -> dict[str, Cost | str]:
    """Time and memory of one forward pass with each mend, over that of fused attention.

    All mends take turns, round by round, so a machine that is busy for a while is busy for all of them. One row, plain
    causal attention, no cache, no gradients.

    Args:
        model: a causal decoder from transformers with its own rotary module; never changed.
        input_ids: int64 ``[length]``.
        layout: of the row, pattern ``full``, two documents or more: what the layout mends separate.
        dtype: to run in: bfloat16, float16 or float32.
        names: of ``MEND_NAMES``.
        repeats: rounds at most.
        seconds: begin no further round, beyond the third, that would not end within as many seconds.
        progress: called after each turn.

    Returns:
        By name, in the order asked for: the cost, or in one sentence why there is none.

    Raises:
        RopewalkError: if a name, the dtype or the layout is not one of these, or the model runs ropewalk's rotary
            module already.
    """
    began = time.perf_counter()
    _check(input_ids, layout, dtype, names, repeats)
    try:
        bench = _Bench(model, input_ids, layout, dtype)
    except torch.OutOfMemoryError:
        reason = f"memory is too small for a second copy of the model, in {_name(dtype)}"
        return dict.fromkeys(names, reason)
    wanted = dict.fromkeys((*REFERENCES[:1], *names))
    if bench.fused_refusal is not None:
        # Nothing but eager attention is left to compare with.
        wanted |= {"eager attention": None}
    total = len(wanted) * (2 + repeats)
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    memory: dict[str, int] = {}
    reasons: dict[str, str] = {}
    for name in wanted:
        try:
            bench.warm_up(name)
            step()
            memory[name] = bench.peak_bytes(name)
            step()
        except RopewalkError as error:
            reasons[name] = str(error)
        except torch.OutOfMemoryError:
            reasons[name] = f"{bench.device.type} memory is too small for {name} with {len(input_ids)} tokens"
    reference = next((name for name in REFERENCES if name in memory), None)
    if reference is None:
        nothing = "neither fused nor eager attention runs here, so there is nothing to compare with"
        return {name: reasons.get(name, nothing) for name in names}
    rounds: list[dict[str, float]] = []
    longest = 0.0
    while len(rounds) < repeats:
        start = time.perf_counter()
        if len(rounds) >= FEWEST_ROUNDS and start - began + longest > seconds:
            break
        rounds.append({})
        for name in memory:
            rounds[-1][name] = bench.seconds(name)
            step()
        longest = max(longest, time.perf_counter() - start)
    if progress is not None:
        progress(total, total)
    costs: dict[str, Cost | str] = dict(reasons)
    for name, held in memory.items():
        took = statistics.median(found[name] for found in rounds)
        ratio = statistics.median(found[name] / found[reference] for found in rounds)
        costs[name] = Cost(took, held, ratio, held / memory[reference])
    return {name: costs[name] for name in names}


def _check(
    input_ids: Tensor, layout: PackedLayout, dtype: torch.dtype, names: Sequence[str], repeats: int
) -> None:
    unknown = [name for name in names if name not in MEND_NAMES]
    if unknown:
        raise RopewalkError(f"unknown mend {unknown[0]!r}; choose one of {', '.join(MEND_NAMES)}")
    if dtype not in DTYPES:
        raise RopewalkError(f"costs are measured in bfloat16, float16 or float32, not in {_name(dtype)}")
    if input_ids.dim() != 1 or len(input_ids) != layout.total_length:
        raise RopewalkError(
            f"ids must be one row of the layout's {layout.total_length} tokens, got {tuple(input_ids.shape)}"
        )
    if layout.pattern != "full" or layout.document_lengths.numel() < 2:
        raise RopewalkError(
            f"the layout mends need a row of two documents or more in pattern full, got "
            f"{layout.document_lengths.numel()} in pattern {layout.pattern}"
        )
    if repeats < 1:
        raise RopewalkError(f"repeats must be at least 1 round, got {repeats}")


class _Bench:
    """Copies of one model, and the passes that are measured on them."""

    def __init__(self, model: Any, input_ids: Tensor, layout: PackedLayout, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.twin = twin_of(model, dtype)
        self.device = torch.device(self.twin.device)
        self.ids = input_ids[None].to(self.device)
        self.layouts = {"anchor layout": anchored(layout), "positions reset": separated(layout)}
        self.fused_refusal = fused_refusal(self.twin)
        self._exact: Any = None
        self._attached: Any = None
        self._passes: dict[str, int] = {}

    def warm_up(self, name: str) -> None:
        """A pass that nobody counts, after which a turn knows how many passes it is good for.

        Raises:
            RopewalkError: if it cannot be run; the message is the reason.
        """
        self._refuse(name)
        with self._ready(name) as arrived:
            took = self._timed(self._pass(name))
        if name in FLOAT32_MENDS and arrived is not None and torch.float32 not in arrived:
            raise EngineError(
                f"the layers of {type(self.model).__name__} round queries and keys to {_name(self.dtype)} after their "
                "rotation, so that no more reaches the product"
            )
        self._passes[name] = max(1, min(TURN_PASSES, int(TURN_SECONDS / took)))

    def seconds(self, name: str) -> float:
        """Time of one pass: the fastest of a turn."""
        with self._ready(name):
            run = self._pass(name)
            return min(self._timed(run) for _ in range(self._passes[name]))

    def _timed(self, run: Callable[[], None]) -> float:
        self._synchronize()
        began = time.perf_counter()
        run()
        self._synchronize()
        return time.perf_counter() - began

    def peak_bytes(self, name: str) -> int:
        """Bytes that one pass holds at once, at most."""
        with self._ready(name):
            return peak_bytes(self._pass(name), self.device)

    def _refuse(self, name: str) -> None:
        if name not in (*LAYOUT_MENDS, "eager attention") and self.fused_refusal is not None:
            raise EngineError(self.fused_refusal)
        if name == "tf32 attention" and not has_tf32(self.device):
            raise EngineError(f"this machine's {self.device.type} has no TF32")
        if name == "split product" and self.dtype == torch.float32:
            raise EngineError(
                "a split product makes float32 of two bfloat16 or float16 numbers; float32 needs none"
            )
        if name == "eager attention":
            heads = self.twin.config.get_text_config().num_attention_heads
            needed = self.ids.shape[1] ** 2 * heads * self.dtype.itemsize * 3
            cuda = self.device.type == "cuda"
            limit = torch.cuda.mem_get_info(self.device)[0] if cuda else EAGER_BYTES
            if needed > limit:
                raise EngineError(
                    f"eager attention would materialise {needed / 2**30:.1f} GiB of scores for {self.ids.shape[1]} "
                    f"tokens, more than the {limit / 2**30:.1f} GiB that it is given"
                )

    def _ready(self, name: str) -> AbstractContextManager[set[torch.dtype] | None]:
        if name in LAYOUT_MENDS:
            if self._attached is None:
                twin = twin_of(self.twin, self.dtype)
                attach(twin, exact_rope=False)
                self._attached = twin
            return nullcontext()
        if name in REFERENCES:
            return attending(self.twin, "sdpa" if name == "fused attention" else "eager")
        if self._exact is None:
            self._exact = exact_rotary(self.twin)
        return mended(self.twin, name, self._exact)

    def _pass(self, name: str) -> Callable[[], None]:
        model = decoder_of(self._attached if name in LAYOUT_MENDS else self.twin)
        layout = {"layout": self.layouts[name]} if name in LAYOUT_MENDS else {}

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
    """Whether a device multiplies in TF32: NVIDIA's since Ampere."""
    return (
        device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Largest number of bytes that a call holds at once, above what was held before it.

    On CUDA by the allocator's own statistics. On the CPU by adding up every allocation and release that PyTorch's
    allocator reports, scratch memory of its kernels included (memory that oneDNN or a BLAS takes elsewhere is not):
    resident memory would depend on what ran before.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    held = peak = 0
    sizes: dict[int, int] = {}
    for address, size in _cpu_allocations(run):
        if size > 0:
            sizes[address] = size
            held += size
            peak = max(peak, held)
        else:
            # What was there before the call and ends in it was never counted.
            held -= sizes.pop(address, 0)
    return peak


def _cpu_allocations(run: Callable[[], object]) -> list[tuple[int, int]]:
    """(address, bytes) of each allocation during a call in order; bytes are negative for a release.

    The one place that reads PyTorch's unpublished interface: its profiler's event tree.
    """
    with _without_profiler_chatter(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        # Allocations alone: records of operations would be most of the time, and nobody reads them.
        torch._C._autograd._enable_record_function(False)
        try:
            run()
        finally:
            torch._C._autograd._enable_record_function(True)
    assert profiler.kineto_results is not None
    found: list[tuple[int, int, int]] = []
    stack = list(profiler.kineto_results.experimental_event_tree())
    while stack:
        event = stack.pop()
        stack.extend(event.children)
        if event.name == "[memory]" and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size))
    found.sort(key=lambda row: row[0])
    return [(address, size) for _, address, size in found]


CHATTER = ("SyncActivityProfilerHandler", "Memory block of unknown size")


@contextmanager
def _without_profiler_chatter() -> Iterator[None]:
    """Keep the profiler's own lines off the error stream, where it writes past Python; what others say goes on."""
    sys.stderr.flush()
    try:
        own = os.dup(2)
    except OSError:  # A process without an error stream.
        yield
        return
    with tempfile.TemporaryFile() as caught:
        os.dup2(caught.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(own, 2)
            os.close(own)
            caught.seek(0)
            for line in caught:
                if not any(words in line.decode(errors="replace") for words in CHATTER):
                    os.write(2, line)
