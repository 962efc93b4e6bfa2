"""Routing in mixtures of experts: the number of tokens of each expert, and the load-balancing loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ropewalk.errors import RopewalkError
from ropewalk.models.config.auto_class import decoder_module
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel.mesh import SequenceGroups

RECORDED = "router_logits"
"""Name of the routers' logits among the outputs that transformers' classes can record."""
MOST_RECORDED_SINCE = "5.19"
"""The transformers since which most classes with experts declare them."""

DRAWS_EXPERTS = ("phimoe",)
"""Model types whose routers sample experts in training mode (SparseMixer), whatever their config says."""


def records_routing(config: ModelConfig) -> bool:
    """Whether the model's class declares its router logits; code that comes with a checkpoint is not considered."""
    module = decoder_module(config.source)
    classes = [] if module is None else vars(module).values()
    return any(_specs(each) for each in classes if isinstance(each, type))


def _specs(owner: Any) -> list[Any]:
    recorded = (getattr(owner, "_can_record_outputs", None) or {}).get(RECORDED) or []
    specs = recorded if isinstance(recorded, list) else [recorded]
    # Before transformers 5.19, Llama 4 and EXAONE MoE name a whole block's class, whose output need not hold logits.
    return [spec for spec in specs if not isinstance(spec, type)]


@dataclass(frozen=True, eq=False)
class Router:
    """One router of a model.

    Attributes:
        name: name of its module.
        module: module that returns its logits and usually the chosen experts.
        index: index of the logits, if the module returns several values.
        top_k: experts for each token, if the module does not return the chosen ones.
    """

    name: str
    module: nn.Module
    index: int
    top_k: int

    def read(self, output: Any) -> tuple[Tensor, Tensor]:
        """Logits ``[..., experts]`` and chosen experts ``[..., top_k]`` in the module's output."""
        if not isinstance(output, tuple):
            return output, output.topk(self.top_k, dim=-1).indices
        logits = output[self.index]
        # The chosen experts are the integers among the values.
        for given in output:
            if isinstance(given, Tensor) and not given.is_floating_point() and given.dim() > 1:
                return logits, given
        return logits, logits.topk(self.top_k, dim=-1).indices


def routers_of(model: nn.Module) -> list[Router]:
    """The routers of a transformers model, first to last; none if it has no experts, or its class records none."""
    specs = [spec for module in model.modules() for spec in _specs(type(module))]
    if not specs:
        return []
    config: Any = model.config
    stated = getattr(config.get_text_config(), "num_experts_per_tok", None)
    found = []
    for name, module in model.named_modules():
        for spec in specs:
            # With dots, so that the names of layers match only as a whole.
            place = f".{spec.layer_name.strip('.')}." if spec.layer_name else ""
            if isinstance(module, spec.target_class) and place in f".{name}.":
                parent = model.get_submodule(name.rpartition(".")[0])
                # Depending on the class, the number is in the router, in its block or only in the config.
                top_k = getattr(module, "top_k", None) or getattr(parent, "top_k", None) or stated
                found.append(Router(name, module, spec.index, top_k or 1))
                break
    return found


@dataclass(frozen=True)
class Routing:
    """Distribution of a step's tokens over experts.

    Attributes:
        counts: for each router, the number of tokens that each of its experts received, without padding.
        aux_loss: load-balancing loss; equals the number of experts per token if the load is even. None if it was not
            computed.
    """

    counts: tuple[tuple[int, ...], ...]
    aux_loss: float | None = None

    @property
    def max_violation(self) -> list[float]:
        """For each router, the excess of the busiest expert over the mean load, relative to the mean; 0 if even.

        Source: MaxVio of Wang et al., arXiv:2408.15664.
        """
        return [max(each) * len(each) / sum(each) - 1 for each in self.counts]

    @property
    def entropy(self) -> list[float]:
        """For each router, the entropy of its experts' shares relative to that of even shares; 1 if even."""
        return [_entropy(each) / math.log(len(each)) if len(each) > 1 else 1.0 for each in self.counts]

    @property
    def unused(self) -> list[int]:
        """For each router, the number of its experts that received no token."""
        return [each.count(0) for each in self.counts]


def _entropy(counts: Sequence[int]) -> float:
    total = sum(counts)
    # An expert without tokens contributes 0, whose logarithm does not exist.
    return -sum(count / total * math.log(count / total) for count in counts if count)


@dataclass(eq=False)
class Recorder:
    """Records what routers do with the tokens of the forward passes of one step.

    Attributes:
        routers: routers of the model.
        balancing: whether routers' probabilities are recorded too, as the load-balancing loss needs.
    """

    routers: Sequence[Router]
    balancing: bool
    _totals: dict[str, Tensor] = field(default_factory=dict)
    _is_token: Tensor | None = None
    _counts: list[Tensor] = field(default_factory=list)
    _sums: list[Tensor] = field(default_factory=list)
    _top_k: int = 0
    _open: bool = False

    def begin(self, is_token: Tensor) -> None:
        """Start a forward pass; ``is_token`` ``[rows, tokens]`` is False for padding."""
        self._counts, self._sums = [], []
        self._is_token, self._open = is_token, True

    def see(self, router: Router, module: nn.Module, given: Any, output: Any) -> None:
        """Forward hook of a router's module."""
        if self._is_token is None or not (self._open or self.balancing):
            return
        rows = self._is_token.shape[0]
        logits, chosen = router.read(output)
        if self.balancing:
            # Summed inside the checkpointed layer, so that autograd keeps one number for each expert instead of one
            # for each token. A recomputed layer must therefore run this code again.
            probabilities = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(dim=-1)
            mask = self._is_token[..., None].to(probabilities.dtype)
            sums = (probabilities.reshape(rows, -1, logits.shape[-1]) * mask).sum(dim=1)
        if not self._open:
            return
        if self.balancing:
            self._sums.append(sums)
        with torch.no_grad():
            self._top_k = chosen.shape[-1]
            ones = self._is_token[..., None].expand(-1, -1, self._top_k).reshape(rows, -1).long()
            counts = ones.new_zeros(rows, logits.shape[-1])
            # Padding adds 0, so it counts towards no expert.
            counts.scatter_add_(1, chosen.reshape(rows, -1).long(), ones)
            self._counts.append(counts)
            self._totals[router.name] = self._totals.get(router.name, 0) + counts.sum(dim=0)

    def end(self) -> None:
        """End a forward pass; layers that the backward pass recomputes are not counted again."""
        self._open = False

    def totals(self) -> list[Tensor]:
        """For each router, this rank's tokens that each expert received in all passes so far, int64 ``[experts]``."""
        return [self._totals[router.name] for router in self.routers]

    def balancing_loss(self, groups: SequenceGroups | None) -> Tensor:
        """This rank's part of the load-balancing loss of the pass's rows, each weighted by its tokens.

        The loss of a row is transformers' ``load_balancing_loss_func`` on all its tokens, on whichever ranks they are:
        the number of experts times the sum over experts of ``f * P``. ``f`` is the frequency with which an expert was
        chosen (without gradient) and ``P`` its probability, both averaged over layers and tokens.

        Args:
            groups: the ranks that share a row, all of which call this; None if this rank has the whole row.

        Returns:
            float64 scalar. Its sum over all ranks and passes, divided by the tokens of all rows, is the step's loss.
        """
        counts = torch.stack(self._counts).sum(dim=0)
        # f is a frequency over the whole row, whose tokens may be on several ranks.
        for group in () if groups is None else (groups.sequence_group, groups.ring_group):
            if group is not None:
                dist.all_reduce(counts, group=group)
        # Not summed over ranks: the loss is linear in the probabilities, so the parts of the ranks add up.
        sums = torch.stack([each.double() for each in self._sums]).sum(dim=0)
        layers, experts = len(self._counts), counts.shape[-1]
        # The counts of a row add up to its tokens times layers times top_k, so this is a weighted mean.
        each = (counts * sums).sum(dim=-1) / counts.sum(dim=-1)
        return each.sum() * (experts * self._top_k / layers)


@contextmanager
def recorded_routing(model: nn.Module, balancing: bool) -> Iterator[Recorder]:
    """Record a model's routers within the context manager; a model without routers is not changed.

    Args:
        model: a model from transformers.
        balancing: whether :meth:`Recorder.balancing_loss` will be called.

    Raises:
        RopewalkError: if it will be called, but there are no routers.
    """
    recorder = Recorder(routers_of(model), balancing)
    if balancing and not recorder.routers:
        raise RopewalkError(
            f"router_aux_loss needs routers that transformers records, and {type(model).__name__} has none; set "
            "router_aux_loss: 0"
        )
    hooks = [
        router.module.register_forward_hook(partial(recorder.see, router)) for router in recorder.routers
    ]
    try:
        yield recorder
    finally:
        for hook in hooks:
            hook.remove()
