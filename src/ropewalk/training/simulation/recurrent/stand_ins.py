"""What a dry run plays in place of the functions of recurrent mixers.

A GPU runs the kernels of flash-linear-attention, mamba-ssm and causal-conv1d, unless they are known to be missing. A
CPU runs transformers' own code, and so does a GPU for lightning attention, which has no kernel; of its loops over
chunks, a few are played.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from ropewalk.models.attention.kernels import PACKAGES, Kernel
from ropewalk.planning.sizing.recurrent import DELTA_CHUNK
from ropewalk.training.simulation.recurrent.convolution import causal_conv1d_fn
from ropewalk.training.simulation.recurrent.delta_rule import chunk_gated_delta_rule, chunk_kda
from ropewalk.training.simulation.recurrent.few_chunks import Account, few_chunks
from ropewalk.training.simulation.recurrent.scan import (
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

KERNELS = {
    "causal_conv1d_fn": Kernel(causal_conv1d_fn),
    "torch_chunk_gated_delta_rule": Kernel(chunk_gated_delta_rule),
    "chunk_kimi_delta_attention": Kernel(chunk_kda),
    "mamba2_chunk_scan": Kernel(mamba_chunk_scan_combined),
    "mamba2_split_conv1d_scan_combined": Kernel(mamba_split_conv1d_scan_combined),
}
"""The kernel by which transformers replaces each function of :data:`ropewalk.models.attention.kernels.FUNCTIONS`."""
LOOPS = {"torch_chunk_gated_delta_rule": DELTA_CHUNK, "chunk_kimi_delta_attention": DELTA_CHUNK}
"""Functions whose torch code loops over chunks, with the tokens of a chunk."""


class Device(Account, Protocol):
    """The recorder; see :class:`~ropewalk.training.simulation.recording.Recorder`."""

    def has_kernels(self, package: str) -> bool: ...


def stand_in(
    account: Device, name: str, own: Callable[..., Any], chunk: int, module: nn.Module | None
) -> Callable[..., Any]:
    """What a dry run calls in place of a function of a mixer.

    Args:
        account: the recorder.
        name: name of the function.
        own: the function that the mixer calls in a run.
        chunk: tokens of a chunk, if the function loops over chunks whatever its name; 0 otherwise.
        module: module whose parameters the function uses; None for none.
    """
    if name in KERNELS and account.has_kernels(PACKAGES[name]):
        return KERNELS[name]
    chunk = chunk or LOOPS.get(name, 0)
    return few_chunks(account, name, own, chunk, module) if chunk else own
