"""Record what a training step without data does: allocations, operations, collectives, and waits of the host.

The recorder sees every operator below autograd. Operators on the simulated device, or on tensors that have no data, run
as torch's fake tensors, which know shapes, dtypes and devices alone. Everything else, such as index arithmetic on
layouts, runs as in training.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from ropewalk.errors import EngineError, first_line
from ropewalk.fused import fused_calls_run_by
from ropewalk.models.attention.kernels import functions_replaced_by
from ropewalk.models.compute.tiles import Bounds, tiles_chosen_by
from ropewalk.parallel.traffic import sent_by
from ropewalk.training.simulation.bytes_moved import COPIES, bytes_moved, makes_tensors, tensors_in
from ropewalk.training.simulation.compiled import FusedCall, run_fused
from ropewalk.training.simulation.operations import (
    ATTENTION,
    GROUPED,
    attention_call,
    grouped_flops,
    grouped_output,
    kernel_of,
    recomputed_flops,
    workspace,
)
from ropewalk.training.simulation.recurrent.launch import LAUNCH
from ropewalk.training.simulation.recurrent.stand_ins import stand_in

PLACED_BYTES = 2**16
"""Allocations from this size on are recorded with the line of code that made them; walking the stack takes time."""

UNKNOWN = "an unknown place"
"""Stands for the line of code of an operator that autograd runs by itself."""

RECOMPUTATION = "recomputation"
"""Phase of operations that a backward repeats."""

KNOWN_BYTES = 2**20
"""Tensors up to this size that are copied to the device keep their values, such as the offsets of documents."""


@dataclass(eq=False)
class Allocation:
    """Memory of one or several tensors.

    Attributes:
        bytes: size; FSDP2 shrinks its buffers to 0 and grows them again.
        host: whether it is memory of the CPU.
        phase: moment of the step at which it was allocated.
        operator: operator that allocated it.
        shape, dtype: those of the tensor.
        place: line of code, as ``file:line function``; empty if it is small or no Python code runs at that moment.
        sharding: the functions of FSDP2 that were running, outermost first; empty if none was.
    """

    bytes: int
    host: bool
    phase: str
    operator: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str = ""
    sharding: str = ""


@dataclass(frozen=True, eq=False)
class Event:
    """A change of memory: ``change`` bytes of an allocation, in a phase of the step."""

    allocation: Allocation
    change: int
    phase: str


class Operator(NamedTuple):
    """A call of an operator on the device; equal calls are counted together.

    Attributes:
        name: name of the operator, or of the kernel for attention.
        kind: ``matmul``, ``attention``, ``recurrent`` for kernels of recurrent layers, or ``other``.
        phase: phase of the step.
        bytes: size of the tensors that it reads and writes; 0 for views.
        flops: floating-point operations of products; 0 for all other operators.
        repeated: those of them that repeat what the forward has done.
        timed_flops: operations that take as long at the full speed of products, or of the attention kernel.
    """

    name: str
    kind: str
    phase: str
    bytes: int
    flops: int = 0
    repeated: int = 0
    timed_flops: int = 0


@dataclass(eq=False)
class Recording:
    """What a step did on one rank.

    Attributes:
        events: changes of memory, in order.
        operators: calls of operators on the device.
        layers: at which number of events a layer begins its forward or backward, by number of the layer; -1 where the
            forward begins.
        sent: bytes by name of the process group and kind of collective, with the number of calls.
        waits: places at which the host waits for the device, with their number.
        copies: places at which data moves between host and device during the step, with number and bytes.
    """

    events: list[Event] = field(default_factory=list)
    operators: Counter[Operator] = field(default_factory=Counter)
    layers: list[tuple[int, int]] = field(default_factory=list)
    sent: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    copies: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)

    @property
    def flops(self) -> Counter[tuple[str, str]]:
        """Operations by kind and phase; see :func:`flops_by_phase`."""
        return flops_by_phase(self.operators)

    def copy(self) -> Recording:
        """What has been counted so far, without events."""
        return Recording(
            [], Counter(self.operators), [], dict(self.sent), Counter(self.waits), dict(self.copies)
        )

    def repeat(self, before: Recording, times: int) -> None:
        """Count everything since an earlier copy so many times more."""
        for ours, theirs in ((self.operators, before.operators), (self.waits, before.waits)):
            for each, number in ours.items():  # type: ignore[attr-defined]
                ours[each] += times * (number - theirs[each])  # type: ignore[index]
        for pairs, earlier in ((self.sent, before.sent), (self.copies, before.copies)):
            for key, (first, second) in pairs.items():
                was = earlier.get(key, (0, 0))
                pairs[key] = first + times * (first - was[0]), second + times * (second - was[1])


def flops_by_phase(operators: Mapping[Operator, int]) -> Counter[tuple[str, str]]:
    """Operations by kind and phase; repeated ones are in :data:`RECOMPUTATION`.

    Kinds are ``dense``, ``attention``, and ``recurrent`` for kernels of recurrent layers.
    """
    found: Counter[tuple[str, str]] = Counter()
    for each, number in operators.items():
        kind = each.kind if each.kind in ("attention", "recurrent") else "dense"
        if each.flops > each.repeated:
            found[kind, each.phase] += number * (each.flops - each.repeated)
        if each.repeated:
            found[kind, RECOMPUTATION] += number * each.repeated
    return found


class Recorder(TorchDispatchMode):
    """Runs operators without data on the device, and records them.

    Attributes:
        recording: what was recorded.
        checkpointed: whether layers are computed again in the backward.
        missing: packages of kernels for recurrent layers that the machine of a GPU lacks.
        phase: what happens now: ``model`` while the model is made, ``setup`` while the host prepares rows, and the
            moments of the step ``start``, ``forward``, ``update`` and ``end``. The backward is recognised by itself.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.recording = Recording()
        self.checkpointed = False
        self.missing: tuple[str, ...] = ()
        # What loops over chunks take, by what they are given.
        self.loops: dict[Any, Any] = {}
        self.phase = "model"
        self._live: dict[int, Allocation] = {}
        # The values of small tensors that were copied to the device, such as offsets of documents.
        self._values: dict[int, Tensor] = {}
        self._last_read: tuple[int, str] | None = None
        # While something is recorded apart, the recording that an allocation from before belongs to.
        self._around: dict[int, Recording] = {}
        # What the fused function that runs now has allocated, if one runs.
        self._inside: FusedCall | None = None

    @contextlib.contextmanager
    def recording_of(self) -> Iterator[Recording]:
        """Record while the context is open."""
        lifted = torch._C._only_lift_cpu_tensors()
        # torch.tensor(3, device=...) is then made on the CPU and copied, because the device has no memory.
        torch._C._set_only_lift_cpu_tensors(True)
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            """FSDP2 frees gathered parameters by shrinking their storage, which passes no dispatcher."""
            result = resize(storage, size)
            self._resized(storage, size)
            return result

        try:
            with (
                mock.patch.object(torch.UntypedStorage, "resize_", resized),
                fused_calls_run_by(self._run_fused),
                tiles_chosen_by(self._some_tiles),
                functions_replaced_by(partial(stand_in, self)),
                self,
            ):
                yield self.recording
        finally:
            torch._C._set_only_lift_cpu_tensors(lifted)

    def enters(self, layer: int) -> None:
        """A layer begins its forward or backward."""
        self.recording.layers.append((len(self.recording.events), layer))

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """The recorded allocation of a tensor, of its shard if it is distributed."""
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        return self._live.get(local.untyped_storage()._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Most calls ask for a tensor's device, which is no operator: autograd does so for every input of a node.
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device
        kwargs = kwargs or {}
        # A distributed tensor runs as operators on its shards, which come here one by one.
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        self._collective(func, args, kwargs)
        # DTensor derives shapes with fake tensors of its own, which occupy nothing.
        if active_fake_mode() is not None:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        fakes = [each for each in tensors if isinstance(each, FakeTensor)]
        if any(each.fake_mode is not self.fake for each in fakes):
            return func(*args, **kwargs)
        if not fakes and not self._makes_fake(kwargs):
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(args[0])
        result = self._run(func, args, kwargs, len(fakes) < len(tensors))
        self._copied(func, args, kwargs, result)
        # A kernel that runs a whole function keeps what lies between its inputs and outputs in registers.
        if self._inside is None:
            self.allocate(result, _name(func))
        elif _is_product(func):
            self.allocate((args, kwargs, result), _name(func))
            self._inside.product(fakes, tensors_in(result))
        # After the results, which a kernel has besides its scratch memory.
        self._count(func, args, kwargs, tensors, result)
        return result

    def _run_fused(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a fused function as one operator: its outputs are allocated, and the operands of products inside."""
        # What a fused function calls belongs to it.
        return (
            function(*args, **kwargs) if self._inside is not None else run_fused(self, function, args, kwargs)
        )

    def _some_tiles(self, tiles: Sequence[Bounds]) -> Iterator[Bounds]:
        """The first tile, and then one of each size, which is counted for all others of its size.

        The first is apart because it makes the results and sums that the others add to.
        """
        yield tiles[0]
        sizes = Counter(stop - start for start, stop in tiles[1:])
        for size, number in sizes.items():
            before = self.recording.copy()
            yield next((start, stop) for start, stop in tiles[1:] if stop - start == size)
            self.recording.repeat(before, number - 1)

    @contextlib.contextmanager
    def one_operator(self, name: str) -> Iterator[FusedCall]:
        """Take all operators within the context for one, whose values have memory only if a product needs it."""
        self._inside = FusedCall(self._has_memory)
        try:
            yield self._inside
            self.recording.operators[Operator(name, "other", self._moment(), self._inside.bytes)] += 1
        finally:
            self._inside = None

    @contextlib.contextmanager
    def apart(self) -> Iterator[Recording]:
        """Record what happens within the context in a recording of its own, but for frees of what was there before."""
        around, phase = self.recording, self.phase
        self._around, self.recording = dict.fromkeys(self._live, around), Recording()
        try:
            yield self.recording
        finally:
            for key in self._live.keys() - self._around.keys():
                del self._live[key]
            self._around, self.recording, self.phase = {}, around, phase

    def has_kernels(self, package: str) -> bool:
        """Whether the device runs the kernels of a package for recurrent layers."""
        return self.device.type != "cpu" and package not in self.missing

    def keeps(self) -> bool:
        """Whether autograd keeps what is computed now: a checkpointed layer drops it until its recomputation."""
        return not self.checkpointed or in_backward()

    def charge(self, name: str, most: int, operators: Counter[Operator], forward: bool) -> None:
        """Count what a function does whose operators do not run.

        Args:
            name: its name.
            most: bytes that it holds at its highest point beside what is allocated now.
            operators: its operators, of whatever phase.
            forward: whether they are a forward's, which a backward may repeat, or a backward's.
        """
        moment = self._moment()
        for each, number in operators.items():
            repeated = (each.flops if moment == "backward" else 0) if forward else each.repeated
            self.recording.operators[each._replace(phase=moment, repeated=repeated)] += number
        if most > 0:
            held = Allocation(most, False, moment, f"workspace of {name}", (), torch.uint8)
            self.recording.events += [Event(held, most, moment), Event(held, -most, moment)]

    def without_memory(self, like: Tensor, size: int) -> Tensor:
        """A tensor of so many bytes on the device of another one, which occupy nothing."""
        with self.fake:
            made = like.new_empty(size, dtype=torch.uint8)
        self.occupies_nothing(made)
        return made

    def _has_memory(self, key: int) -> bool:
        return key in self._live and self._live[key].bytes > 0

    def allocate(self, tensors: Any, operator: str) -> None:
        """Count the memory of tensors that have none yet as allocated by an operator."""
        for each in tensors_in(tensors):
            if isinstance(each, FakeTensor):
                self._allocated(each, operator)

    def occupies_nothing(self, tensor: Tensor) -> None:
        """Never count a tensor's memory, because another tensor stands for it."""
        nothing = Allocation(0, False, self._moment(), "", tuple(tensor.shape), tensor.dtype)
        self._live[tensor.untyped_storage()._cdata] = nothing
        weakref.finalize(tensor.untyped_storage(), self._freed, tensor.untyped_storage()._cdata)

    def moved(self, tensor: Tensor) -> Tensor:
        """A tensor like another one, to which the other's memory belongs from now on."""
        with self.fake:
            proxy = torch.empty_like(tensor)
        storage = proxy.untyped_storage()
        self._live[storage._cdata] = self._live[tensor.untyped_storage()._cdata]
        weakref.finalize(storage, self._freed, storage._cdata)
        self.occupies_nothing(tensor)
        return proxy

    def release(self, key: int) -> None:
        """Count an allocation as freed although its tensor lives on."""
        self._freed(key)

    def _makes_fake(self, kwargs: Mapping[str, Any]) -> bool:
        """Whether an operator without tensors that have no data makes one: a factory on the device."""
        device = kwargs.get("device")
        if device is None or torch.device(device).type != self.device.type:
            return False
        # On the CPU, what the host makes for itself is real, and what the model makes while it runs is not.
        return self.device.type != "cpu" or self.phase in ("model", "forward") or in_backward()

    def _run(self, func: Any, args: Any, kwargs: Any, some_with_data: bool) -> Any:
        with self.fake:
            if some_with_data:
                args, kwargs = tree_map_only(Tensor, self._without_data, (args, kwargs))
            if func is GROUPED.default and args[0].dtype != torch.bfloat16:
                self._wait()
                return grouped_output(args[0], args[1], args[2] if len(args) > 2 else kwargs.get("offs"))
            if func is torch.ops.aten.split_with_sizes.default:
                args = (args[0], _parts(*args), *args[2:])
            try:
                return func(*args, **kwargs)
            except (DynamicOutputShapeException, DataDependentOutputException) as error:
                raise EngineError(
                    f"the dry run cannot follow {_name(func)} at {_where()}: its result depends on the "
                    "values of tensors, for which a training step would also have to wait"
                ) from error
            except RuntimeError as error:
                if "same device" not in str(error):
                    reason = first_line(error)
                    raise EngineError(
                        f"{_name(func)} at {_where()} fails without data ({reason}), as it probably would in training"
                    ) from error
                raise EngineError(
                    f"{_name(func)} at {_where()} mixes tensors of the CPU and of the GPU, which would fail in "
                    "training; make the tensor on the model's device"
                ) from error

    def _without_data(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self.fake.from_tensor(tensor)

    def _wait(self) -> None:
        if self.device.type != "cpu":
            self.recording.waits[_where(), self._moment()] += 1

    def _read(self, tensor: Tensor) -> Any:
        """The host reads a value: it waits for the device, and gets a 1, as no value is known."""
        read = tensor.untyped_storage()._cdata, _where()
        # A list of values is read at once, and comes here value by value.
        if tensor.device.type != "cpu" and read != self._last_read:
            self.recording.waits[read[1], self._moment()] += 1
        self._last_read = read
        return 1.0 if tensor.is_floating_point() else tensor.dtype == torch.bool or 1

    def _collective(self, func: Any, args: Any, kwargs: Any) -> None:
        sent = sent_by(func, args, kwargs)
        if sent is not None:
            bytes_, calls = self.recording.sent.get((sent.group, sent.kind), (0, 0))
            self.recording.sent[sent.group, sent.kind] = bytes_ + sent.bytes, calls + 1

    def _count(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> None:
        packet = getattr(func, "_overloadpacket", func)
        moment = self._moment()
        size = bytes_moved(func, args, kwargs, inputs, result, self.device.type)
        if packet is LAUNCH:
            name, _, _, flops, again, gradient = args
            again = flops if moment == "backward" and not gradient else again
            self.recording.operators[Operator(name, "recurrent", moment, size, flops, again, flops)] += 1
            return
        if not _is_product(func):
            if self._inside is not None:
                self._inside.elementwise(inputs, result if makes_tensors(func) else ())
            elif size:
                self.recording.operators[Operator(_name(func), "other", moment, size)] += 1
            return
        if self._inside is not None:
            self._inside.writes(inputs)
        # Autograd computes gradients without recording them; checkpointing records what it computes again.
        repeats = moment == "backward" and torch.is_grad_enabled()
        if packet not in ATTENTION:
            if packet is GROUPED:
                flops = grouped_flops(args[0], args[1])
            else:
                flops = int(flop_registry[packet](*args, **kwargs, out_val=result))
            repeated = flops if repeats else 0
            self.recording.operators[
                Operator(_name(func), "matmul", moment, size, flops, repeated, flops)
            ] += 1
            return
        call = attention_call(packet, args, kwargs, self._value_of)
        repeated = recomputed_flops(packet, args, call.flops) if moment == "backward" else 0
        made = Operator(kernel_of(packet), "attention", moment, size, call.flops, repeated, call.timed_flops)
        self.recording.operators[made] += 1
        # Kernels allocate scratch memory that no operator returns; it is freed when they end.
        scratch = workspace(packet, args, kwargs)
        if scratch:
            held = Allocation(scratch, False, moment, f"workspace of {_name(func)}", (), torch.uint8)
            self.recording.events += [Event(held, scratch, moment), Event(held, -scratch, moment)]

    def _copied(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if func not in COPIES:
            return
        source, target = (args[0], result) if func is torch.ops.aten._to_copy.default else (args[1], args[0])
        if source.device.type == target.device.type:
            return
        if (
            source.device.type == "cpu"
            and not isinstance(source, FakeTensor)
            and source.nbytes <= KNOWN_BYTES
        ):
            self._values[target.untyped_storage()._cdata] = source
        if self.phase in ("model", "setup"):
            return
        place = _place()
        if target.device.type == "cpu" and not (kwargs.get("non_blocking") or args[2:3] == (True,)):
            self.recording.waits[place or UNKNOWN, self._moment()] += 1
        key = place, "to the host" if target.device.type == "cpu" else "to the device"
        number, bytes_ = self.recording.copies.get(key, (0, 0))
        self.recording.copies[key] = number + 1, bytes_ + target.nbytes

    def _value_of(self, tensor: Tensor) -> Tensor | None:
        """Values of a tensor that was copied to the device whole; None if they are not known."""
        return self._values.get(tensor.untyped_storage()._cdata) if isinstance(tensor, FakeTensor) else tensor

    def _allocated(self, tensor: FakeTensor, operator: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = storage.nbytes()
        made = Allocation(
            size,
            tensor.device.type == "cpu" != self.device.type,
            self._moment(),
            operator,
            tuple(tensor.shape),
            tensor.dtype,
        )
        if self._inside is not None:
            self._inside.allocated.append(key)
        if size >= PLACED_BYTES:
            made.place, made.sharding = _places()
        self._live[key] = made
        if size:
            self.recording.events.append(Event(made, size, self._moment()))
        weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self._values.pop(key, None)
        # A later tensor with this address is another one, for which the host waits again.
        if self._last_read is not None and self._last_read[0] == key:
            self._last_read = None
        allocation = self._live.pop(key, None)
        recording = self._around.pop(key, self.recording)
        if allocation is not None and allocation.bytes:
            recording.events.append(Event(allocation, -allocation.bytes, self._moment()))

    def _resized(self, storage: torch.UntypedStorage, size: int) -> None:
        allocation = self._live.get(storage._cdata)
        if allocation is None or allocation.bytes == size:
            return
        self.recording.events.append(Event(allocation, size - allocation.bytes, self._moment()))
        allocation.bytes = size

    def _moment(self) -> str:
        if not in_backward():
            return self.phase
        # A backward is followed by the next forward, which says so itself, or by the update.
        self.phase = "update"
        return "backward"


def _parts(tensor: Tensor, sizes: list[int], dim: int = 0) -> list[int]:
    """Sizes of a split; equal ones if the host has read them from the device, where no value is known."""
    length, number = tensor.shape[dim], len(sizes)
    if sum(sizes) == length:
        return sizes
    return [(each + 1) * length // number - each * length // number for each in range(number)]


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread; torch's own memory tracker asks in the same way."""
    return torch._C._current_graph_task_id() != -1


def _name(func: Any) -> str:
    return (
        str(func).removesuffix(".default") if isinstance(func, torch._ops.OpOverload) else func.__qualname__
    )


def _is_product(func: Any) -> bool:
    """Whether a compiler leaves an operator to a kernel of its own, which reads and writes memory."""
    packet = getattr(func, "_overloadpacket", func)
    return packet in ATTENTION or packet is GROUPED or packet in flop_registry


_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


def _places() -> tuple[str, str]:
    """The innermost line of code outside torch and this package, and the functions of FSDP2 that run above it."""
    frame: FrameType | None = sys._getframe(1)
    sharding = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if "_fully_shard" in name:
            sharding = f"{frame.f_code.co_name} {sharding}".strip()
        if not name.startswith((_TORCH, _HERE, "<")) and not name.endswith(
            ("weakref.py", "contextlib.py", "mock.py")
        ):
            return _shown(frame), sharding
        frame = frame.f_back
    return "", sharding


def _place() -> str:
    return _places()[0]


def _where() -> str:
    return _place() or UNKNOWN


def _shown(frame: FrameType) -> str:
    """``package/module.py:line function``, with the path from the package's own folder on."""
    path = Path(frame.f_code.co_filename)
    parts = path.parts
    for root in ("site-packages", "src"):
        if root in parts:
            path = Path(*parts[len(parts) - 1 - parts[::-1].index(root) + 1 :])
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
