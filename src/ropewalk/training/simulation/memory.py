"""Memory of a rank by part and by moment, from the recorded allocations of a step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ropewalk.models.compute.losses import LOGITS_BYTES
from ropewalk.training.simulation.extending import extended
from ropewalk.training.simulation.few_layers import Kind, Kinds
from ropewalk.training.simulation.recording import Allocation
from ropewalk.training.simulation.step import DryStep

PARTS = {
    "parameters": "float32 shard of the parameters; frozen ones under an adapter in the compute dtype",
    "gradients": "float32 gradients of that shard",
    "moments": "AdamW's two moments",
    "gathered": "parameters that FSDP has gathered for the layers in use, and its buffers",
    "reduction": "gradients on their way to the ranks that own them",
    "activations": "tensors that the forward keeps for the backward",
    "logits": "logits of a chunk of tokens, and their gradient",
    "working": "tensors of the operation in progress: of one layer in the backward, or of the update",
}
"""Parts of the memory, in the order of tables and figures, with what they hold."""

HOST_PARTS = {
    "inputs": "inputs of checkpointed layers",
    "attention": "results of attention that the recomputation takes instead of computing them again",
    "parameters": "float32 weights",
    "gradients": "float32 gradients of these",
    "moments": "AdamW's two moments",
    "checkpoint": "copy of weights and moments from which a checkpoint is written while training goes on",
    "other": "tensors on their way",
}
"""Parts of the memory of the CPU, with what they hold."""

MOMENTS = {"start": "start", "forward": "forward", "backward": "backward", "update": "update"}
"""Moments of a step, and their names for people."""

MOST_LARGEST = 5
"""Number of largest allocations at the peak that are listed."""

POINTS = 400
"""Most points of the memory's course that are kept for a figure."""

Held = dict[tuple[str, int], dict[str, int]]
"""Bytes of each part, and in total, by moment and layer; -1 is outside of layers."""


@dataclass(frozen=True)
class Tensor:
    """An allocation at the peak: its part, bytes, shape, dtype, operator, and the line of code that made it."""

    part: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    operator: str
    place: str


@dataclass(frozen=True)
class Memory:
    """Memory of a rank during a step, in bytes.

    Attributes:
        peak: most bytes on the device at any time of the step.
        moment: the moment of the peak, a key of ``MOMENTS``.
        parts: bytes of each part at the peak, by name of ``PARTS``.
        moments: for each moment, the most bytes on the device and the bytes of each part then.
        largest: the largest allocations at the peak.
        full_logits: logits of all tokens of a pass at once, at any time of the step; empty as long as the loss is
            computed in chunks.
        host: bytes of CPU memory by name of ``HOST_PARTS``, each at its highest point.
        course: the bytes of each part at up to ``POINTS`` times of the step, in order.
        course_moments: moment of each of these times.
    """

    peak: int
    moment: str
    parts: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]
    largest: tuple[Tensor, ...]
    full_logits: tuple[Tensor, ...]
    host: Mapping[str, int]
    course: tuple[Mapping[str, int], ...]
    course_moments: tuple[str, ...]

    @property
    def host_bytes(self) -> int:
        """Bytes of CPU memory of all parts: pinned memory and sums of gradients are kept from step to step."""
        return sum(self.host.values())


def memory_of(step: DryStep) -> Memory:
    """Replay the allocations of a recorded step."""
    parts = _Parts(step)
    events = step.recording.events
    now = dict.fromkeys(PARTS, 0)
    live: dict[Allocation, int] = {}
    host = dict.fromkeys(HOST_PARTS, 0)
    most_host = host | {"checkpoint": step.checkpoint_copy}
    peaks: dict[str, tuple[int, dict[str, int]]] = {}
    peak, at_peak = 0, -1
    every = max(1, sum(not event.allocation.host for event in events) // POINTS)
    course: list[tuple[str, dict[str, int]]] = []
    # The highest point within each interval is kept, so that the figure shows the peak.
    best: tuple[int, str, dict[str, int]] | None = None
    for index, event in enumerate(events):
        if event.allocation.host:
            part = parts.on_host(event.allocation)
            host[part] += parts.pinned(part, event.change)
            # What loading needs besides is gone when the step begins.
            loading = event.phase in ("model", "setup")
            most_host[part] = host[part] if loading else max(most_host[part], host[part])
            continue
        now[parts.of(event.allocation)] += event.change
        if event.phase not in MOMENTS:
            continue
        total = sum(now.values())
        if total > peaks.get(event.phase, (-1, {}))[0]:
            peaks[event.phase] = total, dict(now)
        if total > peak:
            peak, at_peak = total, index
        if best is None or total > best[0]:
            best = total, event.phase, dict(now)
        if index % every == 0:
            course.append(best[1:])
            best = None
    if best is not None:
        course.append(best[1:])
    for event in events[: at_peak + 1]:
        live[event.allocation] = live.get(event.allocation, 0) + event.change
    largest = sorted(
        (item for item in live.items() if item[1] and not item[0].host), key=lambda item: -item[1]
    )
    moment = max(peaks, key=lambda name: peaks[name][0])
    return Memory(
        peak=peak,
        moment=moment,
        parts=peaks[moment][1],
        moments={name: {"total": total, **held} for name, (total, held) in peaks.items()},
        largest=tuple(parts.tensor(each, size) for each, size in largest[:MOST_LARGEST]),
        full_logits=tuple(parts.full_logits()),
        host={part: size for part, size in most_host.items() if size},
        course=tuple(held for _, held in course),
        course_moments=tuple(name for name, _ in course),
    )


def extended_memory(steps: Sequence[DryStep], weights: Sequence[int]) -> Memory:
    """Memory of a step of all layers, from one with a few of them, and one with one more of each kind that has more.

    The highest points of each layer are extended one by one, because the moment's own highest point may lie elsewhere
    in a deep model: gradients grow towards the end of a backward, and what the forward keeps shrinks. The largest
    tensors and the course are those of the last step, the latter with each part extended.
    """
    runs = [memory_of(each) for each in steps]
    if len(steps) == 1:
        return runs[0]
    points = _Points.of(steps)
    moments: dict[str, dict[str, int]] = {}
    for moment, layer, position in points.all():
        held = points.extended(moment, layer, position)
        if held["total"] > moments.get(moment, {"total": -1})["total"]:
            moments[moment] = held
    moment = max(moments, key=lambda name: moments[name]["total"])
    last = runs[-1]
    growth = {part: _most(moments, part) / max(1, _most(last.moments, part)) for part in PARTS}
    return replace(
        last,
        peak=moments[moment]["total"],
        moment=moment,
        parts={part: moments[moment][part] for part in PARTS},
        moments=moments,
        host=extended([each.host for each in runs], weights),
        course=tuple(
            {part: round(size * growth[part]) for part, size in each.items()} for each in last.course
        ),
    )


@dataclass(frozen=True, eq=False)
class _Points:
    """The highest points of each layer in each moment, of a step with a few layers and of those with one more.

    Attributes:
        kinds: kind of each layer of the whole model.
        kept: numbers of the layers that the step has.
        held: bytes at each point of the step.
        more: the same of the steps with one more layer, by its number.
    """

    kinds: Kinds
    kept: tuple[int, ...]
    held: Held
    more: Mapping[int, Held]

    @classmethod
    def of(cls, steps: Sequence[DryStep]) -> _Points:
        few, *others = steps
        more = {}
        for each in others:
            (one,) = set(each.kept).difference(few.kept)
            more[one] = _highest_by_layer(each)
        return cls(few.kinds, few.kept, _highest_by_layer(few), more)

    def all(self) -> Iterator[tuple[str, int, int]]:
        """Moment and layer of each point, with the position of each layer of the whole model that it stands for."""
        for moment, layer in self.held:
            yield moment, layer, layer
        # What a kind of which all layers are kept adds is not known, so that none may change its side.
        fixed = set(self.kinds) - {self.kinds[one] for one in self.more}
        for one, points in self.more.items():
            places = [
                position
                for position, kind in enumerate(self.kinds)
                if kind == self.kinds[one]
                and position not in self.kept
                and all(self._number(each, position, True) == self._number(each, one, True) for each in fixed)
            ]
            yield from ((*key, position) for key in points if key[1] == one for position in places)

    def extended(self, moment: str, layer: int, position: int) -> dict[str, int]:
        """Bytes at a layer's point if all layers are there, and this one is at a position of the whole model."""
        values, weights = [self.more.get(layer, self.held)[moment, layer]], [1]
        for one, points in self.more.items():
            kind = self.kinds[one]
            for before in (True, False):
                missing = self._number(kind, position, before) - self._kept(kind, layer, before)
                if missing:
                    # What a layer adds to the points after it, and to those before it.
                    beside = layer not in self.more and (one < layer) == before
                    seen = layer if beside else self.kept[-1 if before else 0]
                    values += [points[moment, seen], self.held[moment, seen]]
                    weights += [missing, -missing]
        held: dict[str, int] = extended(values, weights)
        return held

    def _number(self, kind: Kind, position: int, before: bool) -> int:
        """Layers of a kind before or after a position of the whole model."""
        return (self.kinds[: max(0, position)] if before else self.kinds[position + 1 :]).count(kind)

    def _kept(self, kind: Kind, layer: int, before: bool) -> int:
        """Layers of a kind that the step has before or after one of its layers."""
        return sum(
            self.kinds[each] == kind and each != layer and (each < layer) == before for each in self.kept
        )


def _highest_by_layer(step: DryStep) -> Held:
    """Bytes at the highest point of each layer in each moment."""
    parts = _Parts(step)
    marks = dict(step.recording.layers)
    now = dict.fromkeys(PARTS, 0)
    layer, total = -1, 0
    found: Held = {}
    for index, event in enumerate(step.recording.events):
        layer = marks.get(index, layer)
        if event.allocation.host:
            continue
        now[parts.of(event.allocation)] += event.change
        total += event.change
        if event.phase in MOMENTS and total > found.get((event.phase, layer), {"total": -1})["total"]:
            found[event.phase, layer] = {"total": total, **now}
    return found


def _most(moments: Mapping[str, Mapping[str, int]], part: str) -> int:
    return max(held[part] for held in moments.values())


class _Parts:
    """The part that each allocation belongs to."""

    def __init__(self, step: DryStep) -> None:
        self.step = step
        # What the forward allocates and the backward frees was kept for the backward.
        self.kept = {
            event.allocation
            for event in step.recording.events
            if event.change < 0 and event.allocation.phase == "forward" and event.phase == "backward"
        }

    def of(self, allocation: Allocation) -> str:
        owner = self.step.owners.get(allocation)
        if owner is not None:
            return owner
        if allocation.sharding:
            return "reduction" if "reduce" in allocation.sharding else "gathered"
        if self.is_logits(allocation):
            return "logits"
        return "activations" if allocation in self.kept else "working"

    def on_host(self, allocation: Allocation) -> str:
        """The part of ``HOST_PARTS`` that an allocation in CPU memory belongs to."""
        return self.step.owners.get(allocation, "other")

    def pinned(self, part: str, change: int) -> int:
        """Bytes that an allocation takes: FSDP2 pins shards and gradients, which torch rounds up to powers of two."""
        if not (self.step.groups and part in ("parameters", "gradients")):
            return change
        return int(math.copysign(1 << (abs(change) - 1).bit_length(), change))

    def tensor(self, allocation: Allocation, size: int) -> Tensor:
        dtype = str(allocation.dtype).removeprefix("torch.")
        return Tensor(
            self.of(allocation), size, allocation.shape, dtype, allocation.operator, allocation.place
        )

    def full_logits(self) -> Iterator[Tensor]:
        """Each place at which logits of all tokens are made, once."""
        found = set()
        for event in self.step.recording.events:
            each = event.allocation
            tokens = math.prod(each.shape[:-1])
            # Chunks are smaller; a pass that fits one chunk needs no other.
            too_many = tokens >= self.step.tokens and event.change > 2 * LOGITS_BYTES
            if too_many and self.is_logits(each) and (each.operator, each.place) not in found:
                found.add((each.operator, each.place))
                yield self.tensor(each, event.change)

    def is_logits(self, allocation: Allocation) -> bool:
        shape = allocation.shape
        return (
            len(shape) >= 2
            and shape[-1] == self.step.vocabulary
            and allocation.dtype.is_floating_point
            and (
                # The head's own weight and its gradient have the vocabulary first.
                allocation.phase in ("forward", "backward")
            )
        )
