"""Attention over packed rows: one meaning, several engines."""

from ropewalk.attention.api import attend, prepare
from ropewalk.attention.engines import (
    ENGINES,
    AttentionSpec,
    EngineName,
    check_engine,
    require_engine_name,
    resolve_engine,
    why_not,
)

__all__ = [
    "ENGINES",
    "AttentionSpec",
    "EngineName",
    "attend",
    "check_engine",
    "prepare",
    "require_engine_name",
    "resolve_engine",
    "why_not",
]
