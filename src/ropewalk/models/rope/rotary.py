"""Find the rotary module of a loaded transformers model, and replace it by ours or by one with another method."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.models.config.layers import FULL
from ropewalk.models.config.model import ModelConfig
from ropewalk.rope import METHODS, STYLES, Default, RopeMethod, RotaryEmbedding, RotaryRows

PROBE_POSITIONS = 64
PROBE_TOLERANCE = 1e-5
"""Rounding in the stock module: angles of up to 63 rad are float32 (63 · 6e-8 = 4e-6); cos/sin have slope 1."""


def teach_transformers() -> None:
    """Add the methods that transformers lacks to its table of RoPE types.

    In this process it can then build models whose config names them. Other processes need the same call.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for name, method in METHODS.items():
        if method.config_keys is not None and name != Default.name:
            # A method that transformers has itself keeps its function.
            ROPE_INIT_FUNCTIONS.setdefault(name, _frequencies_of_config)


def _frequencies_of_config(
    config: Any,
    device: torch.device | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[Tensor, float]:
    """The frequencies of a transformers config, in the form that functions in transformers' table return."""
    methods = ModelConfig.of(config).methods
    method = methods[layer_type if layer_type in methods else None]
    inv_freq, attention_factor = method.frequencies(seq_len)
    return inv_freq.to(device, torch.float32), attention_factor


def rotary_module(model: Any) -> tuple[nn.Module, str, nn.Module]:
    """The only rotary module of a model, or of its decoder beside encoders: (parent, attribute, module).

    Raises:
        RopewalkError: if there is none, or one in each layer.
    """
    found = rotary_modules(model)
    if len(found) > 1 and hasattr(model, "get_decoder"):
        # Gemma 4's encoder of images has one too.
        inside = {id(module) for *_, module in rotary_modules(model.get_decoder())}
        found = [each for each in found if id(each[-1]) in inside]
    if len(found) != 1:
        raise RopewalkError(
            f"{type(model).__name__} has {len(found)} rotary modules, but ropewalk can replace only one; keep "
            "transformers' own RoPE with exact_rope=False (--no-exact-rope)"
        )
    return found[0]


def rotary_modules(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """All rotary modules of a model, each as (parent, attribute, module)."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, RotaryRows) or type(module).__name__.endswith("RotaryEmbedding"):
            parent, _, attribute = name.rpartition(".")
            found.append((model.get_submodule(parent), attribute, module))
    return found


def positions_for(rotary: nn.Module, position_ids: Tensor) -> Tensor:
    """Positions ``[length]`` of a text in the shape that a rotary module takes: ``[1, length]``, or also with axes.

    Qwen3.5's has axes for time, height and width, and before transformers 5.19 it takes no positions without them.
    """
    return position_ids.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else position_ids[None]


def swap_rotary(model: nn.Module, methods: Mapping[str | None, RopeMethod]) -> None:
    """Replace the rotary module by ours, after checking that both agree at the first positions.

    Raises:
        RopewalkError: if there is not exactly one rotary module, or it does not compute what ``methods`` state.
    """
    parent, attribute, stock = rotary_module(model)
    # A config may name layer types that no layer has, and the stock module has no frequencies for those.
    kinds = {None, *(layer.kind for layer in ModelConfig.of(model.config).layers)}
    methods = {kind: method for kind, method in methods.items() if kind in kinds}
    # A config cannot express start tokens, so the stock module ignores them: compare without them.
    without = {kind: method.as_computed_by_transformers() for kind, method in methods.items()}
    found = []
    for style in STYLES:
        worst = _probe(stock, RotaryEmbedding(without, style=style), methods)
        if worst is not None and worst <= PROBE_TOLERANCE:
            ours = RotaryEmbedding(dict(methods), style=style)
            ours.train(stock.training)
            setattr(parent, attribute, ours)
            return
        found += [] if worst is None else [worst]
    raise RopewalkError(_difference(stock, found))


def _difference(stock: nn.Module, found: Sequence[float]) -> str:
    """Why our rotary module does not replace a stock one.

    Args:
        found: the largest difference of cos and sin for each style whose shapes are those of the stock module.
    """
    name, way_out = (
        type(stock).__name__,
        "keep transformers' own RoPE with exact_rope=False (--no-exact-rope)",
    )
    if not found:
        return f"{name} returns cos and sin in shapes that ropewalk's rotary module does not have; {way_out}"
    differ = f"the cos and sin of {name} differ by up to {min(found):.1e} from those of the RoPE in the model's config"
    for buffer, value in stock.named_buffers():
        if value.dtype in (torch.bfloat16, torch.float16):
            dtype = str(value.dtype).removeprefix("torch.")
            return (
                f"{differ}, because its {buffer} is in {dtype}; call attach before the model is converted to {dtype}, "
                f"or {way_out}"
            )
    return f"{differ}; {way_out}"


@contextmanager
def rope_of(model: nn.Module, method: RopeMethod) -> Iterator[None]:
    """Run a loaded model with another RoPE method within the context manager; weights and config are not changed.

    Raises:
        RopewalkError: if the model keeps transformers' own rotary module, has a method for each layer type, or
            rotates a different number of dimensions than ``method``.
    """
    own = _exchangeable(model, [method])
    other = RotaryEmbedding(_in_its_place(own, method), style=own.style)
    # A length that was fixed for the model's own module holds for this one too.
    other.total_length = own.total_length
    other.train(own.training)
    with _in_place_of_own(model, other):
        yield


@contextmanager
def rope_of_rows(model: nn.Module, methods: Sequence[RopeMethod], total_length: int) -> Iterator[None]:
    """Run a loaded model on batches in which each row has its own RoPE method, within the context manager.

    Args:
        model: as for :func:`rope_of`.
        methods: one method for each row.
        total_length: tokens of every row; methods that depend on the length use it.

    Raises:
        RopewalkError: as for :func:`rope_of`.
    """
    own = _exchangeable(model, methods)
    other = RotaryRows([_in_its_place(own, method) for method in methods], style=own.style)
    other.train(own.training)
    with _in_place_of_own(model, other), other.pinned(total_length):
        yield


def _exchangeable(model: nn.Module, methods: Sequence[RopeMethod]) -> RotaryEmbedding:
    """The model's own rotary module, if it can be replaced by other methods."""
    own = rotary_module(model)[2]
    if isinstance(own, RotaryRows):
        raise RopewalkError(
            f"{type(model).__name__} runs with a RoPE method for each row of its batches; leave rope_of_rows before "
            "changing the RoPE again"
        )
    if not isinstance(own, RotaryEmbedding):
        raise RopewalkError(
            f"{type(model).__name__} runs transformers' own {type(own).__name__}, but ropewalk can change only the "
            "RoPE of its own rotary module; load the model with exact_rope=True"
        )
    rotary_dim = own.methods[_limiting_kind(own)].rotary_dim
    for method in methods:
        if method.rotary_dim != rotary_dim:
            raise RopewalkError(
                f"the RoPE method has rotary_dim {method.rotary_dim}, but {type(model).__name__} rotates "
                f"{rotary_dim} dimensions; give a method with rotary_dim {rotary_dim}"
            )
    return own


def _limiting_kind(own: RotaryEmbedding) -> str | None:
    """The layer type whose RoPE limits the context: full attention, if layer types have their own methods."""
    return None if None in own.methods else FULL


def _in_its_place(own: RotaryEmbedding, method: RopeMethod) -> dict[str | None, RopeMethod]:
    """The methods of a model's layer types, with another one for those that limit the context."""
    return {**own.methods, _limiting_kind(own): method}


@contextmanager
def _in_place_of_own(model: nn.Module, other: nn.Module) -> Iterator[None]:
    parent, attribute, own = rotary_module(model)
    setattr(parent, attribute, other)
    try:
        yield
    finally:
        setattr(parent, attribute, own)


def _probe(stock: nn.Module, ours: RotaryEmbedding, methods: Mapping[str | None, RopeMethod]) -> float | None:
    """The largest difference of cos and sin, NaN where one is; None if their shapes differ."""
    device = next((buffer.device for buffer in stock.buffers()), torch.device("cpu"))
    x = torch.zeros(1, PROBE_POSITIONS, 1, device=device)
    position_ids = positions_for(stock, torch.arange(PROBE_POSITIONS, device=device))
    differences = []
    for layer_type in methods:
        kind = {} if layer_type is None else {"layer_type": layer_type}
        with torch.no_grad():
            theirs = _parts(stock(x, position_ids, **kind))
            mine = _parts(ours(x, position_ids, **kind))
        if [part.shape for part in theirs] != [part.shape for part in mine]:
            return None
        differences += [(a.float() - b).abs().max() for a, b in zip(theirs, mine, strict=True)]
    return float(torch.stack(differences).max())


def _parts(rotation: Any) -> tuple[Tensor, ...]:
    """cos and sin, or the two parts of a complex tensor; the shapes distinguish the two."""
    if isinstance(rotation, Tensor):
        return (torch.view_as_real(rotation),) if rotation.is_complex() else (rotation,)
    return tuple(rotation)
