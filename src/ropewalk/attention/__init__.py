"""Attention over packed rows: one meaning, several engines."""

from ropewalk.attention.api import attend
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
    "require_engine_name",
    "resolve_engine",
    "why_not",
]
