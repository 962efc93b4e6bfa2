"""ropewalk: extend the context window of RoPE language models, and verify that the training was correct.

The main jobs are functions that take a path or name and the options of their commands, and return plain values
(docs/python.md has examples)::

    extend, search, evaluate, compare, audit, verify, plan, init, inspect, pack

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
    from ropewalk.errors import EngineError as EngineError, RopewalkError as RopewalkError
    from ropewalk.jobs import (
        audit as audit,
        compare as compare,
        evaluate as evaluate,
        extend as extend,
        init as init,
        inspect as inspect,
        pack as pack,
        plan as plan,
        search as search,
        verify as verify,
    )
    from ropewalk.models.load import ModelSetup as ModelSetup, load_model as load_model
    from ropewalk.parallel.context import RunContext as RunContext
else:
    __getattr__, __dir__ = on_first_use(__name__)
