"""How fast attention kernels are on kinds of GPUs: the one table that planned times and ``engine: auto`` use.

The share is that of the GPU's nominal peak in dense bfloat16 products, over forward and backward together: operations
of visible pairs, 4 per pair, head and dimension in the forward and 10 in the backward, divided by time and peak.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Generation = Literal["ampere", "ada", "hopper", "blackwell", "rtx_blackwell", "cdna3"]
"""Generation of GPUs: A100 and A6000; 4090 and L40S; H100 and H200; B200 and B300; 5090; AMD's MI300X."""


class Speed(NamedTuple):
    """Share of the peak, 0 to 1, on long rows with a head dimension of 128, and where it comes from."""

    share: float
    source: str


_MEASURED = "measured on one H200, rows of 32K and 128K tokens, benchmarks/results/gpu_h200.json"
_GUESS = "a guess"
_AS_AMPERE = f"{_GUESS}: as on an A100, whose tensor cores have the same instructions"

SPEEDS: dict[str, dict[Generation, Speed]] = {
    "flash2": {
        "ampere": Speed(
            0.6, "FlashAttention-2, arXiv:2307.08691, 2023: up to 0.73 forward and 0.63 backward"
        ),
        "ada": Speed(0.6, _AS_AMPERE),
        "hopper": Speed(0.33, _MEASURED),
        "blackwell": Speed(0.15, f"{_GUESS}: as many FLOP/s as on an H200"),
        "rtx_blackwell": Speed(0.6, _AS_AMPERE),
        "cdna3": Speed(0.3, f"{_GUESS}: as on an H200"),
    },
    "flash3": {
        "hopper": Speed(
            0.55,
            "FlashAttention-3, arXiv:2407.08608, 2024: 0.65 forward with a causal mask; the backward is 1.5 to 1.75 "
            "times as fast as FlashAttention-2's",
        ),
    },
    "flash4": {
        "hopper": Speed(0.55, f"{_GUESS}: as FlashAttention-3"),
        "blackwell": Speed(0.6, f"{_GUESS}; FlashAttention-4, arXiv:2603.05451, 2026, gives 0.71 forward"),
    },
    "cudnn": {
        "ampere": Speed(
            0.5, f"{_GUESS}: slower than FlashAttention-2 on an A100, huggingface/transformers 48163"
        ),
        "ada": Speed(0.5, _AS_AMPERE),
        "hopper": Speed(0.55, _MEASURED),
        "rtx_blackwell": Speed(0.5, _AS_AMPERE),
        "blackwell": Speed(0.5, f"{_GUESS}; up to 1.3 times slower than FlashAttention-4, arXiv:2603.05451"),
    },
    "flex": {
        "ampere": Speed(
            0.5, f"{_GUESS}: PyTorch's FlexAttention post, 2024, gives 0.85 to 0.9 of FlashAttention-2"
        ),
        "ada": Speed(0.5, _AS_AMPERE),
        "hopper": Speed(0.4, _MEASURED),
        "rtx_blackwell": Speed(0.4, f"{_GUESS}: less than on an A100"),
        "cdna3": Speed(0.25, f"{_GUESS}: less than FlashAttention-2"),
        "blackwell": Speed(0.2, f"{_GUESS}: FlashAttention-4 is up to 2.7 times as fast as Triton"),
    },
    "efficient": {
        "ampere": Speed(0.3, f"{_GUESS}: half of FlashAttention-2"),
        "ada": Speed(0.3, f"{_GUESS}: half of FlashAttention-2"),
        "hopper": Speed(0.16, f"{_GUESS}: half of FlashAttention-2"),
        "rtx_blackwell": Speed(0.3, f"{_GUESS}: half of FlashAttention-2"),
        "cdna3": Speed(0.15, f"{_GUESS}: half of FlashAttention-2"),
        "blackwell": Speed(0.08, f"{_GUESS}: half of FlashAttention-2"),
    },
}
"""Speed of each kernel; a kernel does not run on generations that it has no speed for.

``flash2`` to ``flash4`` are FlashAttention 2 to 4, ``cudnn`` and ``efficient`` the backends of SDPA besides it, and
``flex`` FlexAttention.
"""

OVERHEAD_KEYS = 700
"""Keys that each query adds to a kernel's time beyond those that it sees: partly masked blocks, and their cost.

FlashAttention 2 on an H200 has 0.50, 0.79 and 0.84 of its share on long rows where a query sees 700, 2,800 (rows of
32K) and 2,800 keys (rows of 128K) on average; this gives 0.50, 0.80 and 0.80.
"""

NARROW = 0.88
"""Share of its speed that a kernel keeps with head dimensions up to 64, where exponentials take longer than products.

Source: FlashAttention-3, arXiv:2407.08608, 2024: FlashAttention-2 reaches 324 instead of 370 TFLOP/s forward.
"""


def share_of_peak(kernel: str, generation: Generation) -> float:
    """Share of the peak, 0 to 1, that a kernel reaches where queries see many keys.

    Args:
        kernel: a key of :data:`SPEEDS`.
        generation: generation of the GPU.

    Raises:
        KeyError: if the kernel does not run on such GPUs.
    """
    return SPEEDS[kernel][generation].share


def timed_flops(flops: int, pairs: int, queries: int, head_dim: int) -> int:
    """Operations that take as long at a kernel's full share as a call really takes.

    Args:
        flops: operations of the call.
        pairs: query-key pairs that it computes.
        queries: its queries.
        head_dim: dimensions of a head.
    """
    if not pairs:
        return 0
    return round(flops * (1 + OVERHEAD_KEYS * queries / pairs) / (NARROW if head_dim <= 64 else 1))
