"""RotaryEmbedding: replaces the rotary module of a loaded model and computes exact angles.

transformers computes the angle ``position · inv_freq`` in float32, which is off by 0.06 rad at a million tokens, and
casts cos and sin to the activation dtype. This module computes angles, cos and sin in float64 and rounds the result to
float32, once in each step for all layers, at negligible cost.
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
KEPT = 2
"""Number of lengths whose frequencies stay on a device: LongRoPE has two lists, and batches may alternate."""


class RotaryEmbedding(nn.Module):
    """cos and sin of the RoPE angles in float32, whatever the dtype of the model.

    The module has no parameters and no buffers, so ``model.to(bfloat16)``, ``to_empty`` and sharding wrappers cannot
    round or lose its frequencies, and ``state_dict`` does not contain them. The frequencies are plain float64
    attributes, with one copy for each device.

    Args:
        methods: one method for all layers, or one for each layer type (the key None means all layers).
        style: ``halves`` pairs dimension ``i`` with ``i + rotary_dim / 2`` (Llama and most others);
            ``interleaved`` pairs ``2i`` with ``2i + 1`` (Cohere); ``pairs`` returns each pair's cos and sin once, for a
            model that expands them itself (gpt-oss); ``complex`` returns cos + i·sin (Llama 4, DeepSeek-V2).

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
        self.row_lengths: tuple[int, ...] | None = None
        # (layer type, device) -> (the length it is valid for, inv_freq there, attention factor), the latest ones: both
        # of a LongRoPE, whose rows may alternate, and not one for every new length of a method that has many.
        self._cache: dict[tuple[str | None, torch.device], list[tuple[int | None, Tensor, float]]] = {}

    @property
    def layer_types(self) -> list[str]:
        """Layer types with their own method; LFM3 reads this attribute of its rotary module."""
        return [kind for kind in self.methods if kind is not None]

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies of any layer type depend on the length of the sequence."""
        return any(method.length_dependent for method in self.methods.values())

    def frequencies(self, layer_type: str | None = None, total_length: int | None = None) -> RopeFrequencies:
        """The frequencies that :meth:`forward` uses, for audits: float64 on the CPU.

        Args:
            layer_type: as in :meth:`forward`.
            total_length: tokens of the sequence, for length-dependent methods; None means the pinned length, or the
                original length if none is pinned.
        """
        return self._method(layer_type).frequencies(total_length or self.total_length)

    @contextmanager
    def pinned(self, total_length: int) -> Iterator[None]:
        """Fix the total length of the sequence for length-dependent methods within the context manager.

        Needed if a call sees only part of a sequence (a shard, a step of generation): all parts must use the same
        frequencies, or cached keys and queries would disagree.
        """
        if total_length < 1:
            raise RopewalkError(f"total_length must be at least 1 token, got {total_length}")
        before = self.total_length
        self.total_length = total_length
        try:
            yield
        finally:
            self.total_length = before

    @contextmanager
    def pinned_rows(self, lengths: Sequence[int]) -> Iterator[None]:
        """Fix the total length of each row of a batch for length-dependent methods within the context manager.

        Without it, the longest row of a batch decides for all of them. A length that :meth:`pinned` has fixed takes
        precedence.

        Args:
            lengths: tokens, one number for each row of the batches that follow.
        """
        if not lengths or min(lengths) < 1:
            raise RopewalkError(f"every row's length must be at least 1 token, got {list(lengths)}")
        before = self.row_lengths
        self.row_lengths = tuple(lengths)
        try:
            yield
        finally:
            self.row_lengths = before

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """cos and sin, multiplied by the attention factor.

        Args:
            x: any tensor on the device of the result; its dtype has no effect.
            position_ids: integer ``[batch, length]``, tokens; or ``[axes, batch, length]`` with equal axes, as Qwen3.5
                expands the positions of text.
            layer_type: layer type whose method to use, if layer types differ.

        Returns:
            ``(cos, sin)``, float32 ``[batch, length, rotary_dim]``, on ``x.device``; half as wide in the style
            ``pairs``. In the style ``complex`` one complex64 tensor ``[batch, length, rotary_dim / 2]``.

        Raises:
            RopewalkError: if the layer type is unknown, the axes differ, a method for inference only is used in
                training mode, or the batch has another number of rows than lengths are pinned.
        """
        position_ids = _one_axis(position_ids)
        method = self._method(layer_type)
        if self.training and torch.is_grad_enabled() and not method.trainable:
            raise RopewalkError(
                f"method {method.name!r} is for inference only and cannot be used in training; choose a trainable "
                "method"
            )
        # MPS has no float64, so the CPU computes the angles for it.
        device = torch.device("cpu") if x.device.type == "mps" else x.device
        with torch.no_grad():
            positions = position_ids.to(device=device, dtype=torch.float64)[..., None]
            inv_freq, attention_factor = self._on_device(method, layer_type, position_ids, device)
            # In float64: at a million tokens a float32 angle would be off by 0.06 rad.
            angles = positions * method.inv_freq_at(positions, inv_freq)
            # Rounded only once, after the angle: an error of the angle grows with the position, this one does not.
            cos = (angles.cos() * attention_factor).to(torch.float32)
            sin = (angles.sin() * attention_factor).to(torch.float32)
            if self.style == "complex":
                return torch.complex(cos, sin).to(x.device)
            return self._both_of_pair(cos).to(x.device), self._both_of_pair(sin).to(x.device)

    def _method(self, layer_type: str | None) -> RopeMethod:
        try:
            return self.methods[layer_type]
        except KeyError:
            known = ", ".join(str(name) for name in self.methods if name is not None)
            wanted = (
                f"pass layer_type, one of {known}"
                if known
                else "omit layer_type, because all layers share one method"
            )
            raise RopewalkError(
                f"the rotary module has no RoPE method for layer type {layer_type!r}; {wanted}"
            ) from None

    def _on_device(
        self, method: RopeMethod, layer_type: str | None, position_ids: Tensor, device: torch.device
    ) -> tuple[Tensor, Tensor | float]:
        """inv_freq ``[rotary_dim / 2]`` and attention factor; of rows that differ, both with axes for row and token."""
        if not method.length_dependent:
            return self._cached(method, layer_type, None, device)
        if self.total_length is None and self.row_lengths is not None:
            lengths = [method.length_class(length) for length in self.row_lengths]
            if position_ids.shape[0] not in (1, len(lengths)):
                raise RopewalkError(
                    f"{len(lengths)} row lengths are pinned for a batch of {position_ids.shape[0]} rows; pin one for "
                    "each row"
                )
            rows = [self._cached(method, layer_type, length, device) for length in lengths]
            if len(set(lengths)) == 1:
                return rows[0]
            of_rows = torch.stack([inv_freq for inv_freq, _ in rows])[:, None]
            factors = [factor for _, factor in rows]
            # LongRoPE has one, and a tensor of them would make the host wait for the device.
            if len(set(factors)) == 1:
                return of_rows, factors[0]
            return of_rows, torch.tensor(factors, dtype=torch.float64, device=device)[:, None, None]
        # Only this line makes the host wait for the device.
        length = self.total_length or int(position_ids.max()) + 1
        return self._cached(method, layer_type, method.length_class(length), device)

    def _cached(
        self, method: RopeMethod, layer_type: str | None, length: int | None, device: torch.device
    ) -> tuple[Tensor, float]:
        held = self._cache.setdefault((layer_type, device), [])
        for known, inv_freq, attention_factor in held:
            if known == length:
                return inv_freq, attention_factor
        inv_freq, attention_factor = method.frequencies(length)
        held.insert(0, (length, inv_freq.to(device), attention_factor))
        del held[KEPT:]
        return held[0][1], held[0][2]

    def _both_of_pair(self, half: Tensor) -> Tensor:
        if self.style == "halves":
            return torch.cat((half, half), dim=-1)
        return half.repeat_interleave(2, dim=-1) if self.style == "interleaved" else half

    def extra_repr(self) -> str:
        described = ", ".join(f"{layer_type}: {method}" for layer_type, method in self.methods.items())
        return f"{described}, style={self.style}"


def _one_axis(position_ids: Tensor) -> Tensor:
    """``[batch, length]`` of positions that may have axes for time, height and width, which are equal in text.

    Raises:
        RopewalkError: if they differ, which means that the sequence contains an image or a video.
    """
    if position_ids.dim() < 3:
        return position_ids
    first = position_ids[0]
    # An expanded tensor has stride 0, so its axes are equal; comparing others makes the host wait for the device.
    if position_ids.stride(0) != 0 and not torch.equal(position_ids, first.expand_as(position_ids)):
        raise RopewalkError(
            "position_ids differ between axes, as they do for images, but ropewalk's rotary module supports only text"
        )
    return first


class RotaryRows(nn.Module):
    """cos and sin of a batch in which each row has its own RoPE method: several settings in one forward pass.

    Like :class:`RotaryEmbedding` it has no parameters and no buffers. It is for measuring;
    training needs one method, whose frequencies :meth:`RotaryEmbedding.pinned_rows` chooses by row.

    Args:
        methods: for each row of the batch, one method for all layers, or one for each layer type; those of one layer
            type must have the same ``rotary_dim``.
        style: as in :class:`RotaryEmbedding`.

    Raises:
        RopewalkError: if there are no rows, or rows rotate different numbers of dimensions.
    """

    def __init__(
        self, methods: Sequence[RopeMethod | Mapping[str | None, RopeMethod]], style: Style = "halves"
    ) -> None:
        super().__init__()
        # A plain tuple, not a ModuleList: sharding wrappers and model.modules() must not see the rows as submodules.
        self.rows = tuple(RotaryEmbedding(method, style) for method in methods)
        dims = [{kind: method.rotary_dim for kind, method in row.methods.items()} for row in self.rows]
        if not dims or any(each != dims[0] for each in dims):
            widths = sorted({dim for each in dims for dim in each.values()})
            raise RopewalkError(
                f"all rows of a batch must rotate the same number of dimensions, got {widths or 'no rows'}"
            )

    @property
    def layer_types(self) -> list[str]:
        """See :attr:`RotaryEmbedding.layer_types`."""
        return self.rows[0].layer_types

    @property
    def length_dependent(self) -> bool:
        """See :attr:`RotaryEmbedding.length_dependent`; of any row."""
        return any(row.length_dependent for row in self.rows)

    @property
    def total_length(self) -> int | None:
        """The length that all rows are pinned to, if any."""
        return self.rows[0].total_length

    @contextmanager
    def pinned(self, total_length: int) -> Iterator[None]:
        """See :meth:`RotaryEmbedding.pinned`; applies to all rows."""
        with self._pinned([total_length] * len(self.rows)):
            yield

    @contextmanager
    def pinned_rows(self, lengths: Sequence[int]) -> Iterator[None]:
        """See :meth:`RotaryEmbedding.pinned_rows`; each row's own module gets its length."""
        if len(lengths) != len(self.rows):
            raise RopewalkError(
                f"there are {len(self.rows)} methods for a batch of {len(lengths)} rows; give one per row"
            )
        if self.total_length is not None:
            yield
            return
        with self._pinned(lengths):
            yield

    @contextmanager
    def _pinned(self, lengths: Sequence[int]) -> Iterator[None]:
        with ExitStack() as stack:
            for row, length in zip(self.rows, lengths, strict=True):
                stack.enter_context(row.pinned(length))
            yield

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """See :meth:`RotaryEmbedding.forward`; the batch has one row for each method.

        Args:
            x: any tensor on the device of the result.
            position_ids: integer ``[rows, length]``, or ``[1, length]`` if all rows are equal.
            layer_type: layer type whose method to use, if layer types differ.

        Returns:
            ``(cos, sin)``, float32 ``[rows, length, rotary_dim]``.

        Raises:
            RopewalkError: if the batch has a different number of rows, or as in :meth:`RotaryEmbedding.forward`.
        """
        position_ids = _one_axis(position_ids)
        if position_ids.shape[0] not in (1, len(self.rows)):
            raise RopewalkError(
                f"there are {len(self.rows)} methods for a batch of {position_ids.shape[0]} rows; give one per row"
            )
        for row in self.rows:
            # The rows are not submodules, so train() and eval() do not reach them.
            row.training = self.training
        positions = position_ids.expand(len(self.rows), -1)
        each = [row(x, of_row[None], layer_type) for row, of_row in zip(self.rows, positions, strict=True)]
        if self.rows[0].style == "complex":
            return torch.cat(each)
        cos, sin = zip(*each, strict=True)
        return torch.cat(cos), torch.cat(sin)
