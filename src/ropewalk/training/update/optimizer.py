"""AdamW with float32 master weights, and learning-rate schedules as a pure function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ropewalk.attention.engines.capabilities import SIMULATED
from ropewalk.training.recipe.recipe import Optimizer, Stage
from ropewalk.training.update.host_copies import HostCopies

STATE_KINDS = ("step", "exp_avg", "exp_avg_sq")
"""Names of the tensors that AdamW keeps for every parameter."""


def learning_rate_at(step: int, stage: Stage) -> float:
    """Learning rate of one step of a stage, counted from 0.

    The first step of the linear warm-up has ``learning_rate / warmup_steps``, not 0. A decay begins at the peak and
    reaches ``min_learning_rate`` one step after the last, as transformers' schedules do.

    Source: Hu et al., MiniCPM, arXiv:2404.06395, for warmup-stable-decay; its decay is linear here.
    """
    peak, least = stage.learning_rate, stage.min_learning_rate
    if step < stage.warmup_steps:
        return peak * (step + 1) / stage.warmup_steps
    start = stage.warmup_steps
    if stage.schedule == "warmup-stable-decay":
        start = stage.steps - stage.decay_steps
    if stage.schedule == "constant" or step < start:
        return peak
    progress = (step - start) / (stage.steps - start)
    share = (1 + math.cos(math.pi * progress)) / 2 if stage.schedule == "cosine" else 1 - progress
    # Without a minimum this is the product alone, to the last bit as before.
    return least + (peak - least) * share if least else peak * share


def _own_master(parameter: nn.Parameter, offload: bool) -> bool:
    """Whether AdamW updates the parameter itself."""
    return parameter.dtype == torch.float32 and (not offload or isinstance(parameter, DTensor))


def _master(values: Tensor, offload: bool) -> nn.Parameter:
    here = values.detach().to("cpu" if offload else values.device)
    # float() returns a float32 tensor itself, so without clone the optimizer would change the caller's.
    return nn.Parameter(here.float().clone())


class MasterAdamW:
    """AdamW that keeps float32 master weights of narrower parameters, and accumulates gradients in float32.

    A float32 parameter is its own master, which makes this plain AdamW. Gradients are moved to the masters after each
    backward, so micro-batches never accumulate in bfloat16.

    With ``offload``, masters, gradients and moments are in CPU memory, and AdamW runs there: each gradient is sent to
    its master as soon as the backward has made it, and leaves the device. A sharded model must have its shards in CPU
    memory (``shard_model(offload=True)``), which are their own masters then.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        settings: Optimizer,
        masters: Mapping[str, Tensor] | None = None,
        offload: bool = False,
    ) -> None:
        """Create the optimizer.

        Args:
            parameters: names and parameters, tied ones once; weight decay applies to matrices but not to vectors.
            settings: hyperparameters of AdamW.
            masters: float32 values that narrower parameters were rounded from; if None, masters are cast from the
                parameters.
            offload: whether masters and moments are in CPU memory.
        """
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        given = masters or {}
        self.masters = {
            name: p if _own_master(p, offload) else _master(given.get(name, p), offload)
            for name, p in self.parameters.items()
        }
        self._sums: dict[str, Tensor] = {}
        self._copies: HostCopies | None = None
        away = [name for name, p in self.parameters.items() if offload and self.masters[name] is not p]
        if away:
            each = [self.parameters[name] for name in away]
            self._copies = HostCopies(each[0].device, max(p.nbytes for p in each))
            for name in away:
                self.parameters[name].register_post_accumulate_grad_hook(partial(self._send, name))
        self.max_grad_norm = settings.max_grad_norm
        self.betas = settings.beta1, settings.beta2
        # Matrices decay; norms and biases, which have one dimension, do not, as is usual.
        decayed = [m for m in self.masters.values() if m.dim() >= 2]
        others = [m for m in self.masters.values() if m.dim() < 2]
        # A GPU then takes one pass over memory and needs no temporaries, and so does a CPU; without offloading, a CPU
        # keeps the bits that it always had.
        self._counts_on_gpu = any(m.device.type in ("cuda", SIMULATED) for m in self.masters.values())
        self.adamw = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": settings.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            # The schedule sets the rate before every step; a step without it must change nothing.
            lr=0.0,
            betas=self.betas,
            eps=settings.epsilon,
            fused=True if offload or self._counts_on_gpu else None,
        )

    def _send(self, name: str, parameter: Tensor) -> None:
        """Hook of a parameter that has its gradient: the device keeps one at a time, and not those of all layers."""
        assert self._copies is not None
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        self._copies.send(gradient, partial(self._receive, name))

    def _receive(self, name: str, gradient: Tensor) -> None:
        master = self.masters[name]
        if master.grad is not None:
            master.grad.add_(gradient)
            return
        # Kept from step to step: the kernel would clear as many bytes as the masters have each time.
        if name not in self._sums:
            self._sums[name] = torch.empty_like(master)
        self._sums[name].copy_(gradient)
        master.grad = self._sums[name]

    def collect_gradients(self) -> None:
        """Add the gradients of one backward to the masters' float32 gradients, and clear those of the parameters."""
        if self._copies is not None:
            self._copies.finish()
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            # A master that is the parameter itself has its gradient already.
            if master is parameter or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def clip(self) -> Tensor:
        """Scale the gradients to a norm of at most ``max_grad_norm``, and return the norm before scaling."""
        return nn.utils.clip_grad_norm_(list(self.masters.values()), self.max_grad_norm)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Update the masters once, and round them into the parameters."""
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
        self.adamw.step()
        self._round()

    @torch.no_grad()
    def carry_moments(self, betas: tuple[float, float], rewarm: bool = False) -> None:
        """Go on with moments that were made with other decay rates, or count them as the average of one step.

        Both keep what AdamW makes of the moments, the averages without their bias towards zero. The next gradient then
        weighs as much as it does in a run that had these decay rates from its start; after ``rewarm``, as much as the
        second gradient of a run.

        Args:
            betas: decay rates that the moments were made with.
            rewarm: whether to set the number of steps to one.
        """
        if betas == self.betas and not rewarm:
            return
        for master in self.masters.values():
            state = self.adamw.state[master]
            steps = float(state["step"])
            # Without an update the moments are 0, and the divisor below would be 1 - beta**0 = 0.
            if not steps:
                continue
            counted = 1.0 if rewarm else steps
            for kind, before, now in zip(("exp_avg", "exp_avg_sq"), betas, self.betas, strict=True):
                # AdamW divides a moment by 1 - beta**step; the factor makes the quotient what it was.
                state[kind].mul_((1 - now**counted) / (1 - before**steps))
            state["step"].fill_(counted)

    def _round(self) -> None:
        for name, parameter in self.parameters.items():
            master = self.masters[name]
            if self._copies is not None and master is not parameter:
                self._copies.bring(master, parameter)
            elif master is not parameter:
                parameter.copy_(master)
        if self._copies is not None:
            self._copies.finish()

    def zero_grad(self) -> None:
        for owner in (self.parameters, self.masters):
            for tensor in owner.values():
                tensor.grad = None

    def state(self) -> dict[str, Tensor]:
        """Named tensors of the optimizer state; together with :meth:`weights` they determine the next step.

        A parameter without an update yet has zeros, the initial state of AdamW.
        """
        tensors: dict[str, Tensor] = {}
        for name, master in self.masters.items():
            # torch fills the state of a parameter in its first step.
            there = self.adamw.state.get(master) or {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
            for key, value in there.items():
                tensors[f"{key}.{name}"] = value.detach()
        return tensors

    def weights(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's state dict with float32 masters instead of the parameters, tied ones included."""
        # Match by address: a state dict has new tensor objects, and lists tied parameters under each of their names.
        masters = {p.data_ptr(): self.masters[name].detach() for name, p in self.parameters.items()}
        return {key: masters.get(tensor.data_ptr(), tensor) for key, tensor in state_dict.items()}

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Restore tensors from :meth:`state` for the same parameters, and round the masters into the parameters.

        The optimizer takes over the tensors, so later steps modify them in place.

        Raises:
            KeyError: if a tensor is missing.
        """
        for name, master in self.masters.items():
            # The kernel of a GPU reads the step count there; elsewhere AdamW reads it on the host.
            counts = master.device if self._counts_on_gpu else torch.device("cpu")
            self.adamw.state[master] = {
                key: tensors[f"{key}.{name}"].to(counts if key == "step" else master.device)
                for key in STATE_KINDS
            }
        self._round()
