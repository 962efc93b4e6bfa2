"""Packed rows and attention over them: one layout, one meaning, several engines."""

from ropewalk.attention.api import attend, prepare
from ropewalk.attention.engines.capabilities import (
    ENGINES,
    AttentionSpec,
    EngineName,
    check_engine,
    require_engine_name,
    resolve_engine,
    why_not,
)
from ropewalk.attention.layout import (
    IGNORED,
    NO_DOCUMENT,
    PATTERNS,
    POSITIONS,
    PackedLayout,
    Pattern,
    Positions,
    Row,
    next_token_labels,
)

__all__ = [
    "ENGINES",
    "IGNORED",
    "NO_DOCUMENT",
    "PATTERNS",
    "POSITIONS",
    "AttentionSpec",
    "EngineName",
    "PackedLayout",
    "Pattern",
    "Positions",
    "Row",
    "attend",
    "check_engine",
    "next_token_labels",
    "prepare",
    "require_engine_name",
    "resolve_engine",
    "why_not",
]
