"""Oracles and error budgets, public so that users can hold their own engines to them."""

from ropewalk.testing.attention import (
    AttentionErrors,
    attention_errors,
    oracle_attention,
    repeated_anchor_attention,
)
from ropewalk.testing.layouts import cut_row, random_layout

__all__ = [
    "AttentionErrors",
    "attention_errors",
    "cut_row",
    "oracle_attention",
    "random_layout",
    "repeated_anchor_attention",
]
