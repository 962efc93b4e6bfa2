"""Context parallelism over a ring of ranks: each rank receives the keys and values that its queries see."""

from ropewalk.parallel.ring.attention import prepare as prepare, ring_attend as ring_attend
