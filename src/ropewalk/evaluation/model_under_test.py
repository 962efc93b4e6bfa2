"""What is measured: a model in memory, or a model behind a server of which only the tokenizer is here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ropewalk.evaluation.backends import Backend

if TYPE_CHECKING:
    from ropewalk.models.losses import OutputHead


@dataclass(frozen=True, eq=False)
class Subject:
    """A model under evaluation.

    Attributes:
        tokenizer: the model's own, with a ``tokenizers`` backend.
        backend: answers prompts.
        model: a model from ``load_model``; None for a server, which gives no losses of a text's tokens.
        max_position_embeddings: tokens that its config states; None where it states none.
        batch_size: sequences in one pass, at most.
        prefill_chunk: tokens of a long sequence in one pass.
    """

    tokenizer: Any
    backend: Backend
    model: Any = None
    max_position_embeddings: int | None = None
    batch_size: int = 8
    prefill_chunk: int = 8192

    @classmethod
    def in_memory(cls, model: Any, tokenizer: Any, batch_size: int = 8, prefill_chunk: int = 8192) -> Subject:
        """A model from ``load_model``, asked in batches, prompts read in chunks of so many tokens."""
        from ropewalk.evaluation.backends import InMemoryBackend

        stated = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        backend = InMemoryBackend(model, tokenizer, batch_size, prefill_chunk)
        return cls(tokenizer, backend, model, stated, batch_size, prefill_chunk)

    @cached_property
    def head(self) -> OutputHead:
        """The output head of the model in memory."""
        from ropewalk.models.losses import OutputHead

        return OutputHead.of(self.model)
