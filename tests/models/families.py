"""Tiny random models of the decoder families that ropewalk serves."""

from typing import Any

import torch
import transformers

from tests.versions import missing

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

WINDOW = 7
"""Tokens of the windows and chunks below: shorter than the documents of the tests."""

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
"""Multi-head latent attention, whose values are narrower than its keys."""

GEMMA_4: dict[str, Any] = {
    "pad_token_id": 0,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
"""Heads of another width in layers with full attention, and embeddings for each layer."""

ATTENTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("MistralConfig", {"sliding_window": WINDOW}),
    "mixtral": ("MixtralConfig", {"sliding_window": WINDOW, "num_local_experts": 4}),
    "ministral": ("MinistralConfig", {"sliding_window": WINDOW, "head_dim": 8}),
    "ministral3": (
        "Ministral3Config",
        {
            "head_dim": 8,
            "rope_parameters": {
                "type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16,
                "max_position_embeddings": 256,
                "beta_fast": 2.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
    ),
    "qwen2": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3": (
        "Qwen3Config",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "head_dim": 16},
    ),
    "phi3": ("Phi3Config", {"sliding_window": WINDOW}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": WINDOW}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 4},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "vocab_size_per_layer_input": 97,
            "hidden_size_per_layer_input": 8,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
            "num_kv_shared_layers": 0,
            "num_hidden_layers": 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [48] * 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma4": ("Gemma4TextConfig", GEMMA_4),
    "gemma4 with shared keys": (
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 3,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4 with experts": (
        "Gemma4TextConfig",
        {
            **GEMMA_4,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 16,
            "final_logit_softcapping": 30.0,
        },
    ),
    "olmo3": ("Olmo3Config", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "cohere2": (
        "Cohere2Config",
        {"sliding_window": WINDOW, "num_hidden_layers": 4, "logit_scale": 0.25},
    ),
    "exaone4": (
        "Exaone4Config",
        {"sliding_window": WINDOW, "sliding_window_pattern": 4, "num_hidden_layers": 4},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {"sliding_window": WINDOW, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granite_swa": ("GraniteSWAConfig", {"sliding_window": WINDOW, "num_hidden_layers": 4}),
    "deepseek_v2": ("DeepseekV2Config", {**LATENT, "topk_method": "greedy"}),
    "deepseek_v3": ("DeepseekV3Config", LATENT),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", LATENT),
    "llama4": (
        "Llama4TextConfig",
        {
            "head_dim": 8,
            "attention_chunk_size": WINDOW,
            "num_local_experts": 4,
            "intermediate_size_mlp": 48,
            "num_hidden_layers": 4,
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "attn_scale": 0.3,
        },
    ),
}
"""Families whose attention is more than Llama's: windows and chunks, sinks, soft caps, layers without RoPE, latent
attention with values of another width."""
LOCAL = [name for name, (_, extra) in ATTENTIONS.items() if WINDOW in extra.values()]
"""Those of them whose layers see a window or a chunk of their run."""


RECURRENT = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
"""Gated DeltaNet."""
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "num_hidden_layers": 4,
}
"""Mamba-2, in chunks shorter than documents."""

KIMI: dict[str, Any] = {
    "layer_types": RECURRENT,
    "num_hidden_layers": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
}
"""Kimi's delta rule, and latent attention."""

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            **KIMI,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_token": 2,
            "num_expert_group": 1,
            "topk_group": 1,
        },
    ),
    "lara_mini": (
        "LaraMiniConfig",
        {
            **DELTA,
            **EXPERTS,
            "shared_expert_intermediate_size": 16,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16, "head_dim": 16, "layer_types": RECURRENT},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", {**DELTA, "head_dim": 16, "layer_types": RECURRENT}),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 16, "head_dim": 16, "layer_types": RECURRENT},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", {**DELTA, "linear_num_value_heads": 2, "layer_types": RECURRENT}),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {**EXPERTS, "layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4},
    ),
    "lfm3": (
        "Lfm3Config",
        {
            "head_dim": 8,
            "sliding_window": WINDOW,
            "num_hidden_layers": 5,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **MAMBA,
            "layer_types": RECURRENT,
            "position_embedding_type": "rope",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 16,
        },
    ),
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1Config", {**MAMBA, "mamba_d_ssm": 64}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
            "num_hidden_layers": 5,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "chunk_size": 8,
            "head_dim": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "moe_shared_expert_intermediate_size": 16,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "minimax": (
        "MiniMaxConfig",
        {
            "head_dim": 8,
            "block_size": 8,
            "num_local_experts": 4,
            "layer_types": RECURRENT,
            "num_hidden_layers": 4,
        },
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **KIMI,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "model_max_length": 256,
        },
    ),
}
"""Families of attention and recurrent layers: gated delta rules, Mamba-2, lightning attention, short convolutions."""


SHALLOW: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_hidden_layers": 2},
    "gemma3": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4 with shared keys": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4 with experts": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {"num_hidden_layers": 2},
    "llama4": {"num_hidden_layers": 2, "no_rope_layers": [1, 0]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}
"""One layer of each kind that a family has: for what computes a whole model many times."""


def tiny_model(
    family: str, dtype: torch.dtype = torch.float32, sharp: bool = False, shallow: bool = False
) -> Any:
    """A random model of a family on the CPU, in evaluation mode, with transformers' eager attention.

    Args:
        family: a key of ``FAMILIES``, or of ``ATTENTIONS`` or ``HYBRIDS`` for a sharp one.
        dtype: of its parameters.
        sharp: with weights so large that what attention sees matters.
        shallow: with no more layers than it has kinds of them, of families in ``SHALLOW``.
    """
    name, extra = ({**ATTENTIONS, **HYBRIDS} if sharp else FAMILIES)[family]
    config_class = getattr(transformers, name, None) or missing(name)
    wanted = {**COMMON, **extra, **(SHALLOW.get(family, {}) if shallow else {})}
    config = config_class(**wanted)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if sharp:
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 or parameter_name.endswith("sinks"):
                torch.nn.init.normal_(parameter, std=0.3)
        if dtype == torch.float64:
            # Grouped products of experts have no float64.
            model.set_experts_implementation("eager")
    return model.to(dtype).eval()
