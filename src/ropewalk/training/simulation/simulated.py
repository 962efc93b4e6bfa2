"""A GPU without memory, and ranks without processes, for a training step on tensors without data.

torch calls a device that it does not know *privateuse1*. Registering one under a name of ours gives FSDP2, autograd and
autocast a device like any other, on machines without a GPU and with any build of torch, and its tensors cannot be
confused with those of the CPU. torch's own ``fake`` process group plays one rank of a mesh of any size. torch's tests
use both, but they are not documented, so everything that depends on them is in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import optimizer
from torch.utils import _foreach_utils

from ropewalk.attention.engines.capabilities import LEAST_CAPABILITY, SIMULATED, Capability, play_gpu
from ropewalk.errors import RopewalkError
from ropewalk.parallel import Mesh, MeshShape, make_mesh
from ropewalk.parallel.mesh import forget_groups

BACKEND = "dry_run"
"""Name of the process group's backend, before the type of its device."""

CAST_DOWN = (
    "addbmm",
    "addmm",
    "addmv",
    "addr",
    "baddbmm",
    "bmm",
    "conv1d",
    "conv2d",
    "linear",
    "matmul",
    "mm",
    "mv",
)
"""Operators that autocast computes in the lower precision on CUDA, as far as language models use them.

Source: https://docs.pytorch.org/docs/stable/amp.html, "CUDA Ops that can autocast to float16"; torch itself applies
these lists to the devices that it knows and leaves others alone.
"""
CAST_UP = (
    "cosine_similarity",
    "cross_entropy_loss",
    "cumprod",
    "cumsum",
    "exp",
    "expm1",
    "layer_norm",
    "log",
    "log10",
    "log1p",
    "log2",
    "log_softmax.int",
    "nll_loss",
    "norm.Scalar",
    "pow.Tensor_Scalar",
    "pow.Tensor_Tensor",
    "prod",
    "reciprocal",
    "rms_norm",
    "rsqrt",
    "softmax.int",
    "softplus",
    "sum",
    "sum.dim_IntList",
)
"""Operators that autocast computes in float32 on CUDA, from the same page."""

FUSED = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""Operators that CUDA computes in one kernel, and torch in several steps on devices that have no kernel of them.

The steps would allocate what a GPU never does: three tensors of an MLP's width for one ``silu_backward``.
Source: torch's native_functions.yaml, functions with a CUDA and a CompositeImplicitAutograd kernel.
"""


class _Stream:
    """A stream or an event: both only order work, of which there is none."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


class _Device:
    """The module ``torch.<name>`` that torch and FSDP2 ask about a device."""

    Stream = Event = _Stream

    def is_available(self) -> bool:
        # Other code of this process must not take it for an accelerator to compute on.
        return False

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: Any = None) -> _Stream:
        return _Stream()

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def set_device(self, device: Any) -> None: ...

    synchronize = manual_seed_all = set_device

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Any, device: Any = None) -> None: ...


def register_device(capability: Capability | None = None) -> torch.device:
    """Register the simulated device in this process, before autograd's first backward, which counts the devices.

    Args:
        capability: compute capability of the GPU that it plays from now on; None for the least that engines support.

    Raises:
        RopewalkError: if another extension of torch has registered a device of this kind.
    """
    play_gpu(capability or LEAST_CAPABILITY)
    _register_once()
    return torch.device(SIMULATED, 0)


@cache
def _register_once() -> None:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    class Hooks(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc]
        """What torch asks about the device from C++."""

        def is_available(self) -> bool:
            return False

        def has_primary_context(self, device: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    try:
        _setup_privateuseone_for_python_backend(SIMULATED, backend_module=_Device(), hook=Hooks())
    except RuntimeError as error:
        raise RopewalkError(
            f"torch cannot simulate a GPU in this process ({str(error).splitlines()[0]}); start the dry run in a "
            "process of its own, without other extensions of torch"
        ) from error
    _keep_fused()
    _keep_lists()
    _teach_autocast()


_LIBRARIES: list[Any] = []
"""torch removes the kernels of a library that is collected."""


def _keep_fused() -> None:
    """Give the device a kernel of each fused operator, so that it reaches the recorder whole; no kernel ever runs."""

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("tensors of the simulated device have no data to compute with")

    library = torch.library.Library("aten", "IMPL")
    for name in FUSED:
        library.impl(name, never, "PrivateUse1")
    _LIBRARIES.append(library)


def _keep_lists() -> None:
    """Let optimizers and clipping take all tensors of a list at once, as on CUDA, with temporaries of them all."""
    # torch does so for the classes in these lists alone.
    for classes in (optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types):
        classes.append(FakeTensor)


def _teach_autocast() -> None:
    """Register kernels that cast as CUDA's autocast does; without them autocast would leave this device alone."""
    library = torch.library.Library("aten", "IMPL")
    for names, down in ((CAST_DOWN, True), (CAST_UP, False)):
        for name in names:
            packet, _, overload = name.partition(".")
            if not hasattr(torch.ops.aten, packet):
                continue
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, partial(_cast_and_call, operator, down), "AutocastPrivateUse1")
    # All other operators pass autocast by.
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    _LIBRARIES.extend((library, others))


def _cast_and_call(operator: Any, down: bool, *args: Any, **kwargs: Any) -> Any:
    from torch.utils._pytree import tree_map_only

    dtype = torch.get_autocast_dtype(SIMULATED) if down else torch.float32

    def cast(x: Tensor) -> Tensor:
        # As on CUDA: float64 is left alone, and so are tensors of other devices.
        eligible = x.is_floating_point() and x.dtype != torch.float64 and x.device.type == SIMULATED
        return x.to(dtype) if eligible else x

    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]
    with torch._C._ExcludeDispatchKeyGuard(keys):
        args, kwargs = tree_map_only(Tensor, cast, (args, kwargs))
        return operator(*args, **kwargs)


@contextmanager
def simulated_rank(shape: MeshShape, rank: int, device_type: str) -> Iterator[Mesh | None]:
    """Be one rank of a mesh whose other ranks do not exist; collectives return at once, with whatever is in memory.

    Args:
        shape: degrees of parallelism.
        rank: the rank to be.
        device_type: ``cpu``, or that of :func:`register_device`.

    Yields:
        The mesh; None for a single rank, as in a run of one process.

    Raises:
        RopewalkError: if this process already belongs to a process group.
    """
    if shape.world_size == 1:
        yield None
        return
    if dist.is_initialized():
        raise RopewalkError(
            "a dry run simulates one rank of its mesh in one process, but this process already belongs to a process "
            "group; start the dry run without torchrun"
        )
    from torch.testing._internal.distributed import fake_pg

    backend = f"{BACKEND}_{device_type}"
    if backend not in dist.Backend.backend_list:
        create = fake_pg._create_fake_pg
        dist.Backend.register_backend(backend, create, extended_api=True, devices=[device_type])
    dist.init_process_group(backend, rank=rank, world_size=shape.world_size, store=fake_pg.FakeStore())
    try:
        yield make_mesh(shape, device_type)
    finally:
        dist.destroy_process_group()
        forget_groups()
