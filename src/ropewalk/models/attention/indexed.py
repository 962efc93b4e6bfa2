"""Sparse attention with an indexer (DeepSeek Sparse Attention) in packed rows.

An indexer scores the tokens of a row for each query, ``I[t, s] = sum_h w[t, h] relu(q[t, h] . k[s]) / sqrt(d)``, and
chooses the ``index_topk`` best of those that the query sees, which a layout decides. transformers' own indexer computes
the scores, in chunks of queries as it prefills a long prompt in chunks; those of a whole row would take 4 bytes for
each pair of tokens and each head of the indexer.

The indexer rotates its queries and keys with the model's cos and sin, so a new RoPE changes its scores too. No gradient
reaches it, in transformers' code as here: its weights stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.attention.chosen import visibility
from ropewalk.errors import EngineError
from ropewalk.models.attention.hooks import LayoutCall
from ropewalk.models.compute.losses import decoder_of
from ropewalk.models.config.model import ModelConfig

SCORE_BYTES = 2**30
"""Most bytes of an indexer's scores of a chunk of queries, before their heads are summed."""


def refuse_parts_of_rows(config: ModelConfig) -> None:
    """Raise EngineError for ranks that share a row if the model has indexers."""
    if config.indexed_layers:
        raise EngineError(
            f"the indexers of {config.model_type} choose among all earlier tokens of a row, and a rank that shares the "
            "row has only a part of them; set parallel.ring and parallel.sequence to 1"
        )


def install(model: nn.Module, config: ModelConfig) -> None:
    """Make the indexers of a model choose among what the layout of a call lets a query see.

    Args:
        model: a transformers decoder; its indexer instances are changed.
        config: config of the model.
    """
    for attention in _attention_of(model, config):
        attention.register_forward_pre_hook(_give_rows, with_kwargs=True)
    for indexer in indexers_of(model, config):
        indexer.forward = _InChunks(indexer)


def indexers_of(model: nn.Module, config: ModelConfig) -> list[nn.Module]:
    """The indexers of a model, first to last; some layers have none, and take the choice of the layer before them.

    Raises:
        EngineError: if the attention of a layer has no indexer where it is expected.
    """
    return [each.indexer for each in _attention_of(model, config) if each.indexer is not None]


def _attention_of(model: nn.Module, config: ModelConfig) -> list[Any]:
    layers: Any = getattr(decoder_of(model), "layers", ()) if config.indexed_layers else ()
    found = [getattr(layers[number], "self_attn", None) for number in config.indexed_layers]
    for number, attention in zip(config.indexed_layers, found, strict=True):
        if not hasattr(attention, "indexer"):
            raise EngineError(
                f"layer {number} of {type(model).__name__} has no module self_attn.indexer, where ropewalk expects the "
                "indexer that chooses its tokens"
            )
    return found


class _Rows:
    """Packed rows in place of the mask, of whose only head attention passes on a part to its indexer."""

    def __init__(self, call: LayoutCall) -> None:
        self.layouts = call.layouts

    def __getitem__(self, part: object) -> _Rows:
        return self


def _give_rows(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hook before the forward of an attention module: with a layout, its indexer gets the rows for a mask.

    The layout is taken from the keyword arguments, as in :mod:`ropewalk.models.attention.recurrent`.
    """
    call: LayoutCall | None = kwargs.get("layout")
    if call is None:
        return None
    if call.sharded is not None and call.sharded.groups.ring * call.sharded.groups.sequence > 1:
        refuse_parts_of_rows(ModelConfig.of(attention.config))
    return args, {**kwargs, "attention_mask": _Rows(call)}


class _KeysSoFar:
    """In place of a cache: an indexer's keys of the chunks before, and of this one."""

    keys: Tensor | None = None

    def update_indexer(self, keys: Tensor, layer: int) -> Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        return self.keys


class _InChunks:
    """Forward of an indexer: in chunks of queries if it gets rows for a mask, otherwise unchanged."""

    def __init__(self, indexer: Any) -> None:
        self.heads, self.most, self.forward = indexer.n_heads, indexer.index_topk, indexer.forward

    @torch.no_grad()
    def __call__(
        self,
        hidden: Tensor,
        q_resid: Tensor,
        turning: tuple[Tensor, Tensor],
        mask: Any,
        *rest: Any,
        **more: Any,
    ) -> Tensor:
        """Places that each query chooses, int32 ``[batch, length, chosen]``; none if all choose what they see."""
        if not isinstance(mask, _Rows):
            found: Tensor = self.forward(hidden, q_resid, turning, mask, *rest, **more)
            return found
        batch, length = hidden.shape[:2]
        if max(int(each.run_index.max()) for each in mask.layouts) < self.most:
            return torch.empty(batch, length, 0, dtype=torch.int32, device=hidden.device)
        rows, so_far, parts = visibility(mask.layouts, hidden.device), _KeysSoFar(), []
        size = max(1, SCORE_BYTES // (batch * self.heads * length * torch.float32.itemsize))
        for start in range(0, length, size):
            own = slice(start, min(start + size, length))
            turned, seen = tuple(each[:, own] for each in turning), rows.seen(own.start, own.stop)
            parts.append(self.forward(hidden[:, own], q_resid[:, own], turned, seen, None, so_far))
        # Where there are fewer tokens so far than can be chosen, all are: place 0 once more changes nothing.
        return torch.cat([F.pad(each, (0, parts[-1].shape[-1] - each.shape[-1])) for each in parts], 1)
