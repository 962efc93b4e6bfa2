"""Models and rows for the audit's tests."""

import json
from functools import cache
from itertools import chain, islice
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from ropewalk.audit import Runner, measure_drift, stock_arithmetic
from ropewalk.audit.arithmetic import multiplied, operands
from ropewalk.audit.drift import DriftFindings
from ropewalk.audit.passes import longest
from tests.places import SHARED

STORIES = SHARED / "models" / "stories260k"


SHARP = 6.0
"""Factor on the query weights of a random model: attention as peaked as training makes it."""


def sharp_llama(**options: Any) -> Any:
    """A tiny random Llama with grouped heads whose attention is peaked, so that arithmetic shows."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            **options,
        }
    )
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= SHARP / config.initializer_range / 10
        layer.self_attn.k_proj.weight.data *= SHARP / config.initializer_range / 10
    return model


def token_rows(count: int, length: int, vocabulary: int = 97) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return list(torch.randint(3, vocabulary, (count, length), generator=generator))


@cache
def stories() -> tuple[Any, list[Tensor]]:
    """The real pretrained checkpoint and rows of 512 tokens of its stories, BOS before each; skips without them."""
    if not STORIES.is_dir():
        pytest.skip("the reference checkpoint is not on this machine")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        STORIES, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(STORIES)
    with (SHARED / "text" / "stories.jsonl").open() as lines:
        texts = [json.loads(line)["text"] for line in islice(lines, 40)]
    ids = chain.from_iterable(
        [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]] for text in texts
    )
    return model, list(torch.tensor(list(islice(ids, 8 * 512))).view(8, 512))


def dense_attention(model: Any, row: Tensor, shift: int) -> Tensor:
    """``[layers, heads, length, length]``: transformers' own attention weights, in float64."""
    position_ids = torch.arange(shift, shift + len(row))[None]
    with torch.no_grad():
        output = model(row[None], position_ids=position_ids, output_attentions=True, use_cache=False)
    return torch.stack(output.attentions)[:, 0].double()


def dense_received(model: Any, row: Tensor, shift: int) -> Tensor:
    """``[layers, heads, length]``: transformers' own attention weights summed over queries, in float64."""
    return dense_attention(model, row, shift).sum(-2)


def drift_of_model(
    audited_model: Any, rows: Any, series: Any, shifts: Any, delta2: int = 16
) -> DriftFindings:
    """The drift measured by a runner whose sequence is as long as the furthest row needs."""
    length = len(rows[0]) if rows else 1
    return measure_drift(
        Runner(audited_model, longest([*shifts, delta2], length)), rows, series, shifts, delta2
    )


FAR = 1_000_000
LENGTH = 64


FLOAT64_FLOOR = 1e-7
"""Float64 angles at a million are off by 1e6 · 1e-16 = 1e-10 rad; times 64 queries, and scores of ten."""


LOW = stock_arithmetic(torch.bfloat16)


def changed(settings, **values):
    return settings.model_copy(update=values)


def inner_products(query, key, product):
    """``query @ key^T`` with operands rounded to the format ``product``."""
    return multiplied(operands(query, product), operands(key, product))
