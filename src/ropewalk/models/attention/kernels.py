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
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from ropewalk.models.config.layers import GATED_DELTA, KIMI_DELTA, MAMBA_2, SHORT_CONVOLUTION
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
KEYWORDS = {"torch_chunk_gated_delta_rule": "cu_seq_lens_q"}
"""Functions whose mixer takes their boundaries under another name than their kernel."""


def boundary_keywords(mixer: nn.Module, recurrence: str) -> dict[str, str] | None:
    """The keyword arguments by which a mixer takes the boundaries of runs.

    Args:
        mixer: recurrent mixer of a layer.
        recurrence: its recurrence.

    Returns:
        For each keyword of the mixer's forward its form, ``seq_idx`` or ``cu_seqlens``; None if one of the mixer's
        functions is not a kernel that takes boundaries.
    """
    functions = FUNCTIONS.get(recurrence)
    if functions is None or older_transformers(SINCE) is not None:
        return None
    module = sys.modules[type(mixer).__module__]
    if not all(form in kernel_parameters(getattr(module, name, None)) for name, form in functions.items()):
        return None
    return {KEYWORDS.get(name, form): form for name, form in functions.items()}


def kernel_parameters(function: Any) -> tuple[str, ...]:
    """Parameters of the kernel by which transformers has replaced a function; empty if it runs its own torch code."""
    if not inspect.isfunction(function):
        return ()
    # transformers' wrapper keeps both to itself; its signature is that of the torch code.
    held = inspect.getclosurevars(function).nonlocals
    return tuple(held.get("applicable_params", ())) if held.get("is_new_implementation") is True else ()
