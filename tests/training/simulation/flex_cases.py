"""FlexAttention on the simulated device, and models that need it."""

import json

import torch

from ropewalk import PackedLayout, attend
from ropewalk.attention.options import PLAIN
from tests.training.simulation.recording_cases import recorded

HEADS, KV_HEADS, WIDTH = 32, 8, 128

_SHARED = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
}
MODELS = {
    "soft cap and windows": {
        **_SHARED,
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": 64,
    },
    "sinks and experts": {
        **_SHARED,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "sliding_window": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "latent attention": {
        **_SHARED,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "head_dim": 16,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
}
"""Configs whose attention no flash kernel computes: scores with a soft cap, sinks, values narrower than keys."""

SEEN = {
    # Heads, width of keys, width of values, window of each layer.
    "soft cap and windows": (4, 32, 32, (64, None)),
    "sinks and experts": (4, 32, 32, (64, None)),
    "latent attention": (4, 48, 32, (None, None)),
}


def model_of(path, name):
    """A folder with one of the configs."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODELS[name]))
    return path


def flex_memory(lengths, pattern="intra_document"):
    """Most bytes that attention and its gradients hold besides inputs and the output's gradient."""
    layout = PackedLayout.from_lengths(lengths, pattern, 0)
    most = 0

    def work(device):
        nonlocal most
        make = lambda heads: torch.empty(  # noqa: E731
            1, heads, sum(lengths), WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True
        )
        q, k, v = (make(heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
        torch.autograd.grad(attend(q, k, v, layout, "flex"), (q, k, v), torch.empty_like(q))

    held = sum(4 if heads == HEADS else 1 for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS))
    inputs = held * KV_HEADS * sum(lengths) * WIDTH * 2
    now = 0
    for event in recorded(work).events:
        now += 0 if event.allocation.host else event.change
        most = max(most, now)
    return most - inputs


def flex_operations(layouts, options=PLAIN):
    """Operations of the forward and of the backward for rows with heads of 16 dimensions and values of 24."""
    length = layouts[0].total_length

    def work(device):
        make = lambda heads, width: torch.empty(  # noqa: E731
            len(layouts), heads, length, width, dtype=torch.bfloat16, device=device, requires_grad=True
        )
        q, k, v = make(4, 16), make(2, 16), make(2, 24)
        out = attend(q, k, v, layouts, "flex", options)
        assert out.shape == (len(layouts), 4, length, 24)
        for grad, x in zip(torch.autograd.grad(out.sum(), (q, k, v)), (q, k, v), strict=True):
            assert grad.shape == x.shape

    return recorded(work).flops
