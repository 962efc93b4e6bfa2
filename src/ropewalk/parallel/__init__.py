"""Sharding rows over ranks: pure index arithmetic, rank and world size as arguments."""

from ropewalk.parallel.shards import Shard

__all__ = ["Shard"]
