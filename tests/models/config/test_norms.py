"""Where a family normalises is what its code does: tiny models are run, and their weights scaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModel

from ropewalk.models.config.model import ModelConfig
from ropewalk.models.config.norms import (
    BOTH_NORMS,
    POST_NORM,
    PRE_NORM,
    QK_NORM_OF_HEADS,
    QK_NORM_OF_LAYERS,
    Norms,
    norms_of,
)
from tests.models.config.norm_cases import placement_of, qk_norm_of
from tests.models.every_family import tiny_config

COMMON = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "glm4", "olmo2", "olmo3", "olmoe",
    "exaone4", "gpt_oss", "deepseek_v3")  # fmt: skip
KNOWN = (*PRE_NORM, *POST_NORM, *BOTH_NORMS)
WHOLE = {"glm4v_moe_text": "glm4v_moe", "glm4v_text": "glm4v", "mistral_large4_text": "mistral_large4",
    "step3p5": "step3p7"}  # fmt: skip
"""Types of decoders that are only part of another family."""


def observed(family: str, **changes: Any) -> tuple[ModelConfig, Norms]:
    config = tiny_config(family)
    for key, value in changes.items():
        setattr(config.get_text_config(), key, value)
    torch.manual_seed(0)
    model = AutoModel.from_config(config, attn_implementation="eager").float().eval()
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    decoder = model if decoder is None else decoder
    for weight in decoder.parameters():
        if weight.dim() == 2:
            # Larger than at the start of a training, so that a norm of queries changes attention visibly.
            torch.nn.init.normal_(weight, std=0.3)
    read = ModelConfig.of(config)
    return read, Norms(placement_of(decoder), qk_norm_of(decoder, read.key_dim))


@pytest.mark.parametrize("family", COMMON)
def test_norms_are_where_the_model_has_them(family: str) -> None:
    read, expected = observed(family)
    assert norms_of(read.values) == expected


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_family_that_is_named_is_right() -> None:
    read = {kind: observed(WHOLE.get(kind, kind)) for kind in KNOWN}
    assert {kind: config.model_type for kind, (config, _) in read.items()} == {kind: kind for kind in KNOWN}
    wrong = {kind: found for kind, (config, found) in read.items() if norms_of(config.values) != found}
    assert not wrong


@pytest.mark.parametrize(
    ("family", "switch"),
    [
        ("cohere", "use_qk_norm"),
        ("glm4_moe", "use_qk_norm"),
        ("phi", "qk_layernorm"),
        ("stablelm", "qk_layernorm"),
    ],
)
@pytest.mark.parametrize("on", [True, False])
def test_switches_turn_the_norm_of_queries_on_and_off(family: str, switch: str, on: bool) -> None:
    read, expected = observed(family, **{switch: on})
    assert norms_of(read.values) == expected == Norms("pre", "head" if on else "none")


def test_hyperclova_can_do_without_its_norm_after_attention() -> None:
    read, expected = observed("hyperclovax", use_post_norm=False)
    assert norms_of(read.values) == expected == Norms("pre", "none")


def test_a_type_that_was_not_examined_is_unknown() -> None:
    assert norms_of({"model_type": "olmo_hybrid"}) is None
    assert norms_of({}) is None


def test_every_type_is_named_once_and_those_with_a_norm_of_queries_among_them() -> None:
    assert len(set(KNOWN)) == len(KNOWN)
    assert not set(QK_NORM_OF_HEADS) & set(QK_NORM_OF_LAYERS)
    assert {*QK_NORM_OF_HEADS, *QK_NORM_OF_LAYERS} <= set(KNOWN)
