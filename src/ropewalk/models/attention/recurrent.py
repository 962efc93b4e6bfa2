"""Recurrent layers in packed rows: their state and convolution restart at each document.

Gated DeltaNet, Mamba-2, lightning attention and short convolutions carry a state from token to token, and no mask
applies to it. In a model call with a layout, the forward of each such layer's mixer (patched on the instance) gathers
the runs of the rows. Installed kernels that take boundaries get them one after another
(:mod:`ropewalk.models.attention.kernels`). Otherwise they form a batch of their own: each entry starts with a zero
state, and a causal mixer never lets the padding at the end affect earlier tokens. The result for each run therefore
equals that of the run alone.

A run is the whole row under ``full``, otherwise a document. The anchor is a separate run: documents see it through
attention, but no state passes from it into them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.attention.layout import PackedLayout, cached_per_layout
from ropewalk.errors import EngineError
from ropewalk.models.attention.hooks import LayoutCall, has_layout
from ropewalk.models.attention.kernels import boundary_keywords
from ropewalk.models.attention.kv_cache import NAMES as CACHES
from ropewalk.models.compute.losses import decoder_of
from ropewalk.models.config.model import ModelConfig
from ropewalk.versions import older_transformers

SHORT = 32
"""Runs of up to this many tokens share a batch. Longer runs share one with runs of more than half their length, so
padding at most doubles the work."""
PACKED_SINCE = {"lfm2": "5.22", "lfm2_moe": "5.22"}
"""Model types whose layers pass the layout on to their mixer only from this transformers on."""


def refuse_older_transformers(config: ModelConfig) -> None:
    """Refuse packed rows for a model whose layout would not reach its recurrent layers.

    Raises:
        EngineError: if the installed transformers is older than the first version that works.
    """
    since = PACKED_SINCE.get(config.model_type or "")
    if since is not None and (installed := older_transformers(since)) is not None:
        raise EngineError(
            f"transformers {installed} does not pass the document boundaries of packed rows to the recurrent layers of "
            f"{config.model_type}; "
            f"use transformers {since} or later"
        )


def install(model: nn.Module, config: ModelConfig) -> None:
    """Make the recurrent layers of a model restart where the layout of a call requires it.

    Args:
        model: a transformers decoder; its mixer instances are changed.
        config: config of the model.

    Raises:
        EngineError: if the mixer of a layer is not the attribute expected for its model type.
    """
    for mixer in mixers_of(model, config):
        boundaries = boundary_keywords(mixer, config.model_type)
        mixer.forward = _RunByRun(type(mixer).__name__, mixer.forward, boundaries)


def mixers_of(model: nn.Module, config: ModelConfig) -> list[nn.Module]:
    """The mixers of a model's recurrent layers, first to last.

    Raises:
        EngineError: if transformers has them under other attributes than expected.
    """
    if not config.recurrent_layers:
        return []
    layers, name = getattr(decoder_of(model), "layers", ()), config.mixer_name
    found = []
    for number in config.recurrent_layers:
        mixer = getattr(layers[number], name or "", None) if number < len(layers) else None
        if not isinstance(mixer, nn.Module):
            raise EngineError(
                f"layer {number} of {type(model).__name__} has no module {name!r}, where ropewalk expects the "
                "layer's recurrent mixer, so packed documents would leak into each other through this layer"
            )
        found.append(mixer)
    return found


class _RunByRun:
    """Forward of one mixer: run by run if it receives a layout, otherwise unchanged.

    The layout is taken from the keyword arguments: with activation checkpointing, the forward runs again in the
    backward pass, outside of any call of the model.
    """

    def __init__(self, name: str, forward: Callable[..., Any], boundaries: dict[str, str] | None) -> None:
        """Wrap a forward; ``boundaries`` are as :func:`boundary_keywords` returns them."""
        self.name, self.forward, self.boundaries = name, forward, boundaries

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: LayoutCall | None = kwargs.get("layout")
        if call is None:
            if has_layout():
                raise EngineError(
                    f"{self.name} receives no keyword arguments from its layer, so the document boundaries of packed "
                    "rows cannot reach this module; this architecture cannot be trained on packed rows"
                )
            return self.forward(*args, **kwargs)
        # A group of one rank has whole rows in storage order.
        if call.sharded is not None and call.sharded.groups.ring * call.sharded.groups.sequence > 1:
            raise EngineError(
                f"{self.name} is recurrent, and its state does not pass between ranks; use parallel.ring 1 and "
                "parallel.sequence 1"
            )
        hidden = args[0] if args else kwargs["hidden_states"]
        # With a layout there is neither a padding mask nor a cache.
        options = {key: value for key, value in kwargs.items() if key not in ("hidden_states", "layout")}
        options |= {key: None for key in ("attention_mask", *CACHES) if key in options}
        batches = run_batches(call.layouts, hidden.device)
        if batches is None:
            return self.forward(hidden, *args[1:], **options)
        if self.boundaries is not None:
            runs = run_sequence(call.layouts, hidden.device)
            options |= {keyword: getattr(runs, form) for keyword, form in self.boundaries.items()}
            # Kernels take boundaries in a batch of one row.
            output = self.forward(
                hidden.flatten(0, 1).index_select(0, runs.tokens)[None], *args[1:], **options
            )
            return output[0].index_select(0, runs.back).unflatten(0, hidden.shape[:2])
        flat, outputs, rest = hidden.flatten(0, 1), [], 0
        for batch in batches.batches:
            padded = flat.new_zeros(batch.runs * batch.longest, flat.shape[1])
            # Padding stands behind a run, so a causal mixer computes it after, and never from it into, the
            # run's tokens.
            padded = padded.index_copy(0, batch.places, flat.index_select(0, batch.tokens))
            output = self.forward(padded.unflatten(0, (batch.runs, batch.longest)), *args[1:], **options)
            if isinstance(output, tuple):
                # The final state of a run, which is not needed without a cache.
                rest, output = len(output) - 1, output[0]
            outputs.append(output.flatten(0, 1).index_select(0, batch.places))
        merged = torch.cat(outputs).index_select(0, batches.back).unflatten(0, hidden.shape[:2])
        return (merged, *[None] * rest) if rest else merged


@dataclass(frozen=True, eq=False)
class RunBatch:
    """Runs of similar length, padded at the end.

    Attributes:
        runs, longest: number of runs, and tokens of the longest run.
        tokens: int64 ``[tokens]``, indices into the concatenated rows.
        places: int64 ``[tokens]``, index of each token in ``runs x longest``.
    """

    runs: int
    longest: int
    tokens: Tensor
    places: Tensor


@dataclass(frozen=True, eq=False)
class RunBatches:
    """All runs of a batch of rows.

    Attributes:
        batches: the batches, by length.
        back: int64 ``[batch * length]``: for each token of the rows its index in the concatenated batches.
    """

    batches: tuple[RunBatch, ...]
    back: Tensor


@dataclass(frozen=True, eq=False)
class RunSequence:
    """All runs of a batch of rows, one after another, with their boundaries.

    Attributes:
        tokens: int64 ``[batch * length]``, indices into the concatenated rows.
        back: int64 ``[batch * length]``: for each token of the rows its index in ``tokens``.
        seq_idx: int32 ``[1, batch * length]``, number of each token's run.
        cu_seqlens: int64 ``[runs + 1]``, where runs start and end in ``tokens``.
    """

    tokens: Tensor
    back: Tensor
    seq_idx: Tensor
    cu_seqlens: Tensor


@cached_per_layout
def run_sequence(layouts: tuple[PackedLayout, ...], device: torch.device) -> RunSequence:
    """Plan how to hand the runs of a batch of rows to kernels that take boundaries.

    Args:
        layouts: one layout for each row, all of the same length.
        device: device of the tensors.
    """
    tokens, lengths = _tokens_by_run(layouts)
    numbers = torch.arange(len(lengths), dtype=torch.int32).repeat_interleave(lengths)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return RunSequence(
        tokens.to(device), torch.argsort(tokens).to(device), numbers[None].to(device), cu_seqlens.to(device)
    )


@cached_per_layout
def run_batches(layouts: tuple[PackedLayout, ...], device: torch.device) -> RunBatches | None:
    """Plan how to gather the runs of a batch of rows for a recurrent layer; None if each row is one run.

    Args:
        layouts: one layout for each row, all of the same length.
        device: device of the index tensors.
    """
    order, lengths = _tokens_by_run(layouts)
    if len(lengths) == len(layouts):
        return None
    starts = lengths.cumsum(0) - lengths
    # The smallest power of two that is at least the length of the run.
    size = 2 ** (lengths.clamp(min=SHORT) - 1).double().log2().floor().long().add(1)
    batches = []
    for each in torch.unique(size).tolist():
        # Runs of similar length share a batch, so padding at most doubles the tokens.
        chosen = torch.nonzero(size == each).flatten()
        mine, longest = lengths[chosen], int(lengths[chosen].max())
        inside = torch.arange(int(mine.sum())) - (mine.cumsum(0) - mine).repeat_interleave(mine)
        tokens = order[starts[chosen].repeat_interleave(mine) + inside]
        places = (torch.arange(len(chosen)) * longest).repeat_interleave(mine) + inside
        batches.append(RunBatch(len(chosen), longest, tokens.to(device), places.to(device)))
    # Every token is in exactly one run, so sorting the gathered indices inverts the gather.
    gathered = torch.cat([batch.tokens for batch in batches])
    return RunBatches(tuple(batches), torch.argsort(gathered))


def _tokens_by_run(layouts: tuple[PackedLayout, ...]) -> tuple[Tensor, Tensor]:
    """The runs of all rows in order: int64 indices into the concatenated rows, and int64 length of each run."""
    length = layouts[0].total_length
    order = torch.cat([layout.storage_in_order + row * length for row, layout in enumerate(layouts)])
    return order, torch.cat([_run_lengths(layout) for layout in layouts])


def _run_lengths(layout: PackedLayout) -> Tensor:
    """int64: tokens of each run of a row in the order of ``storage_in_order``, with the anchor before the documents."""
    if layout.pattern == "full":
        return torch.tensor([layout.total_length])
    anchor = torch.tensor([layout.anchor_length] if layout.anchor_length else [], dtype=torch.int64)
    return torch.cat([anchor, layout.document_lengths])
