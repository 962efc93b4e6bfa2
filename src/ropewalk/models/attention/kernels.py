"""Kernels of recurrent layers that keep the runs of a packed row apart by themselves.

transformers replaces functions of its recurrent layers by kernels of installed packages: flash-linear-attention
(``fla``), mamba-ssm and causal-conv1d. They take the boundaries of runs in two forms, ``seq_idx`` and ``cu_seqlens``.
A mixer passes its keyword arguments on to all of its functions, so it can be given the boundaries of a packed row if
each of them has become a kernel that takes them.

transformers drops keyword arguments that a kernel does not have. The parameters of the kernel are therefore read here,
since a row whose boundaries were dropped would be one run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import nn

from ropewalk.models.config.auto_class import decoder_module
from ropewalk.models.config.layers import GATED_DELTA, KIMI_DELTA, MAMBA_2, SHORT_CONVOLUTION
from ropewalk.models.config.model import ModelConfig
from ropewalk.versions import older_transformers

SINCE = "5.23"
"""The transformers from which on every mixer below passes boundaries on; older ones get padded batches."""
CONVOLUTION = {"causal_conv1d_fn": "seq_idx"}
FUNCTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        GATED_DELTA: {**CONVOLUTION, "torch_chunk_gated_delta_rule": "cu_seqlens"},
        KIMI_DELTA: {**CONVOLUTION, "chunk_kimi_delta_attention": "cu_seqlens"},
        MAMBA_2: {
            **CONVOLUTION,
            "mamba2_split_conv1d_scan_combined": "seq_idx",
            "mamba2_chunk_scan": "seq_idx",
        },
        SHORT_CONVOLUTION: CONVOLUTION,
    }
)
"""For each recurrence the functions of its mixers that may be kernels, with the parameter for the boundaries.

Lightning attention has no kernel in transformers, and the convolution of LFM3 none before 5.24.
"""
PACKAGES = {
    "causal_conv1d_fn": "causal-conv1d",
    "torch_chunk_gated_delta_rule": "flash-linear-attention",
    "chunk_kimi_delta_attention": "flash-linear-attention",
    "mamba2_split_conv1d_scan_combined": "mamba-ssm",
    "mamba2_chunk_scan": "mamba-ssm",
}
"""The package with the kernel for each of these functions."""
KEYWORDS = {"torch_chunk_gated_delta_rule": "cu_seq_lens_q"}
"""Functions whose mixer takes their boundaries under another name than their kernel."""


Replacing = Callable[[str, Callable[..., Any], int, nn.Module | None], Callable[..., Any]]
"""What runs in place of a function: of its name, the function, tokens of a chunk if it loops over chunks, and the
module whose parameters it uses, if any."""

_replacing: Replacing | None = None
# A global and not a ContextVar, because autograd runs the backward of a GPU in a thread that has no context of ours.


@contextmanager
def functions_replaced_by(replacing: Replacing) -> Iterator[None]:
    """Let a dry run play what mixers call while the context is open, in all threads of the process."""
    global _replacing
    before, _replacing = _replacing, replacing
    try:
        yield
    finally:
        _replacing = before


def in_dry_run() -> bool:
    """Whether a dry run plays what mixers call."""
    return _replacing is not None


def played(
    name: str, function: Callable[..., Any], chunk: int = 0, module: nn.Module | None = None
) -> Callable[..., Any]:
    """A function, or what a dry run plays in its place; see :data:`Replacing`."""
    return function if _replacing is None else _replacing(name, function, chunk, module)


@dataclass(frozen=True)
class Kernel:
    """A kernel that a dry run takes to be installed; like transformers' wrapper, it drops arguments that it lacks."""

    function: Callable[..., Any]

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(inspect.signature(self.function).parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        taken = self.parameters
        return self.function(*args, **{key: value for key, value in kwargs.items() if key in taken})


def functions_of(mixer: nn.Module, recurrence: str) -> dict[str, Callable[..., Any]] | None:
    """The functions of a recurrence that a mixer calls, or those that a dry run plays in their place.

    Returns:
        By name in :data:`FUNCTIONS`; None if the mixer's forward calls others.
    """
    names = FUNCTIONS.get(recurrence, {})
    forward: Any = inspect.unwrap(type(mixer).forward)
    if not all(name in forward.__code__.co_names for name in names):
        return None
    return {name: played(name, forward.__globals__[name]) for name in names}


def kernel_packages(config: ModelConfig) -> tuple[str, ...]:
    """The packages with kernels for a model's recurrent layers, sorted; empty if it has no such layers or kernels."""
    if config.mixer is None or not config.recurrent_layers:
        return ()
    return tuple(sorted({PACKAGES[name] for name in FUNCTIONS.get(config.mixer.recurrence, ())}))


def missing_kernels(config: ModelConfig) -> tuple[str, ...]:
    """Those of :func:`kernel_packages` whose kernels transformers does not find here, so that its own code runs."""
    module = decoder_module(config.source)
    if module is None or config.mixer is None or not config.recurrent_layers:
        return ()
    names = FUNCTIONS.get(config.mixer.recurrence, ())
    return tuple(
        sorted({PACKAGES[name] for name in names if not kernel_parameters(getattr(module, name, None))})
    )


def boundary_keywords(mixer: nn.Module, recurrence: str) -> dict[str, str] | None:
    """The keyword arguments by which a mixer takes the boundaries of runs.

    Args:
        mixer: recurrent mixer of a layer.
        recurrence: its recurrence.

    Returns:
        For each keyword of the mixer's forward its form, ``seq_idx`` or ``cu_seqlens``; None if one of the mixer's
        functions is not a kernel that takes boundaries.
    """
    forms = FUNCTIONS.get(recurrence)
    if forms is None or older_transformers(SINCE) is not None:
        return None
    functions = functions_of(mixer, recurrence)
    if functions is None or not all(
        form in kernel_parameters(functions[name]) for name, form in forms.items()
    ):
        return None
    return {KEYWORDS.get(name, form): form for name, form in forms.items()}


def kernel_parameters(function: Any) -> tuple[str, ...]:
    """Parameters of the kernel by which transformers has replaced a function; empty if it runs its own torch code."""
    if isinstance(function, Kernel):
        return function.parameters
    if not inspect.isfunction(function):
        return ()
    # transformers' wrapper keeps both to itself; its signature is that of the torch code.
    held = inspect.getclosurevars(function).nonlocals
    return tuple(held.get("applicable_params", ())) if held.get("is_new_implementation") is True else ()
