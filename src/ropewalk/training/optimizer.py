"""AdamW over float32 master weights, and the learning rate as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ropewalk.training.recipe.recipe import Optimizer, Schedule

STATE_KINDS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of every parameter."""


def learning_rate_at(step: int, peak: float, warmup_steps: int, steps: int, schedule: Schedule) -> float:
    """Learning rate of one step.

    Args:
        step: counted from 0.
        peak: the rate after the warm-up.
        warmup_steps: steps of linear warm-up; the first step has ``peak / warmup_steps``, not 0.
        steps: steps in all; linear and cosine reach 0 just after the last one.
        schedule: what follows the warm-up.
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    progress = (step - warmup_steps) / (steps - warmup_steps)
    return peak * (1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2)


class MasterAdamW:
    """AdamW that keeps float32 masters of parameters in a narrower dtype, and sums gradients in float32.

    Where a parameter is float32 already it is its own master, and this is plain AdamW. Gradients are moved
    over after each backward pass, so that accumulation over micro-batches never happens in bfloat16.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: Optimizer,
        masters: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Start from parameters, by name, tied ones once. Matrices decay, vectors do not.

        ``masters`` are the float32 values that narrower parameters were rounded from; from the parameters
        themselves if None.
        """
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        given = masters or {}
        self.masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(given.get(name, p).detach().float().clone())
            for name, p in self.parameters.items()
        }
        self.max_grad_norm = settings.max_grad_norm
        decayed = [m for m in self.masters.values() if m.dim() >= 2]
        others = [m for m in self.masters.values() if m.dim() < 2]
        self.adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
        )

    def collect_gradients(self) -> None:
        """Add what one backward pass left in the parameters to the masters' float32 gradients."""
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def clip(self) -> Tensor:
        """Scale the gradients to at most ``max_grad_norm`` and return their norm before."""
        return nn.utils.clip_grad_norm_(list(self.masters.values()), self.max_grad_norm)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of the masters, rounded into the parameters."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self._round()

    def _round(self) -> None:
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def zero_grad(self) -> None:
        for owner in (self.parameters, self.masters):
            for tensor in owner.values():
                tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """What the next step depends on beside the weights (:meth:`weights`), as named tensors.

        Zeros, as AdamW begins with, for what has not been updated yet.
        """
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            there = self.adamw.state.get(master) or {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
            for key, value in there.items():
                tensors[f"{key}.{name}"] = value.detach()
        return tensors

    def weights(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A model's state dict with the float32 masters in the places of its parameters, tied ones too."""
        masters = {p.data_ptr(): self.masters[name].detach() for name, p in self.parameters.items()}
        return {key: masters.get(tensor.data_ptr(), tensor) for key, tensor in state_dict.items()}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Put back what :meth:`state` gave, for the same parameters and masters, and round those into the parameters.

        The tensors become the optimiser's own: later steps change them.

        Raises:
            KeyError: if a tensor is missing.
        """
        for name, master in self.masters.items():
            self.adamw.state[master] = {
                key: tensors[f"{key}.{name}"].to(master.device if key != "step" else "cpu")
                for key in STATE_KINDS
            }
        self._round()
