"""Check that a packed row gives the same losses and gradients as its documents computed separately."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.attention.layout import IGNORED, Row
from ropewalk.models.attention.recurrent import mixers_of
from ropewalk.models.compute.losses import LossModel, decoder_of
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.rope.rotary import rotary_module
from ropewalk.rope import RotaryEmbedding
from ropewalk.verification.case import Case, with_labels
from ropewalk.verification.checks import Claim
from ropewalk.verification.computing import (
    RowResult,
    largest_difference,
    load_whole,
    packed_losses,
    rounding_budget,
    row_losses,
)
from ropewalk.verification.result import Outcome


def packed_equals_separate(case: Case) -> Outcome:
    """Compare token losses and gradients of packed rows with plain causal attention over each document alone."""
    # Short rows have documents of their own, whatever the pattern of the others.
    chosen = [row for row in case.rows if row.layout.pattern != "full"]
    if not chosen:
        return Outcome.not_run(
            "not applicable: with pattern full every token attends to all earlier tokens of the row, so documents are "
            "not separate"
        )
    if case.rope.length_dependent and not case.setup.exact_rope:
        return Outcome.not_run(
            f"not applicable: transformers' own {case.rope.name} uses different frequencies for shorter sequences"
        )
    # The anchor belongs to no document, so it has no counterpart here; the check of labels covers its target.
    rows = [with_labels(row, (row.layout.document_ids >= 0).nonzero().flatten()) for row in chosen]
    model = load_whole(case, torch.float64)
    packed, separate = (row_losses(model, rows, losses) for losses in (packed_losses, separate_losses))
    # The same computation in float32 shows how strongly the model amplifies rounding, from which the float64
    # budget follows.
    narrow = row_losses(load_whole(case, torch.float32), rows, packed_losses)
    both = [{**result.values, "token losses": result.losses} for result in (packed, separate, narrow)]
    found = largest_difference(both[0], both[1])
    budget = rounding_budget(both[2], both[0], torch.float64)
    documents = sum(len(row.layout.document_lengths) for row in rows)
    patterns = " and ".join(dict.fromkeys(row.layout.pattern for row in rows))
    return Outcome.within(
        found.error,
        budget,
        f"{documents} documents in {len(rows)} rows, pattern {patterns}; losses and gradients",
        f"{found.name} differs: {_first_difference(rows, packed, separate, budget)}",
    )


def _first_difference(rows: list[Row], packed: RowResult, separate: RowResult, budget: float) -> str:
    scale = float(separate.losses.abs().max())
    wrong = ((packed.losses - separate.losses).abs() > budget * scale).nonzero()
    if not len(wrong):
        return "the losses agree but the gradients do not, so the backward of attention mixes documents"
    row, token = wrong[0].tolist()
    document = int(rows[row].layout.document_ids[token])
    return (
        f"token {token} of row {row} (document {document}) has loss {float(packed.losses[row, token]):.6f} in the "
        f"packed row and {float(separate.losses[row, token]):.6f} in its own document alone; tokens attend to "
        "other documents of the row, or miss tokens of their own"
    )


def separate_losses(model: LossModel, row: Row) -> Tensor:
    """Token losses ``[length]`` of a row, computed per document with stock causal attention and without a layout.

    A document keeps its positions in the row; with the pattern ``anchor``, the anchor precedes it.
    """
    layout = row.layout
    losses = torch.zeros(layout.total_length, dtype=model.head.linear.weight.dtype, device=model.device)
    # Under anchor, every document sees the anchor before it, so it is put in front of the separate document as well.
    lead = layout.anchor_length if layout.pattern == "anchor" else 0
    for document in range(len(layout.document_lengths)):
        number = int(layout.document_ids[layout.anchor_length :].unique()[document])
        own = (layout.document_ids == number).nonzero().flatten()
        if not bool((row.labels[own] != IGNORED).any()):
            continue
        places = torch.cat([torch.arange(lead), own])
        hidden = _plain(model, row.input_ids[places], layout.position_ids[places], layout.rope_length, lead)[
            lead:
        ]
        targets = row.labels[own].to(model.device)
        found = F.cross_entropy(model.head.logits(hidden), targets, reduction="none", ignore_index=IGNORED)
        losses = losses.index_add(0, own.to(model.device), found)
    return losses


def _plain(model: LossModel, ids: Tensor, positions: Tensor, length: int, lead: int) -> Tensor:
    """Hidden states ``[tokens, hidden_size]`` of one sequence at given positions, after ``lead`` anchor tokens."""
    rotary: Any = rotary_module(model.model)[2]
    # Length-dependent RoPE methods must use the length of the whole row.
    pinned = rotary.pinned(length) if isinstance(rotary, RotaryEmbedding) else nullcontext()
    device = model.device
    with pinned, _tuned_at(model.model, positions.to(device)), _restarting_behind(model.model, lead):
        output = decoder_of(model.model)(
            ids[None].to(device),
            position_ids=positions[None].to(device),
            # Without an explicit mask, transformers interprets a jump in position as the start of a new document.
            attention_mask=torch.ones(1, len(ids), dtype=torch.int64, device=device),
            use_cache=False,
        )
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


@contextmanager
def _restarting_behind(model: Any, lead: int) -> Iterator[None]:
    """While the context is open, recurrent layers treat the first ``lead`` tokens as a separate sequence.

    Recurrent layers ignore the anchor: in a packed row their state starts at the beginning of each document.
    """
    config = ModelConfig.of(model.config)
    with ExitStack() as stack:
        for mixer in mixers_of(model, config) if lead and config.recurrent_layers else ():
            # Bound as a default, because the variable of the loop changes before the call.
            def apart(*args: Any, own: Any = mixer.forward, **kwargs: Any) -> Any:
                hidden, *rest = args or (kwargs.pop("hidden_states"),)
                # A recurrent layer has no mask to hide the anchor with, so its state restarts behind the
                # anchor, as in the packed row.
                cut = hidden.split([lead, hidden.shape[1] - lead], dim=1)
                parts = [own(part, *rest, **kwargs) for part in cut]
                # What stands behind the output (a state or weights) is for caches, which this pass does not use.
                if isinstance(parts[0], tuple):
                    return torch.cat([part[0] for part in parts], dim=1), None
                return torch.cat(parts, dim=1)

            stack.callback(setattr, mixer, "forward", mixer.forward)
            mixer.forward = apart
        yield


@contextmanager
def _tuned_at(model: Any, positions: Tensor) -> Iterator[None]:
    """While the context is open, Llama 4's attention temperature tuning uses these positions.

    In layers without RoPE, Llama 4 scales queries by their index in the tensor. For a document computed alone, the
    index differs from the position in the row.
    """
    tuned = [
        module
        for module in model.modules()
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True)
    ]
    with ExitStack() as stack:
        for module in tuned:
            stack.callback(setattr, module, "attn_temperature_tuning", module.attn_temperature_tuning)
            module.attn_temperature_tuning = False
            # The formula of transformers, with positions in the row in place of indices in the tensor.
            steps = torch.log1p(torch.floor((positions.float() + 1) / module.floor_scale))
            factor = (1 + module.attn_scale * steps)[None, :, None]
            # In layers without RoPE the tuning directly follows this projection, so a hook on its output is equivalent.
            hook = module.q_proj.register_forward_hook(lambda _, args, query, by=factor: query * by)
            stack.callback(hook.remove)
        yield


CLAIMS = (
    Claim(
        "documents",
        20,
        "packed row = separate documents",
        "packed rows with each document by itself, plain attention",
        packed_equals_separate,
    ),
)
