"""RotaryEmbedding: takes the place of a loaded model's rotary module, with exact angles.

transformers computes the angle ``position · inv_freq`` in float32, which at a million tokens is off by
0.06 rad, and casts cos and sin to the activation dtype. Here angles, cos and sin are float64, and what comes
out is their float32 rounding: computed once a step for all layers, at next to no cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.rope.methods.base import RopeFrequencies, RopeMethod

Style = Literal["halves", "interleaved", "pairs", "complex"]
STYLES: tuple[Style, ...] = get_args(Style)


class RotaryEmbedding(nn.Module):
    """cos and sin of the RoPE angles, float32, whatever dtype the model has.

    The module holds no parameters and no buffers: ``model.to(bfloat16)``, ``to_empty`` and sharding wrappers
    cannot round or lose its frequencies, and ``state_dict`` has nothing of it. The frequencies are plain
    float64 attributes, with one copy a device.

    Args:
        methods: one method for all layers, or one for each layer type (the key None means all layers).
        style: ``halves`` pairs dimension ``i`` with ``i + rotary_dim / 2`` (Llama and most others);
            ``interleaved`` pairs ``2i`` with ``2i + 1`` (Cohere); ``pairs`` gives each pair's cos and sin once, for a
            model that lays them out itself (gpt-oss); ``complex`` gives cos + i·sin of each (Llama 4, DeepSeek-V2).

    Raises:
        RopewalkError: if there is no method, or the style is unknown.

    Example:
        >>> rotary = RotaryEmbedding(Default(rotary_dim=8, rope_theta=10000.0))
        >>> cos, sin = rotary(torch.empty(1, 4, 16), torch.arange(4)[None])
        >>> cos.shape, cos.dtype
        (torch.Size([1, 4, 8]), torch.float32)
    """

    def __init__(
        self, methods: RopeMethod | Mapping[str | None, RopeMethod], style: Style = "halves"
    ) -> None:
        super().__init__()
        if style not in STYLES:
            raise RopewalkError(f"unknown rotary style {style!r}; choose one of {', '.join(STYLES)}")
        self.methods: dict[str | None, RopeMethod] = (
            {None: methods} if isinstance(methods, RopeMethod) else dict(methods)
        )
        if not self.methods:
            raise RopewalkError("a rotary embedding needs at least one RoPE method, got none")
        self.style = style
        self.total_length: int | None = None
        # (layer type, device) -> (the length it holds for, inv_freq there, attention factor). One entry each:
        # a length-dependent method replaces it, so the cache cannot grow with every length seen.
        self._cache: dict[tuple[str | None, torch.device], tuple[int | None, Tensor, float]] = {}

    @property
    def layer_types(self) -> list[str]:
        """Layer types with a method of their own; LFM3 asks its rotary module for them."""
        return [kind for kind in self.methods if kind is not None]

    def frequencies(self, layer_type: str | None = None, total_length: int | None = None) -> RopeFrequencies:
        """What :meth:`forward` rotates with, for audits: float64 on the CPU.

        Args:
            layer_type: as in :meth:`forward`.
            total_length: tokens of the sequence, for length-dependent methods; None means the pinned length,
                and failing that the original one.
        """
        return self._method(layer_type).frequencies(total_length or self.total_length)

    @contextmanager
    def pinned(self, total_length: int) -> Iterator[None]:
        """Fix the sequence's total length for length-dependent methods while the context is open.

        Needed where a call sees part of a sequence (a shard, a step of generation): the choice must be the
        same for all of it, or cached keys carry other frequencies than the queries.
        """
        if total_length < 1:
            raise RopewalkError(f"total_length must be at least 1 token, got {total_length}")
        before = self.total_length
        self.total_length = total_length
        try:
            yield
        finally:
            self.total_length = before

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """cos and sin, times the attention factor.

        Args:
            x: any tensor on the device where the result is wanted; its dtype has no effect.
            position_ids: integer ``[batch, length]``, tokens; or ``[axes, batch, length]``, all axes alike, as Qwen3.5
                turns the positions of text.
            layer_type: whose method to use, where layer types differ.

        Returns:
            ``(cos, sin)``, float32 ``[batch, length, rotary_dim]``, on ``x.device``; half as wide in the style
            ``pairs``. In the style ``complex`` one complex64 tensor ``[batch, length, rotary_dim / 2]``.

        Raises:
            RopewalkError: if the layer type is unknown, the axes differ, or the module is being trained with a method
                that is for inference only.
        """
        position_ids = _one_axis(position_ids)
        method = self._method(layer_type)
        if self.training and torch.is_grad_enabled() and not method.trainable:
            raise RopewalkError(
                f"{method.name} is for inference only and must not be trained with; choose a trainable method"
            )
        # MPS has no float64.
        device = torch.device("cpu") if x.device.type == "mps" else x.device
        with torch.no_grad():
            positions = position_ids.to(device=device, dtype=torch.float64)[..., None]
            inv_freq, attention_factor = self._on_device(method, layer_type, position_ids, device)
            angles = positions * method.inv_freq_at(positions, inv_freq)
            cos = (angles.cos() * attention_factor).to(torch.float32)
            sin = (angles.sin() * attention_factor).to(torch.float32)
            if self.style == "complex":
                return torch.complex(cos, sin).to(x.device)
            return self._both_of_pair(cos).to(x.device), self._both_of_pair(sin).to(x.device)

    def _method(self, layer_type: str | None) -> RopeMethod:
        try:
            return self.methods[layer_type]
        except KeyError:
            known = ", ".join(map(str, self.methods))
            raise RopewalkError(
                f"no RoPE method for layer type {layer_type!r}; there are methods for {known}"
            ) from None

    def _on_device(
        self, method: RopeMethod, layer_type: str | None, position_ids: Tensor, device: torch.device
    ) -> tuple[Tensor, float]:
        length = None
        if method.length_dependent:
            # Only here does the host wait for the device.
            length = self.total_length or int(position_ids.max()) + 1
        cached = self._cache.get((layer_type, device))
        if cached is None or cached[0] != length:
            inv_freq, attention_factor = method.frequencies(length)
            cached = (length, inv_freq.to(device), attention_factor)
            self._cache[layer_type, device] = cached
        return cached[1], cached[2]

    def _both_of_pair(self, half: Tensor) -> Tensor:
        if self.style == "halves":
            return torch.cat((half, half), dim=-1)
        return half.repeat_interleave(2, dim=-1) if self.style == "interleaved" else half

    def extra_repr(self) -> str:
        described = ", ".join(f"{layer_type}: {method}" for layer_type, method in self.methods.items())
        return f"{described}, style={self.style}"


def _one_axis(position_ids: Tensor) -> Tensor:
    """``[batch, length]`` of positions that may come once an axis: time, height and width, which are one in text.

    Raises:
        RopewalkError: if they differ: an image or a video is in the sequence.
    """
    if position_ids.dim() < 3:
        return position_ids
    first = position_ids[0]
    # An expanded tensor is one axis in memory; elsewhere the host has to wait for the device.
    if position_ids.stride(0) != 0 and not torch.equal(position_ids, first.expand_as(position_ids)):
        raise RopewalkError(
            "positions differ by axis, as those of images do; the rotary module is for text alone"
        )
    return first


class RotaryRows(nn.Module):
    """cos and sin of a batch in which each row has a RoPE method of its own: several settings in one forward pass.

    Like :class:`RotaryEmbedding` it holds no parameters and no buffers. It is for measuring, not for training.

    Args:
        methods: for each row of the batch one method for all layers, or one for each layer type; those of one layer
            type all of one ``rotary_dim``.
        style: as for :class:`RotaryEmbedding`.

    Raises:
        RopewalkError: if there is no row, or rows rotate different numbers of dimensions.
    """

    def __init__(
        self, methods: Sequence[RopeMethod | Mapping[str | None, RopeMethod]], style: Style = "halves"
    ) -> None:
        super().__init__()
        # In a plain tuple: rows are no submodules, a sharding wrapper or model.modules() need not see them.
        self.rows = tuple(RotaryEmbedding(method, style) for method in methods)
        dims = [{kind: method.rotary_dim for kind, method in row.methods.items()} for row in self.rows]
        if not dims or any(each != dims[0] for each in dims):
            told = sorted({dim for each in dims for dim in each.values()})
            raise RopewalkError(
                f"rows of one batch must rotate one number of dimensions, got {told or 'no rows'}"
            )

    @property
    def layer_types(self) -> list[str]:
        """As :attr:`RotaryEmbedding.layer_types`."""
        return self.rows[0].layer_types

    @property
    def total_length(self) -> int | None:
        """The length that all rows are pinned to, if any."""
        return self.rows[0].total_length

    @contextmanager
    def pinned(self, total_length: int) -> Iterator[None]:
        """As :meth:`RotaryEmbedding.pinned`, for all rows."""
        with ExitStack() as stack:
            for row in self.rows:
                stack.enter_context(row.pinned(total_length))
            yield

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """As :meth:`RotaryEmbedding.forward`; the batch has as many rows as there are methods.

        Args:
            x: any tensor on the device where the result is wanted.
            position_ids: integer ``[rows, length]``, or ``[1, length]`` for all rows alike.
            layer_type: whose method to use, where layer types differ.

        Returns:
            ``(cos, sin)``, float32 ``[rows, length, rotary_dim]``.

        Raises:
            RopewalkError: if the batch has another number of rows, or as :meth:`RotaryEmbedding.forward`.
        """
        position_ids = _one_axis(position_ids)
        if position_ids.shape[0] not in (1, len(self.rows)):
            raise RopewalkError(
                f"there are {len(self.rows)} methods for a batch of {position_ids.shape[0]} rows; give one a row"
            )
        for row in self.rows:
            # They are no submodules, which train() and eval() would reach.
            row.training = self.training
        positions = position_ids.expand(len(self.rows), -1)
        each = [row(x, of_row[None], layer_type) for row, of_row in zip(self.rows, positions, strict=True)]
        if self.rows[0].style == "complex":
            return torch.cat(each)
        cos, sin = zip(*each, strict=True)
        return torch.cat(cos), torch.cat(sin)
