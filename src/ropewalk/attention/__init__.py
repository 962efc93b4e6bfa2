"""Attention over packed rows: one meaning, several engines."""

from ropewalk.attention.api import (
    ENGINES,
    EngineName,
    attend,
    check_engine,
    require_engine_name,
    resolve_engine,
)

__all__ = ["ENGINES", "EngineName", "attend", "check_engine", "require_engine_name", "resolve_engine"]
