"""A model to be audited, and how each of its layers rotates: not assumed but measured, on a few tokens."""

from __future__ import annotations

from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.intercept import AttentionCall, evaluating, intercepted
from ropewalk.models.losses import OutputHead, decoder_of
from ropewalk.models.rotary import rotary_module
from ropewalk.rope import RopeMethod, Style, methods_from_config

PROBE_TOKENS = 8
PROBE_START = 3
PROBE_TOLERANCE = 1e-9
"""Both rotations run in float64 on the same cos and sin; what is left are a few roundings of 1e-16."""


@dataclass(frozen=True)
class LayerRotation:
    """How one layer rotates, as measured.

    Attributes:
        layer_type: whose frequencies it takes, where the model has several; None where it has one.
        rotary_dim: leading dimensions of a head that are rotated; 0 for a layer without positions (NoPE).
        style: which dimensions make a pair: ``halves`` or ``interleaved``.
    """

    layer_type: str | None
    rotary_dim: int
    style: Style


@dataclass(frozen=True, eq=False)
class Subject:
    """A model made ready for :func:`intercepted`.

    Attributes:
        model: a causal decoder from transformers, in evaluation mode; never changed for longer than a context.
        rotary: its own rotary module.
        methods: RoPE method of each layer type, as the config says.
        layers: how each layer rotates.
        head: from hidden states to logits.
    """

    model: Any
    rotary: nn.Module
    methods: dict[str | None, RopeMethod]
    layers: tuple[LayerRotation, ...]
    head: OutputHead

    @classmethod
    def of(cls, model: Any) -> Subject:
        """Look at how a model rotates, on a few tokens.

        Args:
            model: a causal decoder from transformers; the same afterwards.

        Raises:
            EngineError: if it does anything to queries and keys that is not a rotation of their leading dimensions,
                or takes no attention function from outside.
            RopewalkError: if it has no RoPE, or its logits are computed in a way that is not known.
        """
        name = type(model).__name__
        if getattr(model, "quantization_method", None) is not None or getattr(model, "is_quantized", False):
            raise EngineError(f"{name} is quantised; audit the checkpoint with its plain weights")
        config = model.config.get_text_config()
        if not getattr(config, "is_causal", True):
            raise EngineError(f"{name} attends in both directions; the audit needs a causal decoder")
        if any(key.rpartition(".")[2] == "sinks" for key, _ in model.named_parameters()):
            raise EngineError(f"{name} has learned attention sinks, which the audit does not compute")
        methods = methods_from_config(config.to_dict())
        try:
            rotary = rotary_module(model)[2]
        except RopewalkError as error:
            raise EngineError(f"{name} has not exactly one rotary module, which the audit needs") from error
        if any(getattr(method, "start_tokens", 0) for method in getattr(rotary, "methods", {}).values()):
            raise EngineError(
                f"{name} runs with start tokens that keep their angles unscaled, so a row that is moved is another "
                "row; audit it with start_tokens=0"
            )
        # A config may name layer types that none of its layers has.
        present = {None, *(getattr(config, "layer_types", None) or methods)}
        with ExitStack() as stack:
            evaluating(model, stack)
            methods = {kind: method for kind, method in methods.items() if kind in present}
            layers = _rotations(model, rotary, list(methods))
            return cls(model, rotary, methods, layers, OutputHead.of(model))

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def with_and_without_rotation(
        self, dtype: torch.dtype
    ) -> tuple[Tensor, list[tuple[AttentionCall, AttentionCall]]]:
        """Positions of a few tokens, and each layer's call before and after the model's own rotation in a dtype.

        Raises:
            EngineError: if the model cannot run in that dtype.
        """
        positions = _probe_positions(self.model)
        plain, rotated = _with_and_without(self.model, dtype, positions)
        return positions, list(zip(plain, rotated, strict=True))

    def cos_sin(
        self, position_ids: Tensor, dtype: torch.dtype, layer_type: str | None, total_length: int
    ) -> tuple[Tensor, Tensor]:
        """cos and sin as the model's own rotary module computes them for activations of a dtype.

        Args:
            position_ids: int64 ``[length]``.
            dtype: of the activations; the module may round to it.
            layer_type: as in :class:`LayerRotation`.
            total_length: tokens of the sequence, for methods that depend on it.

        Returns:
            ``[length, rotary_dim / 2]`` each, in the module's dtype, times the attention factor.
        """
        # One more position tells a length-dependent module how long the sequence is.
        longer = torch.cat([position_ids, position_ids.new_tensor([total_length - 1])])
        cos, sin = _own_cos_sin(self.rotary, longer.to(self.device), dtype, layer_type)
        return cos[:-1], sin[:-1]


def _own_cos_sin(
    rotary: nn.Module, position_ids: Tensor, dtype: torch.dtype, layer_type: str | None
) -> tuple[Tensor, Tensor]:
    x = torch.zeros(1, len(position_ids), 1, dtype=dtype, device=position_ids.device)
    kind = {} if layer_type is None else {"layer_type": layer_type}
    own = deepcopy(rotary)
    with torch.no_grad():
        # One token first, in a copy: a dynamic module keeps the frequencies of the longest sequence that it has seen.
        own(x[:, :1], torch.zeros_like(position_ids[None, :1]), **kind)
        found = own(x, position_ids[None], **kind)
    name = type(rotary).__name__
    if not isinstance(found, tuple) or len(found) != 2 or any(part.is_complex() for part in found):
        raise EngineError(f"{name} does not give cos and sin, so the audit cannot separate its rotation")
    halves = [_one_of_pair(part[0], name) for part in found]
    return halves[0], halves[1]


def _one_of_pair(both: Tensor, name: str) -> Tensor:
    half = both.shape[-1] // 2
    if torch.equal(both[..., :half], both[..., half:]):
        return both[..., :half]
    if torch.equal(both[..., 0::2], both[..., 1::2]):
        return both[..., 0::2]
    raise EngineError(f"{name} gives the two dimensions of a pair different angles, which is no RoPE")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: Style) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four products of a rotation, not yet summed: the rotated pair is ``(a - b, c + d)``.

    Args:
        x: ``[..., length, rotary_dim]``.
        cos, sin: ``[length, rotary_dim / 2]``.
        style: which dimensions make a pair.
    """
    half = x.shape[-1] // 2
    first, second = (x[..., :half], x[..., half:]) if style == "halves" else (x[..., 0::2], x[..., 1::2])
    return first * cos, second * sin, second * cos, first * sin


def joined(first: Tensor, second: Tensor, style: Style) -> Tensor:
    """Both of each pair in their places again."""
    return (
        torch.cat((first, second), dim=-1)
        if style == "halves"
        else torch.stack((first, second), -1).flatten(-2)
    )


def _rotations(model: Any, rotary: nn.Module, layer_types: list[str | None]) -> tuple[LayerRotation, ...]:
    """Run a few tokens with and without rotation, and find for each layer what leads from one to the other."""
    positions = _probe_positions(model)
    runs = _with_and_without(model, torch.float64, positions)
    _check_calls(model, runs[0])
    tables = {
        kind: [part.double() for part in _own_cos_sin(rotary, positions, torch.float64, kind)]
        for kind in layer_types
    }
    name = type(model).__name__
    return tuple(_rotation(plain, rotated, tables, name) for plain, rotated in zip(*runs, strict=True))


def _probe_positions(model: Any) -> Tensor:
    return torch.arange(PROBE_START, PROBE_START + PROBE_TOKENS, device=model.device)


def _with_and_without(
    model: Any, dtype: torch.dtype, positions: Tensor
) -> tuple[list[AttentionCall], list[AttentionCall]]:
    """Each layer's call without a rotation, and with the model's own at some positions."""
    runs: tuple[list[AttentionCall], list[AttentionCall]] = ([], [])
    for calls, rotate_positions in zip(runs, (None, positions), strict=True):

        def answer(call: AttentionCall, calls: list[AttentionCall] = calls) -> Tensor:
            calls.append(call)
            # Nothing of query and key, so that both runs reach every layer with the same hidden states.
            return call.value.repeat_interleave(call.query.shape[0] // call.value.shape[0], dim=0)

        with intercepted(model, answer, dtype, rotate_positions):
            _probe(model, positions, dtype)
    return runs


def _probe(model: Any, positions: Tensor, dtype: torch.dtype) -> None:
    name = type(model).__name__
    ids = torch.arange(len(positions), device=model.device) % model.config.get_text_config().vocab_size
    try:
        decoder_of(model)(ids[None], position_ids=positions[None], use_cache=False)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError) as error:
        raise EngineError(
            f"{name} does something with its attention mask that the audit does not know: {error}"
        ) from error
    except RuntimeError as error:
        what = str(dtype).removeprefix("torch.")
        raise EngineError(f"{name} cannot run in {what}, which the audit needs: {error}") from error


def _check_calls(model: Any, calls: list[AttentionCall]) -> None:
    name, layers = type(model).__name__, model.config.get_text_config().num_hidden_layers
    if not calls:
        raise EngineError(
            f"{name} takes no attention function from outside, so the audit cannot compute its own"
        )
    heads = {call.query.shape[0] for call in calls}
    if len(calls) > layers or len(heads) > 1:
        raise EngineError(
            f"{name} attends {len(calls)} times in {layers} layers, with {' or '.join(map(str, sorted(heads)))} heads; "
            "the audit needs one attention a layer, with as many heads in each"
        )


def _rotation(
    plain: AttentionCall, rotated: AttentionCall, tables: dict[str | None, list[Tensor]], name: str
) -> LayerRotation:
    both = [(plain.query, rotated.query), (plain.key, rotated.key)]
    tolerance = PROBE_TOLERANCE * max(float(before.abs().max()) for before, _ in both)
    if all(float((before - after).abs().max()) <= tolerance for before, after in both):
        return LayerRotation(None, 0, "halves")
    for kind, (cos, sin) in tables.items():
        width = 2 * cos.shape[-1]
        for style in ("halves", "interleaved"):
            worst = 0.0
            for before, after in both:
                a, b, c, d = rotate(before[..., :width], cos, sin, style)
                ours = torch.cat((joined(a - b, c + d, style), before[..., width:]), dim=-1)
                worst = max(worst, float((ours - after).abs().max()))
            if worst <= tolerance:
                return LayerRotation(kind, width, style)
    raise EngineError(
        f"layer {plain.layer} of {name} does more to queries and keys than rotate their leading dimensions, so the "
        "audit cannot compute its rotation apart from it"
    )
