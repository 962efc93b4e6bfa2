"""The matrix products that a model computes for each token, counted from its modules."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

EVERY_TOKEN = ("llama4_text",)
"""Model types whose experts each multiply every token, and the router's zeros drop most results."""


def layer_products(model: nn.Module) -> int | None:
    """Parameters that a token is multiplied with in the decoder: of linear maps, routers, and its own experts.

    Convolutions are no part of it, nor are the output head and what an adapter adds. Frozen matrices are.

    Args:
        model: a transformers model, which may be sharded and have an adapter.

    Returns:
        A number of parameters, each of which is one multiply-add of a token; None if a module has weights of an unknown
        kind, or the model has no list of all its layers.
    """
    text: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    head = model.get_output_embeddings()  # type: ignore[operator]
    # Maps beside the layers, such as Gemma 3n's of embeddings by layer, are in the same module; encoders are not.
    decoder = next((each for each in model.modules() if _has_layers(each, text.num_hidden_layers)), None)
    if decoder is None:
        return None
    found = 0
    for name, module in decoder.named_modules():
        if module is head or "lora_" in name or isinstance(module, nn.Embedding | nn.Conv1d):
            continue
        if isinstance(module, nn.Linear):
            # Not those of its weight, which packs several numbers into one if it is quantized.
            found += module.in_features * module.out_features
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if key.endswith("bias") or parameter.numel() == max(parameter.shape, default=1):
                continue
            number = _multiplied(decoder, name, module, parameter.shape, text)
            if number is None:
                return None
            found += number
    return found


def _has_layers(module: nn.Module, number: int) -> bool:
    return any(isinstance(each, nn.ModuleList) and len(each) == number for each in module.children())


def _multiplied(
    decoder: nn.Module, name: str, module: nn.Module, shape: tuple[int, ...], text: Any
) -> int | None:
    """Numbers of a weight that one token is multiplied with; None if the weight's kind is not known."""
    kind = type(module).__name__
    if len(shape) == 2 and kind.endswith("Router"):
        return math.prod(shape)
    if len(shape) != 3 or not kind.endswith("Experts"):
        return None
    if text.model_type in EVERY_TOKEN:
        return math.prod(shape)
    block: Any = decoder.get_submodule(name.rpartition(".")[0])
    # Depending on the class, the number is in the block, in its router, or in the config alone (Gemma 4).
    places = ((block, "top_k"), *((each, "top_k") for each in block.children()), (text, "top_k_experts"))
    chosen = next((getattr(owner, key) for owner, key in places if hasattr(owner, key)), None)
    return None if chosen is None else math.prod(shape[1:]) * int(chosen)
