"""Greedy generation that depends on nothing but the prompt and the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ropewalk.rope import RotaryEmbedding


def generate_greedily(model: Any, tokenizer: Any, input_ids: Sequence[int], max_new_tokens: int) -> list[int]:
    """The token ids that a model adds to a prompt, each the likeliest.

    A checkpoint's ``generation_config.json`` may ask for sampling, penalties or a maximal length; none of it
    applies here. A RoPE that depends on the length is fixed for prompt and answer together, so that cached
    keys and later queries are rotated alike.

    Args:
        model: a transformers model, in evaluation mode.
        tokenizer: names the token that ends the answer.
        input_ids: the prompt, BOS included.
        max_new_tokens: most tokens of the answer.

    Returns:
        The new tokens alone, the ending token included where it came.
    """
    from transformers import GenerationConfig

    eos = tokenizer.eos_token_id
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=max_new_tokens,
        use_cache=True,
        eos_token_id=eos,
        # Nothing is padded in a batch of one; transformers asks for it all the same.
        pad_token_id=0 if eos is None else eos,
    )
    ids = torch.tensor([list(input_ids)], device=model.device)
    with torch.no_grad(), _without_own_settings(model), _pinned(model, len(input_ids) + max_new_tokens):
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config)
    new_ids: list[int] = output[0, len(input_ids) :].tolist()
    return new_ids


@contextmanager
def _without_own_settings(model: Any) -> Iterator[None]:
    """transformers fills every setting that we leave open from the model's own; so it gets an empty one."""
    from transformers import GenerationConfig

    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def _pinned(model: Any, total_length: int) -> Iterator[None]:
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                stack.enter_context(module.pinned(total_length))
        yield
