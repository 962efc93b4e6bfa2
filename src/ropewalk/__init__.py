"""ropewalk: make the context window of RoPE language models longer, and prove that the training was right.

Names are imported on first use, so ``import ropewalk`` needs neither torch nor a GPU and takes milliseconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropewalk.attention import attend
    from ropewalk.errors import EngineError, RopewalkError
    from ropewalk.integrations.models import load_model
    from ropewalk.packing import PackedLayout, Row

__version__ = "0.1.0"

_HOMES = {
    "EngineError": "ropewalk.errors",
    "PackedLayout": "ropewalk.packing",
    "RopewalkError": "ropewalk.errors",
    "Row": "ropewalk.packing",
    "attend": "ropewalk.attention",
    "load_model": "ropewalk.integrations.models",
}

__all__ = ["EngineError", "PackedLayout", "RopewalkError", "Row", "__version__", "attend", "load_model"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ropewalk' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
