"""The forward passes of greedy decoding: prompts in chunks through a key/value cache, logits of few positions.

transformers' own ``generate`` is not called: on Phi-3 it throws the cache away where a sequence passes the
original length, and it cannot fix a RoPE that depends on the length.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.protocol import Answer, GenerationRequest, evaluating
from ropewalk.models.generation import generating, unpinned_methods

LEAST_CHUNK = 256
"""Tokens at once below which a smaller chunk saves no memory worth having."""

PREFILL_CHUNK = 8192

_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
)

Result = TypeVar("Result")

pinned = generating
"""Fixes a RoPE that depends on the length, so that cached keys and later queries are rotated alike."""


def greedy_ids(
    model: Any,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    length: int,
    endings: frozenset[int],
    chunk: int = PREFILL_CHUNK,
) -> list[list[int]]:
    """The tokens that a model adds to each prompt of a batch, each the likeliest.

    Args:
        model: a transformers decoder.
        rows: prompts as token ids, of any lengths; shorter ones are padded on the left and masked.
        max_new_tokens: most new tokens a prompt.
        length: tokens for which a RoPE that depends on the length is fixed.
        endings: tokens that end an answer.
        chunk: prompt tokens that go through the model at once, over all rows.

    Returns:
        The new tokens alone, one list a row; it ends with an ending token where one came.

    Raises:
        RunFailure: if the logits are no numbers.
    """
    ids, mask = _left_padded(rows, model.device)
    # isin takes no set, and an answer may have no ending at all.
    ending = torch.tensor(sorted(endings), dtype=torch.long, device=ids.device)
    with evaluating(model), pinned(model, length), _fresh_cache(model) as cache:
        logits = _prefilled(model, cache, ids, mask, chunk)
        position = mask.sum(dim=1, keepdim=True)
        going = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        new: list[Tensor] = []
        for step in range(max_new_tokens):
            new.append(_likeliest(logits))
            going &= ~torch.isin(new[-1], ending)
            if step + 1 == max_new_tokens or not bool(going.any()):
                break
            mask = torch.cat([mask, torch.ones_like(position)], dim=1)
            logits = _logits(model, cache, new[-1][:, None], mask, position + step, keep=1)[:, -1]
    return [_up_to_ending(row, endings) for row in torch.stack(new, dim=1).tolist()]


def argmax_matches(
    model: Any,
    input_ids: Sequence[int],
    start: int,
    length: int | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
) -> list[bool]:
    """Whether a model would say each target token, all targets before it given: one pass, no generation.

    All are true exactly where greedy generation from ``input_ids[:start]`` says the rest of ``input_ids``.

    Args:
        model: a transformers decoder.
        input_ids: prompt and target.
        start: index of the first target token, 1 or more.
        length: tokens for which a RoPE that depends on the length is fixed; those of ``input_ids`` if None.
        prefill_chunk: tokens that go through the model at once; fewer where memory is short.

    Returns:
        One truth value a target token.

    Raises:
        RopewalkError: if there is no target, or a setting is out of range.
        RunFailure: if the memory is too small even for chunks of 256 tokens.
    """
    ids = list(input_ids)
    if not 1 <= start < len(ids):
        raise RopewalkError(
            f"the first target token must be one of 1 to {len(ids) - 1} in a row of {len(ids)} tokens, got {start}"
        )
    check_positive("prefill_chunk", prefill_chunk)
    check_ids(model, ids)
    refuse_unpinned(model)
    chunk: int | None = prefill_chunk
    while chunk is not None:
        matches = unless_out_of_memory(partial(_matches, model, ids, start, length or len(ids), chunk))
        if matches is not None:
            return matches
        chunk = smaller_chunk(chunk, len(ids))
    raise out_of_memory(model, len(ids))


def _matches(model: Any, ids: list[int], start: int, length: int, chunk: int) -> list[bool]:
    row, mask = _left_padded([ids], model.device)
    matches: list[bool] = []
    with evaluating(model), pinned(model, length), _fresh_cache(model) as cache:
        if start > 1:
            _prefilled(model, cache, row[:, : start - 1], mask[:, : start - 1], chunk)
        # Here each position has logits over the whole vocabulary, so fewer go at once.
        width = min(chunk, LEAST_CHUNK)
        for first in range(start - 1, len(ids) - 1, width):
            end = min(first + width, len(ids) - 1)
            positions = torch.arange(first, end, device=row.device)[None]
            logits = _logits(model, cache, row[:, first:end], mask[:, :end], positions, keep=end - first)
            matches += (_likeliest(logits) == row[:, first + 1 : end + 1])[0].tolist()
    return matches


def _prefilled(model: Any, cache: Any, ids: Tensor, mask: Tensor, chunk: int) -> Tensor:
    """Fill the cache with ``ids [batch, length]``; the logits ``[batch, vocabulary]`` of the last position."""
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    width = max(1, chunk // len(ids))
    for start in range(0, ids.shape[1], width):
        part = slice(start, start + width)
        seen = mask[:, : start + width]
        logits = _logits(model, cache, ids[:, part], seen, positions[:, part], keep=1)
    return logits[:, -1]


def _logits(model: Any, cache: Any, ids: Tensor, mask: Tensor, positions: Tensor, keep: int) -> Tensor:
    """``[batch, keep, vocabulary]`` of the last ``keep`` positions; ``mask`` covers what is cached as well."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
    )
    logits: Tensor = output.logits
    return logits


def _likeliest(logits: Tensor) -> Tensor:
    best, ids = logits.max(dim=-1)
    # NaN would win every comparison and be scored as a wrong answer.
    if bool(best.isnan().any()):
        raise RunFailure(
            f"the model's logits are no numbers in {str(logits.dtype).removeprefix('torch.')}: answers would mean "
            "nothing; run it in bfloat16 or float32"
        )
    return ids


def _left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, ``[batch, longest]``; which id fills the padding does not matter, it is masked."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = torch.arange(longest, device=device)[None] >= longest - lengths[:, None]
    return ids, mask.long()


def _up_to_ending(ids: list[int], endings: frozenset[int]) -> list[int]:
    stop = next((place for place, each in enumerate(ids) if each in endings), len(ids))
    return ids[: stop + 1]


@contextmanager
def _fresh_cache(model: Any) -> Iterator[Any]:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    try:
        yield cache
    finally:
        # The attention hook ties the cache into a reference cycle; its keys must not wait for the collector.
        cache.layers.clear()


def refuse_unpinned(model: Any) -> None:
    """transformers' own rotary module chooses anew in each call what a length-dependent RoPE rotates with.

    Raises:
        RopewalkError: if the model has such a RoPE and such a module.
    """
    dependent = unpinned_methods(model)
    if dependent:
        raise RopewalkError(
            f"{type(model).__name__} runs transformers' own rotary module with {', '.join(dependent)}, whose angles "
            "change within a prompt that is read in chunks; load it with exact_rope=True"
        )


def check_positive(name: str, value: int) -> None:
    """Raise RopewalkError unless a setting is 1 or more."""
    if value < 1:
        raise RopewalkError(f"{name} must be 1 or more, got {value}")


def check_ids(model: Any, ids: Sequence[int]) -> None:
    """Raise RopewalkError unless a prompt has tokens and the model knows them all."""
    if not ids:
        raise RopewalkError("a prompt has no tokens; it needs one at least")
    size = model.config.get_text_config().vocab_size
    if min(ids) < 0 or max(ids) >= size:
        strange = next(each for each in ids if not 0 <= each < size)
        raise RopewalkError(
            f"a prompt has the token id {strange}, and the model knows 0 to {size - 1}: the tokenizer is not the "
            "model's own"
        )


def unless_out_of_memory(attempt: Callable[[], Result]) -> Result | None:
    """What an attempt returns, or None if memory ran out; then what it held is free again."""
    try:
        return attempt()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    # Only here is the traceback gone, which kept the tensors of its frames.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error says that memory ran out; torch has a class for it on accelerators, not on the CPU."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(each in said for each in _MEMORY_MESSAGES)


def smaller_chunk(chunk: int, tokens: int) -> int | None:
    """The next chunk to try after memory ran out on ``tokens`` tokens, or None if none is left to try."""
    used = min(chunk, tokens)
    if used <= LEAST_CHUNK:
        return None
    smaller = max(LEAST_CHUNK, used // 2)
    log.warning("out of memory with %d tokens; reading them in chunks of %d", tokens, smaller)
    return smaller


def out_of_memory(model: Any, tokens: int) -> RunFailure:
    """What to raise where one prompt is too much, read in the smallest chunks."""
    return RunFailure(
        f"out of memory on {model.device} with one prompt of {tokens} tokens, read in chunks of at most {LEAST_CHUNK}: "
        "choose shorter lengths, a dtype of fewer bits, or a device with more memory"
    )


log = logging.getLogger("ropewalk")


class InMemoryBackend:
    """Greedy answers of a model in memory, which depend on nothing but the prompt and the weights.

    A checkpoint's ``generation_config.json`` may ask for sampling, penalties or a maximal length; none of it
    applies. An answer ends with the tokenizer's EOS, or with another token that ``generation_config.json``
    names as an ending (Llama 3's chat models end a turn with ``<|eot_id|>``) and that the tokenizer has among
    its added tokens; an ordinary piece of text ends nothing.

    Prompts of one ``GenerationRequest.length`` share a batch, the longest lengths first. A RoPE that depends on the
    length is fixed by ``GenerationRequest.length``, padding is masked and positions count from each prompt's own first
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

    def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        """One answer a request, each as soon as its batch is done.

        Raises:
            RopewalkError: at once, if a prompt is empty, holds unknown tokens, or does not fit in its length.
            RunFailure: if the memory is too small for a single prompt, or the model's logits are no numbers.
        """
        for index, request in enumerate(requests):
            check_room(index, request)
            check_ids(self.model, request.input_ids)
        return self._answers(requests)

    def _answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        for group in grouped(requests):
            yield from self._answer_group(requests, group)

    def _answer_group(self, requests: Sequence[GenerationRequest], group: Sequence[int]) -> Iterator[Answer]:
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

    def _new_ids(self, asked: Sequence[GenerationRequest], chunk: int) -> list[list[int]]:
        rows = [request.input_ids for request in asked]
        return greedy_ids(self.model, rows, asked[0].max_new_tokens, asked[0].length, self.endings, chunk)

    def _answer(self, index: int, new_ids: list[int]) -> Answer:
        finished = new_ids[-1] in self.endings
        # The ending is cut here: not every tokenizer counts it among its special tokens.
        said = new_ids[:-1] if finished else new_ids
        text = self.tokenizer.decode(said, skip_special_tokens=True)
        return Answer(index, text, len(new_ids), finished)


def grouped(requests: Sequence[GenerationRequest]) -> list[list[int]]:
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


def check_room(index: int, request: GenerationRequest) -> None:
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
