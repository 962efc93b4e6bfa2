"""ropewalk: make the context window of RoPE language models longer, and prove that the training was right.

Names are imported on first use, so ``import ropewalk`` needs neither torch nor a GPU and takes milliseconds.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.attention import attend
    from ropewalk.errors import EngineError, RopewalkError
    from ropewalk.integrations.models import load_model
    from ropewalk.packing import PackedLayout, Row

__version__ = "0.1.0"

_HOMES = {
    "EngineError": "errors",
    "PackedLayout": "packing",
    "RopewalkError": "errors",
    "Row": "packing",
    "attend": "attention",
    "load_model": "integrations.models",
}

__all__ = ["EngineError", "PackedLayout", "RopewalkError", "Row", "__version__", "attend", "load_model"]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
