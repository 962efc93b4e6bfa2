"""Packed rows and attention over them: one layout, one definition of visibility, several engines.

Names are imported on first use: the settings read the choices and must not load torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.attention.api import attend, prepare
    from ropewalk.attention.choices import ENGINES, PATTERNS, POSITIONS, EngineName, Pattern, Positions
    from ropewalk.attention.engines.capabilities import (
        AttentionSpec,
        check_engine,
        require_engine_name,
        resolve_engine,
        why_not,
    )
    from ropewalk.attention.layout import IGNORED, NO_DOCUMENT, PackedLayout, Row, next_token_labels

_HOMES = {
    "ENGINES": "choices",
    "IGNORED": "layout",
    "NO_DOCUMENT": "layout",
    "PATTERNS": "choices",
    "POSITIONS": "choices",
    "AttentionSpec": "engines.capabilities",
    "EngineName": "choices",
    "PackedLayout": "layout",
    "Pattern": "choices",
    "Positions": "choices",
    "Row": "layout",
    "attend": "api",
    "check_engine": "engines.capabilities",
    "next_token_labels": "layout",
    "prepare": "api",
    "require_engine_name": "engines.capabilities",
    "resolve_engine": "engines.capabilities",
    "why_not": "engines.capabilities",
}

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


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
