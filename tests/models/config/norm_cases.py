"""Where a tiny random model normalises, found by running it and by scaling its weights: no name of a norm is read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

SCALE = 8.0


def attention_of(model: Any) -> tuple[nn.Module, nn.Module]:
    """The first layer with attention of a decoder, and that attention."""
    for layers in (each for each in model.modules() if isinstance(each, nn.ModuleList)):
        for layer in layers:
            for name, child in layer.named_children():
                if ("attn" in name or "attention" in name) and projection_of(child) is not None:
                    return layer, child
    raise LookupError("no attention")


def projection_of(attention: nn.Module) -> nn.Linear | None:
    """The linear layer of the queries, alone or before keys and values."""
    names = ("q_proj", "qkv_proj", "query_key_value", "Wqkv", "qkv", "q_b_proj")
    return next((m for n, m in attention.named_modules() if n in names and isinstance(m, nn.Linear)), None)


def ran(model: Any, layer: nn.Module, attention: nn.Module) -> tuple[list[tuple[str, Any, Any]], Any]:
    """Calls of the layer's modules in order, as name, first tensor and result, and the attention's result."""
    calls: list[tuple[str, Any, Any]] = []

    def record(name: str) -> Any:
        def hook(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
            first = given[0] if given else named.get("hidden_states")
            calls.append((name, first, result[0] if isinstance(result, tuple) else result))

        return hook

    handles = [
        child.register_forward_hook(record("attention" if child is attention else name), with_kwargs=True)
        for name, child in layer.named_children()
        if not isinstance(child, nn.Dropout | nn.Identity)
    ]
    with torch.no_grad():
        model(input_ids=torch.arange(1, 12)[None] % 7 + 3, use_cache=False)
    for handle in handles:
        handle.remove()
    (found,) = (result for name, _, result in calls if name == "attention")
    return calls, found


def placement_of(model: Any) -> str:
    """``pre``, ``post`` or ``both``: whether attention reads what a norm wrote, and a norm what attention wrote."""
    layer, attention = attention_of(model)
    calls, wrote = ran(model, layer, attention)
    (read,) = (given for name, given, _ in calls if name == "attention")
    others = [(given, result) for name, given, result in calls if name != "attention"]
    before = any(result is read for _, result in others)
    after = any(given is wrote for given, _ in others)
    return {(True, False): "pre", (False, True): "post", (True, True): "both"}[before, after]


def qk_norm_of(model: Any, head_dim: int) -> str:
    """``head`` or ``layer`` if queries of another scale give the same attention, ``none`` if they do not.

    With a norm over all heads of a layer, the scale of a single head still counts.
    """
    layer, attention = attention_of(model)
    projection = projection_of(attention)
    assert projection is not None
    before = ran(model, layer, attention)[1]

    def scaled(rows: slice) -> bool:
        kept = {name: each.detach().clone() for name, each in projection.named_parameters()}
        with torch.no_grad():
            for each in projection.parameters():
                each[rows] *= SCALE
        after = ran(model, layer, attention)[1]
        with torch.no_grad():
            for name, each in projection.named_parameters():
                each.copy_(kept[name])
        return torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(before.abs().max()))

    # Below, the queries stand first also where keys and values follow.
    if scaled(slice(head_dim)):
        return "head"
    return "layer" if scaled(slice(model.config.get_text_config().num_attention_heads * head_dim)) else "none"
