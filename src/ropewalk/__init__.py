"""ropewalk: make the context window of RoPE language models longer, and prove that the training was right.

Names are imported on first use, so ``import ropewalk`` needs neither torch nor a GPU and takes milliseconds.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.attention import attend
    from ropewalk.attention.layout import PackedLayout, Row
    from ropewalk.errors import EngineError, RopewalkError
    from ropewalk.models.load import load_model

__version__ = "0.1.0"

_HOMES = {
    "EngineError": "errors",
    "PackedLayout": "attention.layout",
    "RopewalkError": "errors",
    "Row": "attention.layout",
    "attend": "attention",
    "load_model": "models.load",
}

__all__ = ["EngineError", "PackedLayout", "RopewalkError", "Row", "__version__", "attend", "load_model"]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
