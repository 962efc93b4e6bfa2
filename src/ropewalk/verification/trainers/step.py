"""Record one optimizer step from outside: what each micro-batch held, its targets, and the weight of each target.

The gradient at a decoder's last hidden state tells both. Under cross entropy it is ``weight * (W^T p - W[target])``:
the target is the row of the output embedding that explains the gradient, and the weight is its factor. However a
trainer computes its loss, shifts its labels or divides its sums, this is what the model is trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ropewalk.models.compute.losses import OutputHead, decoder_of
from ropewalk.models.rope.rotary import rotary_modules
from ropewalk.verification.checks.effective_rope import Applied, cos_sin_of
from ropewalk.verification.trainers.target import Documents

OUTSIDE = -1
"""Document of a token that is in none: padding, BOS, EOS."""
NO_TARGET = -1
"""Target of a token that is not trained on."""
UNCLEAR = -2
"""Target of a token whose gradient is not that of cross entropy on one target."""
UNEXPLAINED = {torch.float32: 1e-4, torch.float64: 1e-4}
"""Largest share of a gradient that rounding leaves unexplained by its target; smoothed labels leave more."""
UNEXPLAINED_IN_16_BITS = 0.2


@dataclass(eq=False)
class MicroBatch:
    """One forward pass of a step.

    Attributes:
        ids: int64 ``[rows, tokens]``, on the CPU like all tensors here.
        owners, places: document of each token, and its number in it; ``OUTSIDE`` for other tokens.
        args, kwargs: arguments of the decoder.
        hidden_dtype: dtype of the last hidden state, or that of autocast.
        targets: target of each token; None before the backward pass.
        weights: factor of each token's loss in the gradient; 0 without a target.
        rotary: for each layer type, the positions of the first row and what the rotary module returned for them.
    """

    ids: Tensor
    owners: Tensor
    places: Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_dtype: torch.dtype = torch.float32
    targets: Tensor | None = None
    weights: Tensor | None = None
    rotary: dict[str | None, tuple[Tensor, Applied]] = field(default_factory=dict)

    def with_ids(self, ids: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of the decoder with other token ids."""
        kwargs = {**self.kwargs, "use_cache": False} if "use_cache" in self.kwargs else dict(self.kwargs)
        if "input_ids" in kwargs:
            place = kwargs["input_ids"].device
            return self.args, {**kwargs, "input_ids": ids.to(place)}
        return (ids.to(self.args[0].device), *self.args[1:]), kwargs


@contextmanager
def recorded(model: Any, documents: Documents) -> Iterator[list[MicroBatch]]:
    """Record every forward and backward pass of a model's decoder while the context is open."""
    decoder, head = decoder_of(model), OutputHead.unchecked(model)
    batches: list[MicroBatch] = []
    owners = {
        token: (number, place) for number, each in enumerate(documents) for place, token in enumerate(each)
    }

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        # Passes without gradients are the trainer's own evaluation, or generation.
        if not torch.is_grad_enabled() or ids is None:
            return
        found = [owners.get(token, (OUTSIDE, OUTSIDE)) for token in ids.flatten().tolist()]
        own, places = torch.tensor(found).view(*ids.shape, 2).unbind(-1)
        batches.append(MicroBatch(ids.detach().cpu().clone(), own, places, args, dict(kwargs)))

    def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output.last_hidden_state
        if not torch.is_grad_enabled() or not hidden.requires_grad or not batches:
            return
        batch = batches[-1]
        kind = hidden.device.type
        # The output head, and so the gradient, has the precision of autocast.
        autocast = torch.is_autocast_enabled(kind)
        batch.hidden_dtype = torch.get_autocast_dtype(kind) if autocast else hidden.dtype

        def learn(gradient: Tensor) -> None:
            computed = hidden.detach().to(batch.hidden_dtype)
            batch.targets, batch.weights = targets_of(computed, gradient, batch.ids, head)

        hidden.register_hook(learn)

    def turned(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        positions = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
        if not batches or positions is None or not torch.is_grad_enabled():
            return
        kind = kwargs.get("layer_type", args[2] if len(args) > 2 else None)
        cos, sin = cos_sin_of(output)
        first = positions.detach().cpu().reshape(-1, positions.shape[-1])[0]
        applied = Applied(cos.detach().double(), sin.detach().double(), cos.dtype, False)
        batches[-1].rotary[kind] = first, applied

    hooks = [
        decoder.register_forward_pre_hook(before, with_kwargs=True),
        decoder.register_forward_hook(after, with_kwargs=True),
    ]
    hooks += [each.register_forward_hook(turned, with_kwargs=True) for *_, each in rotary_modules(decoder)]
    try:
        yield batches
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def targets_of(hidden: Tensor, gradient: Tensor, ids: Tensor, head: OutputHead) -> tuple[Tensor, Tensor]:
    """Target and weight of every token, from the gradient of the loss at the hidden states.

    Args:
        hidden, gradient: ``[rows, tokens, hidden_size]``.
        ids: int64 ``[rows, tokens]``; the targets are looked for among them.
        head: the model's output head.

    Returns:
        Targets (or ``NO_TARGET``, ``UNCLEAR``) int64 and weights float64, both ``[rows, tokens]`` on the CPU.
    """
    weight = head.linear.weight.float()
    given = gradient.flatten(0, 1).float()
    logits = head.logits(hidden.flatten(0, 1).to(head.linear.weight.dtype)).float()
    # Derivative of each logit by the head's linear map: the soft cap flattens large ones.
    slope = torch.full_like(logits, head.multiplier)
    if head.softcap is not None:
        slope = slope * (1 - (logits / head.softcap).square())
    mean = (slope * logits.softmax(-1)) @ weight
    # The whole vocabulary would take memory for tokens times vocabulary times width; a target is a token of the batch.
    candidates = ids.unique().to(weight.device)
    directions = mean[:, None] - slope[:, candidates][..., None] * weight[candidates]
    # Least squares: the multiple of each candidate's gradient that is nearest to the one found.
    factors = (directions * given[:, None]).sum(-1) / directions.square().sum(-1)
    rest = (given[:, None] - factors[..., None] * directions).norm(dim=-1)
    error, best = rest.min(-1)
    size = given.norm(dim=-1)
    targets, factor = candidates[best], factors.gather(1, best[:, None])[:, 0]
    most = UNEXPLAINED.get(hidden.dtype, UNEXPLAINED_IN_16_BITS)
    targets = torch.where(error <= most * size, targets, UNCLEAR)
    targets = torch.where(size > 0, targets, NO_TARGET)
    factor = torch.where(targets >= 0, factor, 0.0)
    return targets.view(ids.shape).cpu(), factor.view(ids.shape).double().cpu()
