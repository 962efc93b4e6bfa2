"""The model under test: in memory, behind a server, or sharded over several processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ropewalk.evaluation.backends.protocol import Backend, Likelihoods

if TYPE_CHECKING:
    from ropewalk.evaluation.backends.likelihoods import WindowReader
    from ropewalk.models.compute.losses import LossModel, OutputHead
    from ropewalk.parallel import Mesh, World

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ModelUnderTest:
    """A model under evaluation.

    Attributes:
        tokenizer: the model's tokenizer, with a ``tokenizers`` backend.
        backend: generates answers to prompts.
        model: a model from ``load_model``; None for a server, which gives no likelihoods, and for a sharded model.
        max_position_embeddings: longest input in tokens that the config states; None if it states none.
        batch_size: maximum number of sequences per forward pass.
        prefill_chunk: tokens of a long sequence per forward pass.
        sharded: whether the model and its rows are sharded over several processes.
        over_ranks: gives the likelihoods of a sharded model; None before it is loaded.
        world: the processes of a sharded model; only rank 0 generates the prompts. If None, every rank does.
    """

    tokenizer: Any
    backend: Backend
    model: Any = None
    max_position_embeddings: int | None = None
    batch_size: int = 8
    prefill_chunk: int = 8192
    sharded: bool = False
    over_ranks: Likelihoods | None = None
    world: World | None = None

    @classmethod
    def in_memory(
        cls, model: Any, tokenizer: Any, batch_size: int = 8, prefill_chunk: int = 8192
    ) -> ModelUnderTest:
        """Wrap a model from ``load_model``.

        Args:
            model: a model from ``load_model``.
            tokenizer: the model's tokenizer.
            batch_size: maximum number of prompts per batch.
            prefill_chunk: tokens of a prompt per forward pass.
        """
        # Imported here, because a model behind a server needs no torch.
        from ropewalk.evaluation.backends import InMemoryBackend

        backend = InMemoryBackend(model, tokenizer, batch_size, prefill_chunk)
        return cls(tokenizer, backend, model, stated_length(model), batch_size, prefill_chunk)

    @classmethod
    def over_mesh(
        cls, model: LossModel, tokenizer: Any, mesh: Mesh, world: World | None = None
    ) -> ModelUnderTest:
        """Wrap a model from ``load_sharded``; every rank uses the same settings and gets the same results.

        Raises:
            RopewalkError: if the model's RoPE depends on the length and cannot be fixed.
        """
        from ropewalk.evaluation.backends.sharded import ShardedBackend, ShardedLikelihoods

        likelihoods, stated = ShardedLikelihoods(model, mesh), stated_length(model.model)
        backend = ShardedBackend.of(model, mesh)
        return cls(
            tokenizer,
            backend,
            max_position_embeddings=stated,
            sharded=True,
            over_ranks=likelihoods,
            world=world,
        )

    @cached_property
    def head(self) -> OutputHead:
        """Return the output head of the model in memory."""
        from ropewalk.models.compute.losses import OutputHead

        # Kept, because OutputHead.of runs the model.
        return OutputHead.of(self.model)

    @cached_property
    def likelihoods(self) -> Likelihoods | None:
        """Return the interface to the model's likelihoods of given tokens; None behind a server."""
        # A sharded model has no `model` here, and a server has neither.
        if self.model is None:
            return self.over_ranks
        from ropewalk.evaluation.backends.likelihoods import InMemoryLikelihoods

        return InMemoryLikelihoods(self.model, self.prefill_chunk)

    def chunk_for(self, length: int) -> int | None:
        """Return the tokens per forward pass over a sequence; None if the sequence fits in one chunk."""
        # A single pass needs no cache.
        return self.prefill_chunk if length > self.prefill_chunk else None

    def window_reader(self, length: int) -> WindowReader:
        """Return a reader that scores windows of documents, of at most ``length`` tokens with BOS."""
        from ropewalk.evaluation.backends.likelihoods import WindowReader

        return WindowReader(
            self.model, self.head, self.tokenizer.bos_token_id, prefill_chunk=self.chunk_for(length)
        )

    def on_rank_0(self, function: Callable[[], T]) -> T:
        """Call a function on rank 0 and return its result on every rank; in a single process, just call it."""
        return function() if self.world is None else self.world.on_rank_0(function)


def stated_length(model: Any) -> int | None:
    """Return the longest input in tokens that a model's config states, or None."""
    from ropewalk.models.config.model import ModelConfig

    return ModelConfig.of(model.config).max_position_embeddings
