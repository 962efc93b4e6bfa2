"""Rows that are cut over a ring of ranks, each of which gets the keys and values that its queries see."""

from ropewalk.parallel.ring.attention import prepare, ring_attend

__all__ = ["prepare", "ring_attend"]
