"""ropewalk: extend the context window of RoPE language models, and verify that the training was correct.

The main jobs are functions of settings and a context that return plain values (docs/python.md has examples)::

    extend, search, evaluate, compare, audit, verify, plan, inspect, pack

The building blocks can be used separately: ``attend``, ``PackedLayout``, ``load_model``. Names are imported on first
use, so ``import ropewalk`` requires neither torch nor a GPU and takes milliseconds.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import lazy_names
from ropewalk.versions import VERSION

if TYPE_CHECKING:
    from ropewalk.attention import attend
    from ropewalk.attention.layout import PackedLayout, Row
    from ropewalk.data.run import pack
    from ropewalk.errors import EngineError, RopewalkError
    from ropewalk.evaluation.run import evaluate
    from ropewalk.experiments.run import run as compare
    from ropewalk.models.load import ModelSetup, load_model
    from ropewalk.parallel.context import RunContext
    from ropewalk.planning.inspection import inspect
    from ropewalk.planning.run import plan
    from ropewalk.training.run import extend
    from ropewalk.verification.run import verify

__version__ = VERSION

_HOMES = {
    "EngineError": "errors",
    "ModelSetup": "models.load",
    "PackedLayout": "attention.layout",
    "RopewalkError": "errors",
    "Row": "attention.layout",
    "RunContext": "parallel.context",
    "attend": "attention",
    "compare": "experiments.run:run",
    "evaluate": "evaluation.run",
    "extend": "training.run",
    "inspect": "planning.inspection",
    "load_model": "models.load",
    "pack": "data.run",
    "plan": "planning.run",
    "verify": "verification.run",
}

__all__ = [
    "EngineError",
    "ModelSetup",
    "PackedLayout",
    "RopewalkError",
    "Row",
    "RunContext",
    "__version__",
    "attend",
    "audit",
    "compare",
    "evaluate",
    "extend",
    "inspect",
    "load_model",
    "pack",
    "plan",
    "search",
    "verify",
]


__getattr__ = lazy_names(__name__, _HOMES, packages=("audit", "search"))


def __dir__() -> list[str]:
    return __all__
