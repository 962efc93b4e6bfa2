"""A cache that an attached model filled is freed with the last reference to it, and can be copied."""

import copy
import gc
import weakref

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ropewalk import RopewalkError
from ropewalk.models.attention.kv_cache import cache_argument, cache_of
from ropewalk.models.load import attach, cast_parameters


def tiny_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    model = LlamaForCausalLM(config).eval()
    attach(model)
    return model


def test_a_deep_copy_of_a_cache_is_filled_by_itself() -> None:
    model = tiny_model()
    prompt = DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.tensor([[1, 2, 3]]), **cache_argument(prompt), use_cache=True)
        copied = copy.deepcopy(prompt)
        model(torch.tensor([[4, 5]]), **cache_argument(copied), use_cache=True)
    assert (prompt.get_seq_length(), copied.get_seq_length()) == (3, 5)
    assert torch.equal(copied.layers[0].keys[..., :3, :], prompt.layers[0].keys)


def test_a_cache_stores_keys_in_the_dtype_of_its_values() -> None:
    """The exact rotation gives float32; a copy of the cache and a cache that is passed again store bfloat16 too."""
    model = tiny_model()
    cast_parameters(model, torch.bfloat16)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        for ids in ([[1, 2, 3]], [[4]]):
            model(torch.tensor(ids), **cache_argument(cache), use_cache=True)
        copied = copy.deepcopy(cache)
        model(torch.tensor([[5]]), **cache_argument(copied), use_cache=True)
    assert [(each.layers[0].keys.dtype, each.get_seq_length()) for each in (cache, copied)] == [
        (torch.bfloat16, 4),
        (torch.bfloat16, 5),
    ]


def test_cache_is_freed_without_the_garbage_collector() -> None:
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]), **cache_argument(cache), use_cache=True)
        assert cache.get_seq_length() == 3
        assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype
        gone = weakref.ref(cache)
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_a_token_in_the_middle_without_what_came_before_it_is_refused() -> None:
    """What Phi-3 of transformers before 5.20 asks for in ``generate``, beside what others ask for."""
    model, token = tiny_model(), torch.tensor([[4]])
    with torch.no_grad():
        cache = cache_of(model(token, position_ids=torch.tensor([[0]]), use_cache=True))
        model(token, position_ids=torch.tensor([[1]]), **cache_argument(cache), use_cache=True)
        model(token, position_ids=torch.tensor([[20]]), use_cache=False)
        model(torch.tensor([[4, 5]]), position_ids=torch.tensor([[20, 21]]), use_cache=True)
        with pytest.raises(
            RopewalkError,
            match="only the token at position 20, and the cache of the earlier tokens is missing",
        ):
            model(token, position_ids=torch.tensor([[20]]), use_cache=True)
