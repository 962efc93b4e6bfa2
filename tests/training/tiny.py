"""Tiny random checkpoints whose tokenizer knows a few words."""

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ("tar", "hemp", "yarn", "strand", "twist", "walk", "rope", "lay", "hook", "post", "fid", "cord")


INDEXED = {
    "model_type": "deepseek_v32",
    "architectures": ["DeepseekV32ForCausalLM"],
    "num_key_value_heads": 2,
    "num_attention_heads": 2,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 32,
    "index_head_dim": 8,
    "index_topk": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
"""Keys of a config of sparse attention with indexers."""


def save_tokenizer(folder, bos="<s>", eos="</s>"):
    """A word-level tokenizer, with or without its special tokens."""
    special = [token for token in (bos, eos) if token]
    vocabulary = {token: i for i, token in enumerate([*special, "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, unk_token="<unk>"
    )
    wrapped.save_pretrained(folder)


def save_tiny(folder, kind="Llama", **own):
    """A random decoder of 32 tokens' context with a vocabulary of 16 words.

    Args:
        folder: to write to.
        kind: the name of its config's class in transformers, without ``Config``.
        own: keys of its config in place of these, or beside them.
    """
    shape = {
        "vocab_size": 16,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 32,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config = getattr(transformers, f"{kind}Config")(**{**shape, **own})
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder
