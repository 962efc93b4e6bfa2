"""A transformers model in this process answers prompts, many at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.decoding import (
    PREFILL_CHUNK,
    check_ids,
    check_positive,
    greedy_ids,
    out_of_memory,
    refuse_unpinned,
    smaller_chunk,
    unless_out_of_memory,
)
from ropewalk.evaluation.backends.protocol import Answer, Request

log = logging.getLogger("ropewalk")


class InMemoryBackend:
    """Greedy answers of a model in memory, which depend on nothing but the prompt and the weights.

    A checkpoint's ``generation_config.json`` may ask for sampling, penalties or a maximal length; none of it
    applies. An answer ends with the tokenizer's EOS, or with another token that ``generation_config.json``
    names as an ending (Llama 3's chat models end a turn with ``<|eot_id|>``) and that the tokenizer has among
    its added tokens; an ordinary piece of text ends nothing.

    Prompts of one ``Request.length`` share a batch, the longest lengths first. A RoPE that depends on the
    length is fixed by ``Request.length``, padding is masked and positions count from each prompt's own first
    token, so an answer is the same alone and in a batch, up to the rounding of the model's dtype.

    Where memory runs out, the batch is halved and work goes on; a single prompt is read in chunks of half the
    size, down to 256 tokens. The next length begins with the settings again.

    Args:
        model: a transformers decoder, as ``ropewalk.models.load.load_model`` gives it. It may be asked
            beyond the length of its config. Its mode is as it was after each batch.
        tokenizer: the model's own.
        batch_size: most prompts at once.
        prefill_chunk: prompt tokens that go through the model at once, over all prompts of a batch: with it
            the memory for activations and masks is bounded. Keys and values need theirs in any case.

    Raises:
        RopewalkError: if a setting is below 1, or the model's RoPE depends on the length and cannot be fixed.
    """

    def __init__(
        self, model: Any, tokenizer: Any, batch_size: int = 8, prefill_chunk: int = PREFILL_CHUNK
    ) -> None:
        check_positive("batch_size", batch_size)
        check_positive("prefill_chunk", prefill_chunk)
        refuse_unpinned(model)
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.prefill_chunk = prefill_chunk
        self.endings = ending_ids(model, tokenizer)

    @property
    def description(self) -> dict[str, str]:
        """Kind, model class, dtype and device."""
        return {
            "kind": "in memory",
            "model": type(self.model).__name__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
        }

    def answers(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """One answer a request, each as soon as its batch is done.

        Raises:
            RopewalkError: at once, if a prompt is empty, holds unknown tokens, or does not fit in its length.
            RunFailure: if the memory is too small for a single prompt, or the model's logits are no numbers.
        """
        for index, request in enumerate(requests):
            check_room(index, request)
            check_ids(self.model, request.input_ids)
        return self._answers(requests)

    def _answers(self, requests: Sequence[Request]) -> Iterator[Answer]:
        for group in grouped(requests):
            yield from self._answer_group(requests, group)

    def _answer_group(self, requests: Sequence[Request], group: Sequence[int]) -> Iterator[Answer]:
        """Answer requests of one length, as many at once as memory allows."""
        rows, chunk, done = self.batch_size, self.prefill_chunk, 0
        while done < len(group):
            batch = group[done : done + rows]
            asked = [requests[index] for index in batch]
            new = unless_out_of_memory(partial(self._new_ids, asked, chunk))
            if new is not None:
                done += len(batch)
                yield from map(self._answer, batch, new)
            elif len(batch) > 1:
                rows = len(batch) // 2
                log.warning(
                    "out of memory with %d prompts of up to %d tokens at once; going on with %d",
                    len(batch),
                    len(asked[0].input_ids),
                    rows,
                )
            else:
                tokens = len(asked[0].input_ids)
                smaller = smaller_chunk(chunk, tokens)
                if smaller is None:
                    raise out_of_memory(self.model, tokens)
                chunk = smaller

    def _new_ids(self, asked: Sequence[Request], chunk: int) -> list[list[int]]:
        rows = [request.input_ids for request in asked]
        return greedy_ids(self.model, rows, asked[0].max_new_tokens, asked[0].length, self.endings, chunk)

    def _answer(self, index: int, new_ids: list[int]) -> Answer:
        finished = new_ids[-1] in self.endings
        # The ending is cut here: not every tokenizer counts it among its special tokens.
        said = new_ids[:-1] if finished else new_ids
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        return Answer(index, text, len(new_ids), finished)


def grouped(requests: Sequence[Request]) -> list[list[int]]:
    """Indices of requests that may share a batch: of one length and one room for the answer.

    The longest come first, in the list and in each group: what memory cannot hold shows at the beginning, and
    neighbours are of like length, so little is padded.
    """

    def size(index: int) -> tuple[int, int]:
        return requests[index].length, requests[index].max_new_tokens

    def order(index: int) -> tuple[int, int, int]:
        return *size(index), len(requests[index].input_ids)

    ordered = sorted(range(len(requests)), key=order, reverse=True)
    return [list(group) for _, group in groupby(ordered, key=size)]


def check_room(index: int, request: Request) -> None:
    """Raise RopewalkError unless there is room for an answer and prompt and answer fit in the length."""
    if request.max_new_tokens < 1:
        raise RopewalkError(
            f"max_new_tokens of request {index} must be 1 or more, got {request.max_new_tokens}"
        )
    needed = len(request.input_ids) + request.max_new_tokens
    if needed > request.length:
        raise RopewalkError(
            f"request {index} needs {needed} tokens for prompt and answer and has a length of {request.length}"
        )


def ending_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Token ids that end an answer; see :class:`InMemoryBackend`."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    several = listed if isinstance(listed, (list, tuple)) else [listed]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset([*own, *(each for each in several if each in tokenizer.added_tokens_decoder)])
