"""Random queries, keys and values for the tests of attention."""

import torch


def random_qkv(batch, heads, kv_heads, length, head_dim, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(heads):
        return torch.randn(batch, heads, length, head_dim, generator=generator).to(device, dtype)

    return normal(heads), normal(kv_heads), normal(kv_heads)
