"""The rotary module of a loaded transformers model: found, exchanged for ours, and for another method's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.models.config import FULL, ModelConfig
from ropewalk.rope import METHODS, STYLES, Default, RopeMethod, RotaryEmbedding, RotaryRows

PROBE_POSITIONS = 64
PROBE_TOLERANCE = 1e-5
"""The stock module rounds angles of up to 63 rad to float32: 63 · 6e-8 = 4e-6, and cos/sin have slope 1."""


def teach_transformers() -> None:
    """Enter the methods that transformers does not know into its table of RoPE types.

    It then builds models whose config names them: in this process. Elsewhere such a config needs the same.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name, method in METHODS.items():
        if method.config_keys is not None and name != Default.name:
            ROPE_INIT_FUNCTIONS.setdefault(name, _frequencies_of_config)


def _frequencies_of_config(
    config: Any,
    device: torch.device | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[Tensor, float]:
    """What a transformers config says, as the functions in transformers' table give it."""
    methods = ModelConfig.of(config).methods
    method = methods[layer_type if layer_type in methods else None]
    inv_freq, attention_factor = method.frequencies(seq_len)
    return inv_freq.to(device, torch.float32), attention_factor


def rotary_module(model: nn.Module) -> tuple[nn.Module, str, nn.Module]:
    """The one rotary module of a model: (parent, attribute, module).

    Raises:
        RopewalkError: if there is none, or one a layer.
    """
    found = [
        (name, module)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("RotaryEmbedding")
    ]
    if len(found) != 1:
        raise RopewalkError(
            f"{type(model).__name__} has {len(found)} rotary modules where ropewalk expects one; load it with "
            "exact_rope=False"
        )
    name, module = found[0]
    parent, _, attribute = name.rpartition(".")
    return model.get_submodule(parent), attribute, module


def swap_rotary(model: nn.Module, methods: Mapping[str | None, RopeMethod]) -> None:
    """Replace the rotary module by ours, after checking that both say the same at the first positions.

    Raises:
        RopewalkError: if there is not one rotary module, or it does not compute what ``methods`` say.
    """
    parent, attribute, stock = rotary_module(model)
    # A config may name layer types that none of its layers has, and the stock module has nothing for those.
    kinds = {None, *(layer.kind for layer in ModelConfig.of(model.config).layers)}
    methods = {kind: method for kind, method in methods.items() if kind in kinds}
    # A config cannot say start tokens, so the stock module knows nothing of them: compare without.
    without = {kind: method.as_computed_by_transformers() for kind, method in methods.items()}
    for style in STYLES:
        worst = _probe(stock, RotaryEmbedding(without, style=style), methods)
        if worst <= PROBE_TOLERANCE:
            ours = RotaryEmbedding(dict(methods), style=style)
            ours.train(stock.training)
            setattr(parent, attribute, ours)
            return
    raise RopewalkError(
        f"the rotary module {type(stock).__name__} does not compute what the model's config says (cos/sin differ "
        f"by {worst:.1e}); load it with exact_rope=False"
    )


@contextmanager
def rope_of(model: nn.Module, method: RopeMethod) -> Iterator[None]:
    """Run a loaded model with another RoPE method while the context is open; weights and config stay.

    Raises:
        RopewalkError: if the model keeps transformers' own rotary module, has a method for each layer type, or
            rotates another number of dimensions than ``method`` does.
    """
    own = _exchangeable(model, [method])
    other = RotaryEmbedding(_in_its_place(own, method), style=own.style)
    other.total_length = own.total_length
    other.train(own.training)
    with _in_place_of_own(model, other):
        yield


@contextmanager
def rope_of_rows(model: nn.Module, methods: Sequence[RopeMethod], total_length: int) -> Iterator[None]:
    """Run a loaded model on batches each row of which has its own RoPE method while the context is open.

    Args:
        model: as for :func:`rope_of`.
        methods: one a row.
        total_length: tokens of every row, which decides for methods that depend on it.

    Raises:
        RopewalkError: as for :func:`rope_of`.
    """
    own = _exchangeable(model, methods)
    other = RotaryRows([_in_its_place(own, method) for method in methods], style=own.style)
    other.train(own.training)
    with _in_place_of_own(model, other), other.pinned(total_length):
        yield


def _exchangeable(model: nn.Module, methods: Sequence[RopeMethod]) -> RotaryEmbedding:
    """The model's own rotary module, if other methods may take its place."""
    own = rotary_module(model)[2]
    if not isinstance(own, RotaryEmbedding):
        raise RopewalkError(
            f"{type(model).__name__} runs transformers' own {type(own).__name__}, whose RoPE cannot be exchanged; "
            "load it with exact_rope=True"
        )
    rotary_dim = own.methods[_limiting_kind(own)].rotary_dim
    for method in methods:
        if method.rotary_dim != rotary_dim:
            raise RopewalkError(
                f"the method rotates {method.rotary_dim} dimensions and {type(model).__name__} {rotary_dim}; give a "
                "method with the model's rotary_dim"
            )
    return own


def _limiting_kind(own: RotaryEmbedding) -> str | None:
    """The layer type whose RoPE limits the context: full attention, where layer types have methods of their own."""
    return None if None in own.methods else FULL


def _in_its_place(own: RotaryEmbedding, method: RopeMethod) -> dict[str | None, RopeMethod]:
    """The methods of a model's layer types with another one for those that limit the context."""
    return {**own.methods, _limiting_kind(own): method}


@contextmanager
def _in_place_of_own(model: nn.Module, other: nn.Module) -> Iterator[None]:
    parent, attribute, own = rotary_module(model)
    setattr(parent, attribute, other)
    try:
        yield
    finally:
        setattr(parent, attribute, own)


def _probe(stock: nn.Module, ours: RotaryEmbedding, methods: Mapping[str | None, RopeMethod]) -> float:
    device = next((buffer.device for buffer in stock.buffers()), torch.device("cpu"))
    x = torch.zeros(1, PROBE_POSITIONS, 1, device=device)
    position_ids = torch.arange(PROBE_POSITIONS, device=device)[None]
    worst = 0.0
    for layer_type in methods:
        kind = {} if layer_type is None else {"layer_type": layer_type}
        with torch.no_grad():
            theirs = _parts(stock(x, position_ids, **kind))
            mine = _parts(ours(x, position_ids, **kind))
        if [part.shape for part in theirs] != [part.shape for part in mine]:
            return float("inf")
        worst = max(worst, *(float((a.float() - b).abs().max()) for a, b in zip(theirs, mine, strict=True)))
    return worst


def _parts(rotation: Any) -> tuple[Tensor, ...]:
    """cos and sin, or the two parts of a complex tensor; shapes tell the two apart."""
    if isinstance(rotation, Tensor):
        return (torch.view_as_real(rotation),) if rotation.is_complex() else (rotation,)
    return tuple(rotation)
