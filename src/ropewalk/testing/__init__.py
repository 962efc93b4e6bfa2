"""Oracles, error budgets, random rows, a pool of ranks and a counter of traffic, to hold your own code to.

Each name is the one that ropewalk itself is tested, verified and measured with.
"""

from ropewalk.attention.oracle import (
    AttentionErrors as AttentionErrors,
    attention_errors as attention_errors,
    cut_row as cut_row,
    oracle_attention as oracle_attention,
    random_layout as random_layout,
    repeated_anchor_attention as repeated_anchor_attention,
)
from ropewalk.parallel.rank_pool import RankFailure as RankFailure, Ranks as Ranks
from ropewalk.parallel.traffic import Traffic as Traffic, counted_traffic as counted_traffic
