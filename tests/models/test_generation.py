"""A cache that an attached model filled is freed with the last reference to it, and can be copied."""

import copy
import gc
import weakref

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ropewalk.models.load import attach


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
        model(torch.tensor([[1, 2, 3]]), past_key_values=prompt, use_cache=True)
        copied = copy.deepcopy(prompt)
        model(torch.tensor([[4, 5]]), past_key_values=copied, use_cache=True)
    assert (prompt.get_seq_length(), copied.get_seq_length()) == (3, 5)
    assert torch.equal(copied.layers[0].keys[..., :3, :], prompt.layers[0].keys)


def test_cache_is_freed_without_the_garbage_collector() -> None:
    model = tiny_model()
    cache = DynamicCache(config=model.config)
    gc.collect()
    gc.disable()
    try:
        with torch.no_grad():
            model(torch.tensor([[1, 2, 3]]), past_key_values=cache, use_cache=True)
        assert cache.get_seq_length() == 3
        assert cache.layers[0].keys.dtype == cache.layers[0].values.dtype
        gone = weakref.ref(cache)
        del cache
        assert gone() is None
    finally:
        gc.enable()
