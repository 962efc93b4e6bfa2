"""The model under test: in memory, behind a server, or spread over several processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from ropewalk.evaluation.backends.protocol import Backend, Likelihoods

if TYPE_CHECKING:
    from ropewalk.evaluation.backends.likelihoods import WindowReader
    from ropewalk.models.losses import LossModel, OutputHead
    from ropewalk.parallel import Mesh, World

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ModelUnderTest:
    """A model under evaluation.

    Attributes:
        tokenizer: the model's own, with a ``tokenizers`` backend.
        backend: answers prompts.
        model: a model from ``load_model``; None for a server, which gives no likelihoods, and for a sharded model.
        max_position_embeddings: tokens that its config states; None where it states none.
        batch_size: sequences in one pass, at most.
        prefill_chunk: tokens of a long sequence in one pass.
        sharded: whether several processes hold it and its rows together.
        over_ranks: gives the likelihoods of a sharded model; None before it is loaded.
        world: the processes that hold it; rank 0 alone makes the prompts. Without it every rank makes them.
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
        """A model from ``load_model``, asked in batches, prompts read in chunks of so many tokens."""
        from ropewalk.evaluation.backends import InMemoryBackend

        backend = InMemoryBackend(model, tokenizer, batch_size, prefill_chunk)
        return cls(tokenizer, backend, model, stated_length(model), batch_size, prefill_chunk)

    @classmethod
    def over_mesh(
        cls, model: LossModel, tokenizer: Any, mesh: Mesh, world: World | None = None
    ) -> ModelUnderTest:
        """A model from ``load_sharded``; every rank measures it with the same settings, and gets the same results.

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
        """The output head of the model in memory."""
        from ropewalk.models.losses import OutputHead

        return OutputHead.of(self.model)

    @cached_property
    def likelihoods(self) -> Likelihoods | None:
        """What the model thinks of given tokens; None behind a server."""
        if self.model is None:
            return self.over_ranks
        from ropewalk.evaluation.backends.likelihoods import InMemoryLikelihoods

        return InMemoryLikelihoods(self.model, self.prefill_chunk)

    def chunk_for(self, length: int) -> int | None:
        """Tokens of a pass over a sequence; None where the sequence is no longer than one chunk."""
        return self.prefill_chunk if length > self.prefill_chunk else None

    def window_reader(self, length: int) -> WindowReader:
        """The model in memory as it reads windows of documents of at most ``length`` tokens, BOS included."""
        from ropewalk.evaluation.backends.likelihoods import WindowReader

        return WindowReader(
            self.model, self.head, self.tokenizer.bos_token_id, prefill_chunk=self.chunk_for(length)
        )

    def on_rank_0(self, function: Callable[[], T]) -> T:
        """What a function returns on rank 0, on every rank; without processes, what it returns."""
        return function() if self.world is None else self.world.on_rank_0(function)


def stated_length(model: Any) -> int | None:
    """Tokens that a model's config states as its longest input."""
    from ropewalk.models.config import ModelConfig

    return ModelConfig.of(model.config).max_position_embeddings
