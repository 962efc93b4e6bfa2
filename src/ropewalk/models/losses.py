"""Token losses of a causal decoder without ever holding the full logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ropewalk.attention.layout import IGNORED, PackedLayout
from ropewalk.errors import RopewalkError
from ropewalk.parallel import ShardedLayouts

LOGITS_BYTES = 256 * 2**20
"""Size of the float32 logits held at once. The chunk is this many bytes, whatever the vocabulary."""

NO_NUMBER = -1
"""In place of a likeliest token where the logits are no numbers."""

PROBE_TOLERANCE = 1e-5
"""Relative difference between the head's logits and the model's own that float32 rounding explains."""


@dataclass(frozen=True, eq=False)
class OutputHead:
    """From hidden states to logits, for every decoder whose logits are a linear map, scaled or soft-capped.

    Attributes:
        linear: the model's output embedding.
        multiplier: factor of the logits (Cohere multiplies, Granite divides).
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2), None for none.
    """

    linear: nn.Linear
    multiplier: float = 1.0
    softcap: float | None = None

    @classmethod
    def unchecked(cls, model: Any) -> OutputHead:
        """The head that a model's config describes, for a model that has no weights yet."""
        config = model.config.get_text_config()
        multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        multiplier /= float(getattr(config, "logits_scaling", None) or 1.0)
        return cls(
            model.get_output_embeddings(), multiplier, getattr(config, "final_logit_softcapping", None)
        )

    @classmethod
    def of(cls, model: Any) -> OutputHead:
        """The head of a transformers model, checked against the model's own logits on two tokens.

        Raises:
            RopewalkError: if they differ, so that a model with another kind of head is refused, not mistrained.
        """
        head = cls.unchecked(model)
        ids = torch.tensor([[0, 1]], device=model.device)
        # Without a layout: the head is in question, and not every engine takes a row of two tokens.
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            expected = expected.to(torch.promote_types(expected.dtype, torch.float32))
            hidden = decoder_of(model)(ids, use_cache=False).last_hidden_state
            difference = (head.logits(hidden) - expected).abs().max()
        if not expected.isfinite().all():
            raise RopewalkError(
                f"{type(model).__name__} gives logits that are no numbers: its weights are damaged"
            )
        unit = torch.finfo(hidden.dtype).eps / torch.finfo(torch.float32).eps
        if not difference <= PROBE_TOLERANCE * unit * (1 + expected.abs().max()):
            raise RopewalkError(
                f"{type(model).__name__} computes its logits in a way that ropewalk does not know (they differ by "
                f"{float(difference):.2g}), so it cannot be trained or evaluated in chunks"
            )
        return head

    def logits(self, hidden: Tensor) -> Tensor:
        """``[..., hidden_size]`` to float32 (or float64) ``[..., vocab_size]``."""
        logits: Tensor = self.linear(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits


def decoder_of(model: Any) -> Any:
    """The decoder below the output head: what turns token ids into hidden states."""
    # Llama 4 for text names no module as its base, and is its own.
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def chunked_token_losses(hidden: Tensor, labels: Tensor, head: OutputHead) -> Tensor:
    """Cross entropy of each token, the logits computed chunk by chunk and again in the backward.

    Args:
        hidden: ``[tokens, hidden_size]``.
        labels: int64 ``[tokens]``, already shifted; ``IGNORED`` where there is no target.
        head: from hidden states to logits.

    Returns:
        float32 ``[tokens]`` in nats, 0 where ignored. Peak memory is ``LOGITS_BYTES`` times a small constant.
    """
    size = max(1, LOGITS_BYTES // (4 * head.linear.weight.shape[0]))
    if hidden.shape[0] <= size:
        return _token_losses(hidden, labels, head)
    recompute = torch.is_grad_enabled()
    losses = []
    # split, not slices: the backward of a slice writes a zero gradient as large as the whole.
    for h, y in zip(hidden.split(size), labels.split(size), strict=True):
        losses.append(
            checkpoint(_token_losses, h, y, head, use_reentrant=False, preserve_rng_state=False)
            if recompute
            else _token_losses(h, y, head)
        )
    return torch.cat(losses)


def _token_losses(hidden: Tensor, labels: Tensor, head: OutputHead) -> Tensor:
    return F.cross_entropy(head.logits(hidden), labels, reduction="none", ignore_index=IGNORED)


def token_losses(
    model: Any,
    input_ids: Tensor,
    labels: Tensor,
    layouts: Sequence[PackedLayout] | ShardedLayouts,
    head: OutputHead,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Cross entropy of every token of packed rows, or of this rank's shards of them.

    Args:
        model: a model from ``load_model`` (or one that ``attach`` was called on).
        input_ids: int64 ``[batch, length]``.
        labels: int64 ``[batch, length]``, already shifted.
        layouts: one a row, or how the rows are cut over ranks.
        head: the model's output head.
        position_ids: int64 ``[batch, length]``; the layouts' own if None.

    Returns:
        float32 ``[batch, length]`` in nats, 0 where ignored.
    """
    hidden = decoder_of(model)(input_ids, layout=layouts, position_ids=position_ids).last_hidden_state
    return chunked_token_losses(hidden.flatten(0, 1), labels.flatten(), head).view_as(labels)


def likeliest_tokens(hidden: Tensor, labels: Tensor, head: OutputHead) -> Tensor:
    """The likeliest token after each position that has a label; logits exist a chunk at a time.

    Args:
        hidden, labels, head: as for :func:`chunked_token_losses`.

    Returns:
        int64 ``[tokens]``: ``IGNORED`` where the label is, ``NO_NUMBER`` where a logit is NaN.
    """
    size = max(1, LOGITS_BYTES // (4 * head.linear.weight.shape[0]))
    asked = labels != IGNORED
    found = [head.logits(part).max(dim=-1) for part in hidden[asked].split(size)]
    tokens = torch.full_like(labels, IGNORED)
    # NaN wins every comparison, and would pass for a token.
    tokens[asked] = torch.cat([ids.masked_fill(best.isnan(), NO_NUMBER) for best, ids in found])
    return tokens


class LossModel(nn.Module):
    """A decoder and its output head as one module, from token ids to token losses.

    One module, because a sharding wrapper gathers the head's weights for as long as the module that owns them runs.

    Attributes:
        model: a model from ``load_model``.
        head: its output head.
    """

    def __init__(self, model: Any, head: OutputHead) -> None:
        super().__init__()
        self.model = model
        self.head = head

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        layouts: Sequence[PackedLayout] | ShardedLayouts,
        likeliest: bool = False,
    ) -> Tensor:
        """As :func:`token_losses`: float32 ``[batch, length]`` in nats, 0 where ignored.

        With ``likeliest`` int64 ``[batch, length]`` in their place, as :func:`likeliest_tokens`.
        """
        if likeliest:
            hidden = decoder_of(self.model)(input_ids, layout=layouts).last_hidden_state
            return likeliest_tokens(hidden.flatten(0, 1), labels.flatten(), self.head).view_as(labels).clone()
        # Sharding wrappers hang a hook on the output, which a view could lose.
        return token_losses(self.model, input_ids, labels, layouts, self.head).clone()
