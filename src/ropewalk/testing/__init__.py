"""Oracles, error budgets, random rows, a pool of ranks and a counter of traffic, to hold your own code to.

Each name is the one that ropewalk itself is tested, verified and measured with.
"""

from ropewalk.attention.oracle import (
    AttentionErrors,
    attention_errors,
    cut_row,
    oracle_attention,
    random_layout,
    repeated_anchor_attention,
)

__all__ = [
    "AttentionErrors",
    "attention_errors",
    "cut_row",
    "oracle_attention",
    "random_layout",
    "repeated_anchor_attention",
]
