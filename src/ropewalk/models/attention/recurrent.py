"""Recurrent layers in packed rows: their state and convolution restart at each document.

Gated DeltaNet, Mamba-2, lightning attention and short convolutions carry a state from token to token, and no mask
applies to it. In a model call with a layout, the forward of each such layer's mixer (patched on the instance) gathers
the runs of the rows. Installed kernels that take boundaries get them one after another
(:mod:`ropewalk.models.attention.kernels`). Otherwise they form a batch of their own: each entry starts with a zero
state, and a causal mixer never lets the padding at the end affect earlier tokens. The result for each run therefore
equals that of the run alone. If the rows are spread over ranks, the state passes from rank to rank
(:mod:`ropewalk.models.attention.passed_states`).

A run is the whole row under ``full``, otherwise a document. The anchor is a separate run: documents see it through
attention, but no state passes from it into them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ropewalk.errors import EngineError
from ropewalk.models.attention.hooks import LayoutCall, has_layout
from ropewalk.models.attention.kernels import boundary_keywords, functions_of, in_dry_run, played
from ropewalk.models.attention.kv_cache import NAMES as CACHES
from ropewalk.models.attention.passed_states import passed
from ropewalk.models.attention.runs import run_batches, run_sequence
from ropewalk.models.compute.losses import decoder_of
from ropewalk.models.compute.own_globals import with_globals
from ropewalk.models.config.layers import LIGHTNING
from ropewalk.models.config.model import ModelConfig
from ropewalk.versions import older_transformers

PACKED_SINCE = {"lfm2": "5.22", "lfm2_moe": "5.22"}
"""Model types whose layers pass the layout on to their mixer only from this transformers on."""
ON_RANKS_SINCE = "5.24"
"""The transformers from which on every mixer calls the functions through which a state passes between ranks."""


def passes_states(config: ModelConfig) -> bool:
    """Whether the states of a model's recurrent layers, if any, pass between ranks that share a row."""
    return not config.recurrent_layers or older_transformers(ON_RANKS_SINCE) is None


def refuse_older_transformers(config: ModelConfig, on_ranks: bool = False) -> None:
    """Refuse packed rows for a model whose layout would not reach its recurrent layers.

    Args:
        config: config of the model.
        on_ranks: whether several ranks share a row.

    Raises:
        EngineError: if the installed transformers is older than the first version that works.
    """
    if on_ranks and not passes_states(config):
        installed = older_transformers(ON_RANKS_SINCE)
        raise EngineError(
            f"transformers {installed} gives no access to the state of the model's recurrent layers, which has to pass "
            f"between the ranks that share a row; use transformers {ON_RANKS_SINCE} or later, or set parallel.ring and "
            "parallel.sequence to 1"
        )
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
        assert config.mixer is not None
        mixer.forward = _RunByRun(mixer, config.mixer.recurrence)


def mixers_of(model: nn.Module, config: ModelConfig) -> list[nn.Module]:
    """The mixers of a model's recurrent layers, first to last.

    Raises:
        EngineError: if transformers has them under other attributes than expected.
    """
    if not config.recurrent_layers:
        return []
    # Beside encoders, the text decoder is a part of what maps token ids to hidden states.
    decoder = decoder_of(model).get_decoder()
    layers, name = getattr(decoder, "layers", ()), config.mixer and config.mixer.attribute
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

    def __init__(self, mixer: nn.Module, recurrence: str) -> None:
        """Wrap the forward of a mixer."""
        self.mixer, self.recurrence, self.forward = mixer, recurrence, mixer.forward
        self.boundaries = boundary_keywords(mixer, recurrence)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call: LayoutCall | None = kwargs.get("layout")
        if call is None:
            if has_layout():
                raise EngineError(
                    f"{type(self.mixer).__name__} receives no keyword arguments from its layer, so the document "
                    "boundaries of packed rows cannot reach this module; this architecture cannot be trained on packed "
                    "rows"
                )
            return self.forward(*args, **kwargs)
        hidden = args[0] if args else kwargs["hidden_states"]
        # With a layout there is neither a padding mask nor a cache.
        options = {key: value for key, value in kwargs.items() if key not in ("hidden_states", "layout")}
        options |= {key: None for key in ("attention_mask", *CACHES) if key in options}
        # A group of one rank has whole rows in storage order.
        if call.sharded is not None and call.sharded.groups.ring * call.sharded.groups.sequence > 1:
            return passed(self.mixer, self.recurrence, call.sharded, hidden, *args[1:], **options)
        forward, boundaries = self.forward, self.boundaries
        if in_dry_run():
            forward, boundaries = self.played(), boundary_keywords(self.mixer, self.recurrence)
        batches = run_batches(call.layouts, hidden.device)
        if batches is None:
            return forward(hidden, *args[1:], **options)
        if boundaries is not None:
            batches = run_sequence(call.layouts, hidden.device)
            (runs,) = batches.batches
            options |= {keyword: getattr(runs, form) for keyword, form in boundaries.items()}
        outputs, rest = [], 0
        for batch in batches.batches:
            # Padding stands behind a run, so a causal mixer computes it after, and never from it into, the
            # run's tokens.
            output = forward(batch.padded(hidden.flatten(0, 1)), *args[1:], **options)
            if isinstance(output, tuple):
                # The final state of a run, which is not needed without a cache.
                rest, output = len(output) - 1, output[0]
            outputs.append(batch.unpadded(output))
        merged = torch.cat(outputs).index_select(0, batches.back).unflatten(0, hidden.shape[:2])
        return (merged, *[None] * rest) if rest else merged

    def played(self) -> Callable[..., Any]:
        """The forward, with the functions that a dry run plays in place of those that it calls."""
        if self.recurrence == LIGHTNING:
            return played(LIGHTNING, self.forward, self.mixer.block_size, self.mixer)  # type: ignore[arg-type]
        functions = functions_of(self.mixer, self.recurrence)
        if functions is None:
            return self.forward
        return partial(with_globals(inspect.unwrap(type(self.mixer).forward), functions), self.mixer)
