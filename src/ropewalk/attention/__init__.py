"""Packed rows and attention over them: one layout, one definition of visibility, several engines.

Names are imported on first use: the settings read the choices and must not load torch. Its files::

    api, choices, options    attend; the names to choose from; one layer's parameters
    layout, spans            which tokens see each other, in a row and by index arithmetic
    packed, merge, kept      rows by a kernel, the anchor and sinks merged, and results kept for a recomputation
    chosen                   attention to the tokens that each query has chosen
    engines, operators       what computes, what each can do, and torch's private operators
    flash, measuring, speeds which FlashAttention runs, which engine is fastest here, and how fast kernels are
    oracle                   attention in float64, and the error that rounding allows
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.attention.api import attend as attend, prepare as prepare
    from ropewalk.attention.choices import (
        ENGINES as ENGINES,
        PATTERNS as PATTERNS,
        POSITIONS as POSITIONS,
        EngineName as EngineName,
        Pattern as Pattern,
        Positions as Positions,
    )
    from ropewalk.attention.engines.capabilities import (
        AttentionSpec as AttentionSpec,
        check_engine as check_engine,
        require_engine_name as require_engine_name,
        resolve_engine as resolve_engine,
        why_not as why_not,
    )
    from ropewalk.attention.layout import (
        IGNORED as IGNORED,
        NO_DOCUMENT as NO_DOCUMENT,
        PackedLayout as PackedLayout,
        Row as Row,
        next_token_labels as next_token_labels,
    )
else:
    __getattr__, __dir__ = on_first_use(__name__)
