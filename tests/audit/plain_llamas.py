"""Small Llamas for whole passes, and the drift between two of them."""

import torch
import transformers

from ropewalk.audit.differences import differences
from ropewalk.audit.passes import shifted

LENGTH = 48
UNIT = 2.0**-53
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # So large that attention is peaked, as training makes it: scores spread over several units.
    "initializer_range": 0.3,
}


def tiny(config_class="LlamaConfig", **more):
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**COMMON, **more})
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def row(length=LENGTH):
    return torch.randint(3, 97, (length,), generator=torch.Generator().manual_seed(1))


def drift(runner, arithmetic, first, second, ids=None):
    ids = row() if ids is None else ids
    a, b = (
        runner.run(ids, arithmetic, shifted(len(ids), shift), keep=("hidden", "layers"))
        for shift in (first, second)
    )
    return differences(runner, {0: ((1, a), (-1, b))})[0].D
