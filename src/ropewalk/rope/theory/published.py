"""Lower bounds of the base as published, for comparison; nothing is computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LOWER_BOUNDS_DIM = 128
"""rotary_dim of the published table."""

LOWER_BOUNDS: Mapping[int, float] = MappingProxyType(
    {
        1024: 4.3e3,
        2048: 1.6e4,
        4096: 2.7e4,
        8192: 8.4e4,
        16384: 3.1e5,
        32768: 6.4e5,
        65536: 2.1e6,
        131072: 7.8e6,
        262144: 3.6e7,
        524288: 6.4e7,
        1048576: 5.1e8,
    }
)
"""Base by context length in tokens. Source: Men et al., arXiv:2405.14591, table 2."""
