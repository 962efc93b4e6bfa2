"""Tiny models of several families, and rows for them, on which mitigations run."""

import torch
import transformers

from ropewalk.models.attention.mitigated import attending, exact_rotary, mitigated
from ropewalk.models.losses import decoder_of
from tests.models.families import LATENT as LATENT_WIDTHS

LENGTH = 96

# Weights so large that scores spread over several units: a scale or a mask that is wrong would show.
COMMON = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "attn_implementation": "sdpa",
    "pad_token_id": None,
}
# Latent attention calls the rotated part of a head its head_dim. All experts at once: which ones a token takes would
# otherwise turn on a rounding.
LATENT = {**LATENT_WIDTHS, "head_dim": LATENT_WIDTHS["qk_rope_head_dim"], "num_experts_per_tok": 4}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 20}),
    "gemma2": (
        transformers.Gemma2Config,
        {"sliding_window": 128, "attn_implementation": "eager", "query_pre_attn_scalar": 8},
    ),
    "cohere": (transformers.CohereConfig, {"bos_token_id": 0, "eos_token_id": 1}),
    "deepseek_v2": (transformers.DeepseekV2Config, {**LATENT, "topk_method": "greedy"}),
    "deepseek_v3": (transformers.DeepseekV3Config, LATENT),
}


def tiny(family):
    torch.manual_seed(0)
    config_class, more = FAMILIES[family]
    values = {**COMMON, **more}
    implementation = values.pop("attn_implementation")
    config = config_class(**values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
    return model.eval()


def row(length=LENGTH):
    return torch.randint(2, 64, (length,), generator=torch.Generator().manual_seed(1))


def rms(x):
    return float(x.double().square().mean().sqrt())


def hidden(model, name, ids):
    context = (
        attending(model, "sdpa") if name == "fused attention" else mitigated(model, name, exact_rotary(model))
    )
    with context, torch.no_grad():
        return decoder_of(model)(ids[None], use_cache=False).last_hidden_state[0]
