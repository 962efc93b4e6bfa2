"""A case that every check passes, small enough to run all of them in seconds."""

import pytest
import torch
import transformers

from ropewalk.packing import PackedLayout, Row, next_token_labels
from ropewalk.rope import Default
from ropewalk.training.recipe import Optimizer
from ropewalk.verification import Case

VOCABULARY = 61
LENGTH = 48
CONTEXT = 256


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    """A tiny Llama with tied embeddings, its base raised for a longer context, and rows of a few documents."""
    folder = tmp_path_factory.mktemp("verified") / "llama"
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for lengths in ([20, 15, 12], [5, 30, 12], [40, 7], [11, 12, 13, 11]):
        layout = PackedLayout.from_lengths(lengths, "anchor")
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        rows.append(Row(ids, next_token_labels(ids, layout), layout))
    return Case(
        model=str(folder),
        rope=Default(8, 80000.0),
        context=CONTEXT,
        rows=tuple(rows),
        trained=(torch.ones(LENGTH, dtype=torch.bool),) * len(rows),
        num_heads=4,
        head_dim=8,
        softcap=None,
        engine="auto",
        exact_rope=True,
        trust_remote_code=False,
        seed=0,
        optimizer=Optimizer(),
        precision="float32",
        device="cpu",
        scratch=str(tmp_path_factory.mktemp("scratch")),
    )
