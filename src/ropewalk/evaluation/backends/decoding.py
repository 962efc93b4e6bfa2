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
from typing import Any, TypeVar

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.running import evaluating
from ropewalk.models.generation import generating
from ropewalk.rope import RotaryEmbedding, methods_from_config

log = logging.getLogger("ropewalk")

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
    methods = methods_from_config(model.config.get_text_config().to_dict()).values()
    ours = any(isinstance(module, RotaryEmbedding) for module in model.modules())
    dependent = sorted({method.name for method in methods if method.length_dependent})
    if dependent and not ours:
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
