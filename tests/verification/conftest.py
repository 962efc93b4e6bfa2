"""A case that every check passes, small enough to run all of them in seconds."""

import pytest
import torch
import transformers

from ropewalk.attention import AttentionSpec
from ropewalk.attention.layout import PackedLayout, Row, next_token_labels
from ropewalk.models.load import ModelSetup
from ropewalk.rope import Default
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.verification import Case

VOCABULARY = 61
LENGTH = 48
CONTEXT = 256


@pytest.fixture(scope="session")
def case(tmp_path_factory):
    """A tiny Llama with tied embeddings, its base raised for a longer context, and rows of a few documents."""
    return made(tmp_path_factory)


@pytest.fixture(scope="session")
def shallow_case(tmp_path_factory):
    """The same of one layer, which is all that the known faults need."""
    return made(tmp_path_factory, num_hidden_layers=1)


@pytest.fixture(scope="session")
def sharp_case(tmp_path_factory):
    """One layer with scores as large as those of a trained model, about 30."""

    def sharpen(model):
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.data.mul_(8)

    return made(tmp_path_factory, sharpen, num_hidden_layers=1)


@pytest.fixture(scope="session")
def granite_case(tmp_path_factory):
    """One layer of Granite, whose config gives the multiplier of the scores."""
    model = (transformers.GraniteConfig, transformers.GraniteForCausalLM)
    return made(tmp_path_factory, model=model, attention_multiplier=0.9, num_hidden_layers=1)


def made(
    tmp_path_factory,
    change=lambda model: None,
    model=(transformers.LlamaConfig, transformers.LlamaForCausalLM),
    **options,
):
    folder = tmp_path_factory.mktemp("verified") / "llama"
    config = model[0](
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            **options,
        }
    )
    torch.manual_seed(0)
    network = model[1](config)
    change(network)
    network.save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    rows = []
    for lengths in ([20, 15, 12], [5, 30, 12], [40, 7], [11, 12, 13, 11]):
        layout = PackedLayout.from_lengths(lengths, "anchor")
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        rows.append(Row(ids, next_token_labels(ids, layout), layout))
    return Case(
        model=str(folder),
        setup=ModelSetup(Default(8, 80000.0), CONTEXT),
        rows=tuple(rows),
        trained=(torch.ones(LENGTH, dtype=torch.bool),) * len(rows),
        num_heads=4,
        attention=AttentionSpec("cpu", torch.float32, 8),
        seed=0,
        optimizer=Optimizer(),
        precision="float32",
        rows_per_batch=2,
        gradient_checkpointing=False,
        offload_activations=False,
        keeping=None,
        tiled_mlp=None,
        offload_optimizer=False,
        compiled=False,
        scratch=str(tmp_path_factory.mktemp("scratch")),
    )
