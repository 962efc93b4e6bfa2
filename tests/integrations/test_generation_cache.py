"""A cache that an attached model filled is freed with the last reference to it."""

import gc
import weakref

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ropewalk.integrations.models import attach


def test_cache_is_freed_without_the_garbage_collector() -> None:
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
    cache = DynamicCache(config=config)
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
