"""Token losses of a causal decoder, computed without materialising the full logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ropewalk.attention.layout import IGNORED, PackedLayout
from ropewalk.errors import RopewalkError
from ropewalk.models.compute.tiles import in_tiles
from ropewalk.parallel import ShardedLayouts

LOGITS_BYTES = 256 * 2**20
"""Size in bytes of the float32 logits held at once, whatever the size of the vocabulary."""

NO_NUMBER = -1
"""Stands for the likeliest token if the logits are NaN."""

PROBE_TOLERANCE = 1e-5
"""Largest relative difference between the head's logits and the model's own that float32 rounding explains."""


@dataclass(frozen=True, eq=False)
class OutputHead:
    """Maps hidden states to logits, for every decoder whose logits are a linear map, scaled or soft-capped.

    Attributes:
        linear: the model's output embedding.
        multiplier: factor of the logits (Cohere multiplies, Granite divides).
        softcap: logits become ``softcap * tanh(logits / softcap)`` (Gemma 2); None for none.
    """

    linear: nn.Linear
    multiplier: float = 1.0
    softcap: float | None = None

    @classmethod
    def unchecked(cls, model: Any) -> OutputHead:
        """The head that a model's config describes, for a model without weights."""
        config = model.config.get_text_config()
        multiplier = float(getattr(config, "logit_scale", None) or 1.0)
        multiplier /= float(getattr(config, "logits_scaling", None) or 1.0)
        return cls(
            model.get_output_embeddings(), multiplier, getattr(config, "final_logit_softcapping", None)
        )

    @classmethod
    def of(cls, model: Any) -> OutputHead:
        """The head of a transformers model, compared with the model's own logits on two tokens.

        Raises:
            RopewalkError: if they differ; a model with another kind of head must not be trained with wrong logits.
        """
        head = cls.unchecked(model)
        ids = torch.tensor([[0, 1]], device=model.device)
        # Without a layout: this tests only the head, and not every engine accepts a row of two tokens.
        with torch.no_grad():
            expected = model(ids, use_cache=False).logits
            expected = expected.to(torch.promote_types(expected.dtype, torch.float32))
            hidden = decoder_of(model)(ids, use_cache=False).last_hidden_state
            difference = (head.logits(hidden) - expected).abs().max()
        if not expected.isfinite().all():
            raise RopewalkError(
                f"{type(model).__name__} computes NaN or infinite logits, probably because its weights are damaged; "
                "load an undamaged checkpoint"
            )
        # The tolerance is for float32; a model in 16 bits rounds its hidden states that much more coarsely.
        unit = torch.finfo(hidden.dtype).eps / torch.finfo(torch.float32).eps
        # Not >, so that NaN is refused too.
        if not difference <= PROBE_TOLERANCE * unit * (1 + expected.abs().max()):
            raise RopewalkError(
                f"{type(model).__name__}'s logits differ by {float(difference):.2g} from the product of its output "
                "head and its last hidden state, so ropewalk cannot compute the loss in chunks, and can neither "
                "train nor evaluate this model"
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
    """The decoder below the output head, which maps token ids to hidden states."""
    # Llama 4 for text declares no base model; its decoder is the attribute `model`.
    return getattr(model, "model", model) if model.base_model is model else model.base_model


def chunked_token_losses(hidden: Tensor, labels: Tensor, head: OutputHead) -> Tensor:
    """Cross entropy of each token, with logits computed in chunks and recomputed in the backward pass.

    Args:
        hidden: ``[tokens, hidden_size]``.
        labels: int64 ``[tokens]``, already shifted; ``IGNORED`` if there is no target.
        head: maps hidden states to logits.

    Returns:
        float32 ``[tokens]`` in nats, 0 for ignored labels. Peak memory is ``LOGITS_BYTES`` times a small constant, and
        in the backward the gradient of a trained head in float32, in which it is summed over the chunks.
    """

    def losses(hidden: Tensor, labels: Tensor) -> Tensor:
        logits, targets = head.logits(hidden), labels.squeeze(-1)
        return F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORED)[:, None]

    # In tiles of 4 bytes of float32 for each logit.
    size = max(1, LOGITS_BYTES // (4 * head.linear.weight.shape[0]))
    return in_tiles(head.linear, losses, size, (hidden, labels[:, None])).squeeze(-1)


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
        model: a model from ``load_model``, or one prepared by ``attach``.
        input_ids: int64 ``[batch, length]``.
        labels: int64 ``[batch, length]``, already shifted.
        layouts: one layout for each row, or how the rows are split over ranks.
        head: the model's output head.
        position_ids: int64 ``[batch, length]``; None for the layouts' own.

    Returns:
        float32 ``[batch, length]`` in nats, 0 for ignored labels.
    """
    hidden = decoder_of(model)(input_ids, layout=layouts, position_ids=position_ids).last_hidden_state
    return chunked_token_losses(hidden.flatten(0, 1), labels.flatten(), head).view_as(labels)


def likeliest_tokens(hidden: Tensor, labels: Tensor, head: OutputHead) -> Tensor:
    """The likeliest token after each position that has a label; logits are computed in chunks.

    Args:
        hidden, labels, head: as for :func:`chunked_token_losses`.

    Returns:
        int64 ``[tokens]``: ``IGNORED`` if the label is, ``NO_NUMBER`` if a logit is NaN.
    """
    size = max(1, LOGITS_BYTES // (4 * head.linear.weight.shape[0]))
    # Logits only where there is a target: with a short answer to a long prompt, that is a few positions of many
    # thousands.
    labelled = labels != IGNORED
    found = [head.logits(part).max(dim=-1) for part in hidden[labelled].split(size)]
    tokens = torch.full_like(labels, IGNORED)
    # max() returns NaN and its index if there is one, and the index would look like a token.
    tokens[labelled] = torch.cat([ids.masked_fill(best.isnan(), NO_NUMBER) for best, ids in found])
    return tokens


class LossModel(nn.Module):
    """A decoder and its output head as one module that maps token ids to token losses.

    One module, because a sharding wrapper gathers the head's weights only while the module that owns them runs.

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
        """Device that computes: not that of shards in CPU memory, but that of the mesh they are gathered on."""
        device: torch.device = self.model.device
        parameter = self.head.linear.weight
        if isinstance(parameter, DTensor) and parameter.device_mesh.device_type != device.type:
            module = torch.get_device_module(parameter.device_mesh.device_type)
            return torch.device(parameter.device_mesh.device_type, module.current_device())
        return device

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        layouts: Sequence[PackedLayout] | ShardedLayouts,
        likeliest: bool = False,
    ) -> Tensor:
        """See :func:`token_losses`: float32 ``[batch, length]`` in nats, 0 for ignored labels.

        With ``likeliest`` it returns int64 ``[batch, length]`` instead, see :func:`likeliest_tokens`.
        """
        if likeliest:
            hidden = decoder_of(self.model)(input_ids, layout=layouts).last_hidden_state
            return likeliest_tokens(hidden.flatten(0, 1), labels.flatten(), self.head).view_as(labels).clone()
        # Sharding wrappers register a hook on the output, which a view could lose.
        return token_losses(self.model, input_ids, labels, layouts, self.head).clone()
