"""A tiny checkpoint for tests of commands: one token a byte, random weights."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_byte_checkpoint(folder: Path, context: int, initializer_range: float = 0.02) -> Path:
    """Save a Llama of two layers that states ``context`` tokens, and its tokenizer."""
    alphabet = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE({character: number for number, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=context,
        initializer_range=initializer_range,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
