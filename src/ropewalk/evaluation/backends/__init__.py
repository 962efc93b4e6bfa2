"""Backends that answer prompts: a model in memory, or a server.

Both are imported on first use, because the first needs torch.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.evaluation.backends.in_memory import (
        InMemoryBackend as InMemoryBackend,
        argmax_matches as argmax_matches,
    )
    from ropewalk.evaluation.backends.protocol import (
        Answer as Answer,
        Backend as Backend,
        GenerationRequest as GenerationRequest,
        Likelihoods as Likelihoods,
        Rejection as Rejection,
    )
    from ropewalk.evaluation.backends.server import ServerBackend as ServerBackend
else:
    __getattr__, __dir__ = on_first_use(__name__)
