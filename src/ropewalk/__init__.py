"""ropewalk: extend the context window of RoPE language models, and verify that the training was correct.

The main jobs are functions of settings and a context that return plain values (docs/python.md has examples)::

    extend, search, evaluate, compare, audit, verify, plan, inspect, pack

The building blocks can be used separately: ``attend``, ``PackedLayout``, ``load_model``. Names are imported on first
use, so ``import ropewalk`` requires neither torch nor a GPU and takes milliseconds.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use
from ropewalk.versions import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from ropewalk.attention import attend as attend
    from ropewalk.attention.layout import PackedLayout as PackedLayout, Row as Row
    from ropewalk.audit.run import audit as audit
    from ropewalk.data.run import pack as pack
    from ropewalk.errors import EngineError as EngineError, RopewalkError as RopewalkError
    from ropewalk.evaluation.run import evaluate as evaluate
    from ropewalk.experiments.run import compare as compare
    from ropewalk.models.load import ModelSetup as ModelSetup, load_model as load_model
    from ropewalk.parallel.context import RunContext as RunContext
    from ropewalk.planning.inspection import inspect as inspect
    from ropewalk.planning.run import plan as plan
    from ropewalk.search.run import search as search
    from ropewalk.training.run import extend as extend
    from ropewalk.verification.run import verify as verify
else:
    __getattr__, __dir__ = on_first_use(__name__)
