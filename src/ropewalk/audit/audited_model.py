"""A model prepared for an audit: how its layers rotate, which is not assumed but measured on a few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.audit.replaced_attention import AttentionCall, evaluating, replacing_attention, two_parts
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.compute.losses import OutputHead, decoder_of
from ropewalk.models.config.layers import SPARSE
from ropewalk.models.config.model import CHANGES_ITS_MASK, ModelConfig
from ropewalk.models.rope.rotary import positions_for, rotary_module
from ropewalk.rope import RopeMethod, Style

SINKS_IN_SCORES = ("gpt_oss",)
"""Model types whose eager attention adds learned sinks as one more score: rounded like the scores, minus their rounded
maximum, then one softmax. Others round sinks differently, and the audit would attribute wrong errors to them."""


PAIRED: tuple[Style, ...] = ("halves", "interleaved")
"""The styles in which dimensions of a head can form pairs."""

PROBE_TOKENS = 8
PROBE_START = 3
PROBE_TOLERANCE = 1e-9
"""Both rotations run in float64 with the same cos and sin, so they differ only by a few roundings of 1e-16."""


@dataclass(frozen=True)
class LayerRotation:
    """Rotation of one layer, as measured.

    Attributes:
        layer_type: layer type whose frequencies it uses, if the model has several; None if it has one.
        rotary_dim: number of rotated dimensions of a head; 0 for a layer without positions (NoPE).
        style: which dimensions form a pair: ``halves`` or ``interleaved``.
        start: the first rotated dimension: 0, or the start of latent attention's rotated part.
    """

    layer_type: str | None
    rotary_dim: int
    style: Style
    start: int = 0

    @property
    def dims(self) -> slice:
        """The rotated dimensions of a head."""
        return slice(self.start, self.start + self.rotary_dim)

    def put_back(self, x: Tensor, turned: Tensor) -> Tensor:
        """Queries or keys ``[..., head_dim]`` with their rotated dimensions replaced."""
        return torch.cat((x[..., : self.start], turned, x[..., self.dims.stop :]), dim=-1)


@dataclass(frozen=True, eq=False)
class AuditedModel:
    """A model prepared for :func:`replacing_attention`.

    Attributes:
        model: a causal decoder from transformers in evaluation mode; changes to it last no longer than a context.
        rotary: its own rotary module.
        methods: RoPE method of each layer type, as the config states.
        layers: how each layer rotates.
        head: maps hidden states to logits.
        gives: layout of the rotary module's output, as a style of :class:`~ropewalk.rope.RotaryEmbedding`; the layers
            may lay out their dimensions differently.
    """

    model: Any
    rotary: nn.Module
    methods: dict[str | None, RopeMethod]
    layers: tuple[LayerRotation, ...]
    head: OutputHead
    gives: Style = "halves"

    @classmethod
    def of(cls, model: Any) -> AuditedModel:
        """Measure on a few tokens how a model rotates.

        Args:
            model: a causal decoder from transformers; it is unchanged afterwards.

        Raises:
            EngineError: if it changes queries and keys by anything but a rotation of their first or last dimensions,
                has attention sinks with its own way of rounding, or does not accept external attention functions.
            RopewalkError: if it has no RoPE, or its way of computing logits is not supported.
        """
        name = type(model).__name__
        if getattr(model, "quantization_method", None) is not None or getattr(model, "is_quantized", False):
            raise EngineError(f"{name} is quantised; audit the checkpoint with its unquantised weights")
        config = model.config.get_text_config()
        if not getattr(config, "is_causal", True):
            raise EngineError(f"{name} attends in both directions; the audit needs a causal decoder")
        _refuse_other_order(model)
        methods = ModelConfig.of(config).methods
        try:
            rotary = rotary_module(model)[2]
        except RopewalkError as error:
            raise EngineError(
                f"the audit needs a model with exactly one rotary module, but {name} has none or several"
            ) from error
        if any(getattr(method, "start_tokens", 0) for method in getattr(rotary, "methods", {}).values()):
            raise EngineError(
                f"{name} runs with start tokens, whose RoPE is unscaled, so the scores in a row depend on the row's "
                "position even in exact arithmetic; audit the model with start_tokens=0"
            )
        # A config may name layer types that no layer has.
        present = {None, *(getattr(config, "layer_types", None) or methods)}
        with ExitStack() as stack:
            evaluating(model, stack)
            methods = {kind: method for kind, method in methods.items() if kind in present}
            positions = _probe_positions(model)
            pairs = {kind: method.rotary_dim // 2 for kind, method in methods.items()}
            gives = _style_given(rotary, positions, pairs)
            layers = _rotations(model, rotary, list(methods), gives)
            return cls(model, rotary, methods, layers, OutputHead.of(model), gives)

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
            dtype: dtype of the activations; the module may round to it.
            layer_type: layer type, as in :class:`LayerRotation`.
            total_length: tokens of the sequence, for methods that depend on it.

        Returns:
            ``[length, rotary_dim / 2]`` each, in the module's dtype, times the attention factor.
        """
        # An extra last position tells a length-dependent module how long the sequence is.
        longer = torch.cat([position_ids, position_ids.new_tensor([total_length - 1])])
        cos, sin = _own_cos_sin(self.rotary, longer.to(self.device), dtype, layer_type, self.gives)
        return cos[:-1], sin[:-1]


def _refuse_other_order(model: Any) -> None:
    """Raise for attention that the audit does not compute, or rounds in another order.

    Raises:
        EngineError: if the model has such attention.
    """
    name, config = type(model).__name__, model.config.get_text_config()
    sinks = any(key.rpartition(".")[2] == "sinks" for key, _ in model.named_parameters())
    kinds = list(getattr(config, "layer_types", None) or ())
    sparse = next((kind for kind in kinds if kind in SPARSE), None)
    if sparse is not None:
        raise EngineError(
            f"{name} has sparse attention ({sparse}, layer {kinds.index(sparse)}), and the audit, which computes "
            "attention in several precisions, cannot choose or compress the tokens to which a query attends"
        )
    if config.model_type in CHANGES_ITS_MASK:
        raise EngineError(
            f"{name} adds scores of its own to the attention mask, which the audit does not support"
        )
    if sinks and config.model_type not in SINKS_IN_SCORES:
        raise EngineError(
            f"{name} has learned attention sinks, and the audit knows how a model rounds its sinks only for "
            f"{', '.join(SINKS_IN_SCORES)}"
        )
    if config.model_type == "llama4_text" and getattr(config, "use_qk_norm", False):
        raise EngineError(
            f"{name} normalises queries and keys after rotating and rounding them (use_qk_norm), but the audit "
            "supports only models in which the rotation comes last; Llama 4 with use_qk_norm false can be audited"
        )


def _own_cos_sin(
    rotary: nn.Module, position_ids: Tensor, dtype: torch.dtype, layer_type: str | None, gives: Style
) -> tuple[Tensor, Tensor]:
    """cos and sin with one value for each pair, whatever the module's layout."""
    cos, sin = _given(rotary, position_ids, dtype, layer_type)
    if gives in ("pairs", "complex"):
        return cos, sin
    name = type(rotary).__name__
    return _one_of_pair(cos, gives, name), _one_of_pair(sin, gives, name)


def _given(
    rotary: nn.Module, position_ids: Tensor, dtype: torch.dtype, layer_type: str | None
) -> tuple[Tensor, Tensor]:
    """cos and sin as a rotary module returns them: ``[length, rotary_dim]``, or half as wide."""
    x = torch.zeros(1, len(position_ids), 1, dtype=dtype, device=position_ids.device)
    kind = {} if layer_type is None else {"layer_type": layer_type}
    own = deepcopy(rotary)
    with torch.no_grad():
        # One token first, in a copy: a dynamic module keeps the frequencies of the longest sequence it has seen.
        own(x[:, :1], positions_for(own, torch.zeros_like(position_ids[:1])), **kind)
        found = own(x, positions_for(own, position_ids), **kind)
    cos, sin = (found.real, found.imag) if _is_complex(found) else two_parts(found, rotary)
    return cos[0], sin[0]


def _is_complex(given: Any) -> bool:
    return isinstance(given, Tensor) and given.is_complex()


def _style_given(rotary: nn.Module, position_ids: Tensor, pairs: Mapping[str | None, int]) -> Style:
    """The layout of a rotary module's cos and sin, determined from its output at some positions.

    Args:
        rotary: the module.
        position_ids: int64 ``[length]``, without 0, where all styles look alike.
        pairs: number of rotated pairs for each layer type, as the config states.
    """
    found: set[Style] = set()
    for kind, wanted in pairs.items():
        kinds = {} if kind is None else {"layer_type": kind}
        x = torch.zeros(1, len(position_ids), 1, dtype=torch.float64, device=position_ids.device)
        with torch.no_grad():
            given = deepcopy(rotary)(x, positions_for(rotary, position_ids), **kinds)
        if _is_complex(given):
            found.add("complex")
            continue
        cos = two_parts(given, rotary)[0]
        # Tables have each angle twice, in halves or side by side, or once per pair.
        half = cos.shape[-1] // 2
        if torch.equal(cos[..., :half], cos[..., half:]):
            found.add("halves")
        elif torch.equal(cos[..., 0::2], cos[..., 1::2]):
            found.add("interleaved")
        elif cos.shape[-1] == wanted:
            found.add("pairs")
        else:
            raise _no_rope(type(rotary).__name__)
    if len(found) != 1:
        raise EngineError(
            f"{type(rotary).__name__} lays out cos and sin in several ways: {', '.join(sorted(found))}"
        )
    return found.pop()


def _one_of_pair(both: Tensor, gives: Style, name: str) -> Tensor:
    half = both.shape[-1] // 2
    one, other = (
        (both[..., :half], both[..., half:]) if gives == "halves" else (both[..., 0::2], both[..., 1::2])
    )
    if not torch.equal(one, other):
        raise _no_rope(name)
    return one


def _no_rope(name: str) -> EngineError:
    return EngineError(f"{name} gives the two dimensions of a pair different angles, which is not RoPE")


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: Style) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four products of a rotation before summation: the rotated pair is ``(a - b, c + d)``.

    Args:
        x: ``[..., length, rotary_dim]``.
        cos, sin: ``[length, rotary_dim / 2]``.
        style: which dimensions form a pair.
    """
    half = x.shape[-1] // 2
    first, second = (x[..., :half], x[..., half:]) if style == "halves" else (x[..., 0::2], x[..., 1::2])
    return first * cos, second * sin, second * cos, first * sin


def joined(first: Tensor, second: Tensor, style: Style) -> Tensor:
    """Join both parts of the pairs in the layout of the style."""
    return (
        torch.cat((first, second), dim=-1)
        if style == "halves"
        else torch.stack((first, second), -1).flatten(-2)
    )


def _rotations(
    model: Any, rotary: nn.Module, layer_types: list[str | None], gives: Style
) -> tuple[LayerRotation, ...]:
    """Run a few tokens with and without rotation, and find each layer's rotation from the difference."""
    positions = _probe_positions(model)
    runs = _with_and_without(model, torch.float64, positions)
    _check_calls(model, runs[0])
    tables = {
        kind: [part.double() for part in _own_cos_sin(rotary, positions, torch.float64, kind, gives)]
        for kind in layer_types
    }
    name = type(model).__name__
    return tuple(_rotation(plain, rotated, tables, name) for plain, rotated in zip(*runs, strict=True))


def _probe_positions(model: Any) -> Tensor:
    return torch.arange(PROBE_START, PROBE_START + PROBE_TOKENS, device=model.device)


def _with_and_without(
    model: Any, dtype: torch.dtype, positions: Tensor
) -> tuple[list[AttentionCall], list[AttentionCall]]:
    """Each layer's call without rotation, and with the model's own rotation at some positions."""
    runs: tuple[list[AttentionCall], list[AttentionCall]] = ([], [])
    for calls, rotate_positions in zip(runs, (None, positions), strict=True):

        def answer(call: AttentionCall, calls: list[AttentionCall] = calls) -> Tensor:
            calls.append(call)
            # Independent of query and key, so that both runs reach every layer with the same hidden states.
            return call.value.repeat_interleave(call.query.shape[0] // call.value.shape[0], dim=0)

        with replacing_attention(model, answer, dtype, rotate_positions):
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
            f"{name} computes with its attention mask by itself, and the audit has none to give it"
        ) from error
    except RuntimeError as error:
        what = str(dtype).removeprefix("torch.")
        raise EngineError(
            f"the audit runs {name} in {what}, but the model fails in this dtype: {error}"
        ) from error


def _check_calls(model: Any, calls: list[AttentionCall]) -> None:
    name, layers = type(model).__name__, model.config.get_text_config().num_hidden_layers
    if not calls:
        raise EngineError(
            f"{name} does not accept external attention functions, so the audit cannot replace its attention"
        )
    heads = {call.query.shape[0] for call in calls}
    if len(calls) > layers:
        raise EngineError(
            f"{name} calls its attention function {len(calls)} times in {layers} layers, but the audit needs at most "
            f"one call for each layer"
        )
    if len(heads) > 1:
        raise EngineError(
            f"{name} calls its attention function with {' and '.join(map(str, sorted(heads)))} heads, but the audit "
            f"needs the same number of heads in all calls"
        )


def _rotation(
    plain: AttentionCall, rotated: AttentionCall, tables: dict[str | None, list[Tensor]], name: str
) -> LayerRotation:
    both = [(plain.query, rotated.query), (plain.key, rotated.key)]
    # The probe runs in float64, where a wrong layout differs by far more than rounding.
    tolerance = PROBE_TOLERANCE * max(float(before.abs().max()) for before, _ in both)
    if all(float((before - after).abs().max()) <= tolerance for before, after in both):
        return LayerRotation(None, 0, "halves")
    for kind, (cos, sin) in tables.items():
        # The number of table columns gives the number of rotated dimensions; the rest of a head is not rotated.
        width = 2 * cos.shape[-1]
        unrotated = plain.query.shape[-1] - width
        if unrotated < 0:
            # The RoPE of a layer type with wider heads.
            continue
        # The rotated dimensions are the first of a head, or the last in latent attention.
        for start, style in product(sorted({0, unrotated}), PAIRED):
            found = LayerRotation(kind, width, style, start)
            worst = 0.0
            for before, after in both:
                a, b, c, d = rotate(before[..., found.dims], cos, sin, style)
                ours = found.put_back(before, joined(a - b, c + d, style))
                worst = max(worst, float((ours - after).abs().max()))
            if worst <= tolerance:
                return found
    raise EngineError(
        f"layer {plain.layer} of {name} does more to queries and keys than rotate their first or last dimensions, so "
        "the audit cannot compute its rotation separately"
    )
