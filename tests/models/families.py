"""Tiny random models of the decoder families that ropewalk serves."""

from typing import Any

import torch
import transformers

COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "phi3": ("Phi3Config", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 128, "query_pre_attn_scalar": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": 128, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    ),
    "olmo2": ("Olmo2Config", {}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4}),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "attention_multiplier": 0.3}),
    "cohere2": ("Cohere2Config", {"sliding_window": 128, "num_hidden_layers": 4, "logit_scale": 0.25}),
    "glm4": ("Glm4Config", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": None}),
    "phi": ("PhiConfig", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
}


def tiny_model(family: str, dtype: torch.dtype = torch.float32) -> Any:
    """A random model of a family on the CPU, in evaluation mode, with transformers' eager attention."""
    name, extra = FAMILIES[family]
    config_class = getattr(transformers, name)
    wanted = {**COMMON, **extra}
    config = config_class(**wanted)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return model.to(dtype).eval()
