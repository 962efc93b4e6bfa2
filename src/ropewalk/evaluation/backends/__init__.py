"""Backends that answer prompts: a model in memory, or a server.

Both are imported on first use, because the first needs torch and the second the openai package.
"""

from typing import TYPE_CHECKING

from ropewalk.evaluation.backends.protocol import Answer, Backend, GenerationRequest, Likelihoods, Rejection
from ropewalk.lazy import lazy_names

if TYPE_CHECKING:
    from ropewalk.evaluation.backends.in_memory import InMemoryBackend, argmax_matches
    from ropewalk.evaluation.backends.server import ServerBackend

_HOMES = {"InMemoryBackend": "in_memory", "ServerBackend": "server", "argmax_matches": "in_memory"}

__all__ = [
    "Answer",
    "Backend",
    "GenerationRequest",
    "InMemoryBackend",
    "Likelihoods",
    "Rejection",
    "ServerBackend",
    "argmax_matches",
]


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
