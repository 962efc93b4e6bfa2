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
from ropewalk.parallel.rank_pool import RankFailure, Ranks
from ropewalk.parallel.traffic import Traffic, counted_traffic

__all__ = [
    "AttentionErrors",
    "RankFailure",
    "Ranks",
    "Traffic",
    "attention_errors",
    "counted_traffic",
    "cut_row",
    "oracle_attention",
    "random_layout",
    "repeated_anchor_attention",
]
