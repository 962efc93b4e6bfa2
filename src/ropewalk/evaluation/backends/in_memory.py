"""Backend for a model in memory: greedy decoding with a key/value cache and chunked prefill.

It does not call ``generate`` of transformers: for Phi-3, ``generate`` drops the cache when a sequence exceeds the
original length, and it cannot fix a length-dependent RoPE.
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
from ropewalk.models.attention.kv_cache import cache_argument, keeps_all_tokens
from ropewalk.models.rope.generation import generating, unpinned_methods

LEAST_CHUNK = 256
"""Smallest chunk in tokens; smaller chunks would save almost no memory."""

LEAST_SHARED = 256
"""Fewest tokens that all prompts of a batch begin with for which these are read once."""

PREFILL_CHUNK = 8192

# Out of memory, PyTorch's CPU allocator and cuBLAS raise a plain RuntimeError that only its text tells apart.
_MEMORY_MESSAGES = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cublas_status_alloc_failed",
)

Result = TypeVar("Result")


def greedy_ids(
    model: Any,
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    length: int,
    endings: frozenset[int],
    chunk: int = PREFILL_CHUNK,
) -> list[list[int]]:
    """Generate greedily for a batch of prompts.

    Args:
        model: a transformers decoder.
        rows: prompts as token ids, of any lengths; shorter ones are padded on the left and masked. What all begin with
            is read once if every layer attends to everything, as of questions about the same text.
        max_new_tokens: maximum number of new tokens per prompt.
        length: tokens; a length-dependent RoPE is fixed at this length.
        endings: token ids that end an answer.
        chunk: prompt tokens per forward pass, over all rows.

    Returns:
        One list of new tokens per row, including the ending token if there is one.

    Raises:
        RunFailure: if logits are NaN.
    """
    # torch.isin needs a tensor; the dtype must be given because the set may be empty.
    ending = torch.tensor(sorted(endings), dtype=torch.long, device=model.device)
    with evaluating(model), generating(model, length), _fresh_cache(model) as cache:
        shared = _shared_tokens(rows) if keeps_all_tokens(cache) else 0
        ids, mask = _left_padded([row[shared:] for row in rows], model.device)
        if shared:
            first = torch.tensor([rows[0][:shared]], device=model.device)
            _prefilled(model, cache, first, torch.ones_like(first), chunk)
            cache.batch_repeat_interleave(len(rows))
            # Padding stands between the shared tokens and a row's own; it is masked there as well.
            first = first.expand(len(rows), -1)
            ids, mask = torch.cat([first, ids], dim=1), torch.cat([torch.ones_like(first), mask], dim=1)
        logits = _prefilled(model, cache, ids, mask, chunk, shared)
        # Prompts are padded on the left, so each row's next position is the number of its own tokens.
        position = mask.sum(dim=1, keepdim=True)
        going = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        new: list[Tensor] = []
        for step in range(max_new_tokens):
            new.append(_likeliest(logits))
            going &= ~torch.isin(new[-1], ending)
            # Rows that have ended continue with the batch; what they generate after the ending token is cut off below.
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
    """Check for each target token whether it is the most likely one after all tokens before it, without generation.

    All values are true exactly if greedy generation from ``input_ids[:start]`` gives the rest of ``input_ids``.

    Args:
        model: a transformers decoder.
        input_ids: token ids of prompt and target.
        start: index of the first target token, at least 1.
        length: tokens; a length-dependent RoPE is fixed at this length. None for the length of ``input_ids``.
        prefill_chunk: tokens per forward pass; halved when memory runs out.

    Returns:
        One boolean per target token.

    Raises:
        RopewalkError: if there is no target, or a setting is out of range.
        RunFailure: if memory runs out even with chunks of 256 tokens.
    """
    ids = list(input_ids)
    if not 1 <= start < len(ids):
        raise RopewalkError(
            f"the index of the first target token must be from 1 to {len(ids) - 1} in a row of {len(ids)} tokens, got "
            f"{start}"
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
    with evaluating(model), generating(model, length), _fresh_cache(model) as cache:
        # The last token before the targets belongs to the loop below, because its logits predict the first target.
        if start > 1:
            _prefilled(model, cache, row[:, : start - 1], mask[:, : start - 1], chunk)
        # Smaller chunks here: every target position needs logits over the whole vocabulary.
        width = min(chunk, LEAST_CHUNK)
        for first in range(start - 1, len(ids) - 1, width):
            end = min(first + width, len(ids) - 1)
            positions = torch.arange(first, end, device=row.device)[None]
            logits = _logits(model, cache, row[:, first:end], mask[:, :end], positions, keep=end - first)
            matches += (_likeliest(logits) == row[:, first + 1 : end + 1])[0].tolist()
    return matches


def _shared_tokens(rows: Sequence[Sequence[int]]) -> int:
    """Number of tokens that all rows begin with, fewer than any row has; 0 if reading them once saves little."""
    # Of sorted rows, the first and the last share least.
    low, *_, high = sorted(map(tuple, [*rows, rows[0]]))
    differs = (place for place, (a, b) in enumerate(zip(low, high, strict=False)) if a != b)
    shared = min(next(differs, len(low)), min(map(len, rows)) - 1)
    return shared if len(rows) > 1 and shared >= LEAST_SHARED else 0


def _prefilled(model: Any, cache: Any, ids: Tensor, mask: Tensor, chunk: int, done: int = 0) -> Tensor:
    """Fill the cache with ``ids [batch, length]`` from token ``done`` on; return the last position's logits."""
    # Positions count from each prompt's first real token, so left padding does not shift them.
    positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
    width = max(1, chunk // len(ids))
    for start in range(done, ids.shape[1], width):
        part = slice(start, start + width)
        seen = mask[:, : start + width]
        logits = _logits(model, cache, ids[:, part], seen, positions[:, part], keep=1)
    return logits[:, -1]


def _logits(model: Any, cache: Any, ids: Tensor, mask: Tensor, positions: Tensor, keep: int) -> Tensor:
    """Return the logits ``[batch, keep, vocabulary]`` of the last ``keep`` positions; ``mask`` covers the cache too."""
    output = model(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        **cache_argument(cache),
        use_cache=True,
        # Logits of a whole chunk over the vocabulary would take more memory than the rest of the pass.
        logits_to_keep=keep,
    )
    logits: Tensor = output.logits
    return logits


def _likeliest(logits: Tensor) -> Tensor:
    best, ids = logits.max(dim=-1)
    # torch.max returns NaN if there is one, and its index would be scored as a wrong answer.
    if bool(best.isnan().any()):
        raise RunFailure(
            f"the model's logits are NaN in {str(logits.dtype).removeprefix('torch.')}, so its answers would be "
            "meaningless; run the model in bfloat16 or float32"
        )
    return ids


def _left_padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return token ids and mask, ``[batch, longest]``; padding uses id 0, which is masked."""
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
        # The attention hook puts the cache into a reference cycle; free its keys now instead of at the next collection.
        cache.layers.clear()


def refuse_unpinned(model: Any) -> None:
    """Raise if a length-dependent RoPE runs in transformers' rotary module, which recomputes it in every call.

    Raises:
        RopewalkError: if the model has a length-dependent RoPE in transformers' rotary module.
    """
    dependent = unpinned_methods(model)
    if dependent:
        raise RopewalkError(
            f"{type(model).__name__} uses transformers' own RoPE of type {', '.join(dependent)}, whose angles would "
            "change between the chunks of a prompt; load the model with exact_rope=True (without --no-exact-rope)"
        )


def check_positive(name: str, value: int) -> None:
    """Raise RopewalkError unless a setting is 1 or more."""
    if value < 1:
        raise RopewalkError(f"{name} must be 1 or more, got {value}")


def check_ids(model: Any, ids: Sequence[int]) -> None:
    """Raise RopewalkError if a prompt is empty or has token ids outside the model's vocabulary."""
    if not ids:
        raise RopewalkError("a prompt has no tokens; it needs at least one")
    size = model.config.get_text_config().vocab_size
    if min(ids) < 0 or max(ids) >= size:
        strange = next(each for each in ids if not 0 <= each < size)
        raise RopewalkError(
            f"a prompt has the token id {strange}, but the model's vocabulary has ids 0 to {size - 1}; use the model's "
            "own tokenizer"
        )


def unless_out_of_memory(attempt: Callable[[], Result]) -> Result | None:
    """Return the result of an attempt, or free its memory and return None if memory ran out."""
    try:
        return attempt()
    # torch.OutOfMemoryError is a RuntimeError too.
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    # Collect only here, after the except block: the traceback kept the tensors of its frames alive.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether an error means that memory ran out; only accelerators raise a class of its own for this."""
    message = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError) or any(each in message for each in _MEMORY_MESSAGES)


def smaller_chunk(chunk: int, tokens: int) -> int | None:
    """Return the next chunk size to try after memory ran out on ``tokens`` tokens, or None if there is none."""
    # A chunk larger than the prompt was never filled, so halving it could repeat the pass that failed.
    used = min(chunk, tokens)
    if used <= LEAST_CHUNK:
        return None
    smaller = max(LEAST_CHUNK, used // 2)
    log.warning("out of memory with %d tokens; retrying in chunks of %d", tokens, smaller)
    return smaller


def out_of_memory(model: Any, tokens: int) -> RunFailure:
    """Return the error for a prompt that does not fit in memory even in the smallest chunks."""
    return RunFailure(
        f"out of memory on {model.device} with a single prompt of {tokens} tokens in chunks of {LEAST_CHUNK}; use "
        "shorter lengths, a dtype with fewer bits, or a device with more memory"
    )


log = logging.getLogger("ropewalk")


class InMemoryBackend:
    """Generates greedy answers with a model in memory; they depend only on the prompt and the weights.

    Sampling, penalties and length limits in a checkpoint's ``generation_config.json`` are ignored. An answer ends
    with the tokenizer's EOS, or with another ending token of ``generation_config.json`` if it is among the
    tokenizer's added tokens (Llama 3's chat models end a turn with ``<|eot_id|>``). Ordinary tokens never end an
    answer.

    Prompts with the same ``GenerationRequest.length`` share a batch; the longest lengths come first. Questions about
    the same text, whose prompts begin alike for half of the length, have batches of their own, which read it once. A
    length-dependent RoPE is fixed at ``GenerationRequest.length``, padding is masked, and positions count from each
    prompt's first token. So an answer is the same alone and in a batch, up to the rounding of the model's dtype.

    When memory runs out, the batch size is halved. For a single prompt, the prefill chunk is halved instead, down to
    256 tokens. The next length starts with the configured values again.

    Args:
        model: a transformers decoder from ``ropewalk.models.load.load_model``. Prompts may exceed the context of its
            config. Its training mode is restored after each batch.
        tokenizer: the model's tokenizer.
        batch_size: maximum number of prompts per batch.
        prefill_chunk: prompt tokens per forward pass, over all prompts of a batch. It bounds the memory for
            activations and masks, but not for keys and values.

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
        """Yield one answer per request, each as soon as its batch is done.

        Raises:
            RopewalkError: by the call itself, if a prompt is empty, has unknown token ids, or does not fit in its
                length.
            RunFailure: if memory runs out for a single prompt, or the model's logits are NaN.
        """
        # Here and not in the generator, whose body would run only when the first answer is asked for.
        for index, request in enumerate(requests):
            check_room(index, request)
            check_ids(self.model, request.input_ids)
        return self._answers(requests)

    def _answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
        for group in grouped(requests):
            yield from self._answer_group(requests, group)

    def _answer_group(self, requests: Sequence[GenerationRequest], group: Sequence[int]) -> Iterator[Answer]:
        """Answer requests of one length, with the largest batches that fit in memory."""
        rows, chunk, done = self.batch_size, self.prefill_chunk, 0
        while done < len(group):
            batch = group[done : done + rows]
            batch_requests = [requests[index] for index in batch]
            new = unless_out_of_memory(partial(self._new_ids, batch_requests, chunk))
            if new is not None:
                done += len(batch)
                yield from map(self._answer, batch, new)
            elif len(batch) > 1:
                # Answers do not depend on the batch, so halving it costs time only. The smaller size stays
                # for the group.
                rows = len(batch) // 2
                log.warning(
                    "out of memory with a batch of %d prompts of up to %d tokens; retrying with %d",
                    len(batch),
                    len(batch_requests[0].input_ids),
                    rows,
                )
            else:
                tokens = len(batch_requests[0].input_ids)
                smaller = smaller_chunk(chunk, tokens)
                if smaller is None:
                    raise out_of_memory(self.model, tokens)
                chunk = smaller

    def _new_ids(self, asked: Sequence[GenerationRequest], chunk: int) -> list[list[int]]:
        # All requests of a group have the same length and number of new tokens, so the first one's hold for all.
        rows = [request.input_ids for request in asked]
        return greedy_ids(self.model, rows, asked[0].max_new_tokens, asked[0].length, self.endings, chunk)

    def _answer(self, index: int, new_ids: list[int]) -> Answer:
        finished = new_ids[-1] in self.endings
        # Remove the ending token here, because not every tokenizer lists it among its special tokens.
        text_ids = new_ids[:-1] if finished else new_ids
        text = self.tokenizer.decode(text_ids, skip_special_tokens=True)
        return Answer(index, text, len(new_ids), finished)


def grouped(requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Group the indices of requests that can share a batch: those with equal ``length`` and ``max_new_tokens``.

    Of these, requests that begin alike for half of the length are a group of their own. Groups and their members are
    sorted from long to short: running out of memory shows at the beginning, and neighbours have similar lengths, which
    keeps padding small.
    """

    def size(index: int) -> tuple[int, int]:
        return requests[index].length, requests[index].max_new_tokens

    def text(index: int) -> tuple[int, ...]:
        request = requests[index]
        return tuple(request.input_ids[: request.length // 2])

    def order(index: int) -> tuple[int, int, int]:
        return *size(index), len(requests[index].input_ids)

    # groupby joins neighbours only, so equal sizes must stand together.
    ordered = sorted(range(len(requests)), key=order, reverse=True)
    found: list[list[int]] = []
    for _, group in groupby(ordered, key=size):
        texts: dict[tuple[int, ...], list[int]] = {}
        for index in group:
            texts.setdefault(text(index), []).append(index)
        alone = [indices[0] for indices in texts.values() if len(indices) == 1]
        found += [each for each in [*(t for t in texts.values() if len(t) > 1), alone] if each]
    return found


def check_room(index: int, request: GenerationRequest) -> None:
    """Raise RopewalkError unless ``max_new_tokens`` is positive and prompt and answer fit in the length."""
    if request.max_new_tokens < 1:
        raise RopewalkError(
            f"max_new_tokens of request {index} must be 1 or more, got {request.max_new_tokens}"
        )
    needed = len(request.input_ids) + request.max_new_tokens
    if needed > request.length:
        raise RopewalkError(
            f"request {index} has {len(request.input_ids)} prompt tokens and max_new_tokens {request.max_new_tokens}, "
            f"together {needed}, more than the request's length of {request.length}"
        )


def ending_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the token ids that end an answer; see :class:`InMemoryBackend`."""
    listed = getattr(model.generation_config, "eos_token_id", None)
    # A generation config may name one id, several or none.
    several = listed if isinstance(listed, (list, tuple)) else [listed]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return frozenset([*own, *(each for each in several if each in tokenizer.added_tokens_decoder)])
