"""A fused function in a dry run: what a compiler would allocate for it, and keep for its backward.

Elementwise operators of a compiled function become kernels whose intermediate values stay in registers. Products have
kernels of their own, so their operands and results have memory. For the backward, torch's compiler keeps inputs,
operands that products need again, and the results of products from which everything else is computed once more. The
function itself runs as it is, on tensors without data, and autograd's graph of it stays, of which only the account says
otherwise.

Source: ``torch/_functorch/partitioners.py``, ``min_cut_rematerialization_partition``, with
``ban_recompute_materialized_backward``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ropewalk.training.simulation.bytes_moved import bytes_of, tensors_in


@dataclass(eq=False)
class FusedCall:
    """What happened inside a fused function.

    Its kernels read what has memory already, and write what products or the caller need; the rest stays in registers.

    Attributes:
        has_memory: whether a storage of this key has memory.
        products: results of products.
        operands: keys of the storages that products read.
        allocated: keys of the storages that got memory.
        stand_ins: keys of the storages that stand for the inputs.
        bytes: bytes that its kernels read and write, without those of products.
    """

    has_memory: Callable[[int], bool]
    products: list[Tensor] = field(default_factory=list)
    operands: set[int] = field(default_factory=set)
    allocated: list[int] = field(default_factory=list)
    stand_ins: set[int] = field(default_factory=set)
    bytes: int = 0
    _seen: set[int] = field(default_factory=set)
    _made: dict[int, int] = field(default_factory=dict)
    _sources: dict[int, set[int]] = field(default_factory=dict)

    def elementwise(self, inputs: Iterable[Tensor], made: Any) -> None:
        """An operator runs that is no product, and makes these tensors."""
        inputs = list(inputs)
        self.reads(inputs)
        for each in tensors_in(made):
            self._made[_key(each)] = bytes_of(each)
            self._sources[_key(each)] = {source for x in inputs for source in self.products_of(_key(x))}
            self._forget_when_freed(each)

    def product(self, operands: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """A product runs."""
        self.products += results
        for each in operands:
            self.operands.add(_key(each))
            self._forget_when_freed(each)

    def products_of(self, key: int) -> set[int]:
        """Keys of the products that a value is computed from, by no other product."""
        return {key} if key in map(_key, self.products) else self._sources.get(key, set())

    def reads(self, tensors: Iterable[Tensor]) -> None:
        """Kernels read these tensors, each once."""
        for each in tensors:
            key = _key(each)
            if key in self._seen or key in self._made:
                continue
            if key in self.stand_ins or self.has_memory(key):
                self._seen.add(key)
                self.bytes += bytes_of(each)
                self._forget_when_freed(each)

    def writes(self, tensors: Any) -> None:
        """Products inside, or the caller, need these tensors."""
        for each in tensors_in(tensors):
            if (key := _key(each)) in self._made:
                self.bytes += self._made.pop(key)
                self._seen.add(key)

    def _forget_when_freed(self, tensor: Tensor) -> None:
        """A later tensor may get the key of one that is gone."""
        # Not a method of this object, whose products would live as long as the tensor.
        places = (self._made, self._sources, self._seen, self.operands)
        weakref.finalize(tensor.untyped_storage(), _forget, *places, _key(tensor))


def _forget(
    made: dict[int, int], sources: dict[int, set[int]], seen: set[int], operands: set[int], key: int
) -> None:
    for table in (made, sources):
        table.pop(key, None)
    for keys in (seen, operands):
        keys.discard(key)


class Account(Protocol):
    """The recorder's account of memory; see :class:`~ropewalk.training.simulation.recording.Recorder`."""

    def one_operator(self, name: str) -> AbstractContextManager[FusedCall]: ...
    def allocate(self, tensors: Any, operator: str) -> None: ...
    def occupies_nothing(self, tensor: Tensor) -> None: ...
    def moved(self, tensor: Tensor) -> Tensor: ...
    def release(self, key: int) -> None: ...


def run_fused(account: Account, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function as one operator, with gradients if it is to have any."""
    given, structure = tree_flatten((args, kwargs))
    places = [place for place, each in enumerate(given) if isinstance(each, Tensor)]
    inputs = [given[place] for place in places]
    parameters = [p for each in given if isinstance(each, nn.Module) for p in each.parameters()]
    name = function.__qualname__

    def call(tensors: Sequence[Tensor]) -> Any:
        filled = list(given)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        positional, named = tree_unflatten(filled, structure)
        return function(*positional, **named)

    if torch.is_grad_enabled() and any(each.requires_grad for each in (*inputs, *parameters)):
        return _Fused.apply(account, name, call, len(inputs), *inputs, *parameters)
    with account.one_operator(name) as inside:
        result = call(inputs)
        inside.writes(result)
    account.allocate(result, name)
    return result


class _Fused(torch.autograd.Function):
    """A fused function whose backward is fused too."""

    @staticmethod
    def forward(ctx: Any, account: Account, name: str, call: Any, number: int, *given: Tensor) -> Any:
        inputs, parameters = given[:number], given[number:]
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[_key(tensor)] = tensor
            return tensor

        with (
            account.one_operator(name) as inside,
            torch.enable_grad(),
            saved_tensors_hooks(pack, lambda x: x),
        ):
            # The graph must not hold inputs, or they would live until the backward whether it needs them or not.
            stand_ins = [_stand_in(account, each) for each in inputs]
            inside.stand_ins.update(map(_key, stand_ins))
            result = call(stand_ins)
            inside.writes(result)
        outputs = {_key(each) for each in tree_leaves(result)}
        products = {_key(each): each for each in inside.products}
        own = {_key(each) for each in (*stand_ins, *parameters)} | outputs
        made = {key: each for key, each in saved.items() if key not in own}
        needed = {key: each for key, each in made.items() if key in products or key in inside.operands}
        again = {key: each for key, each in made.items() if key not in needed}
        for key, each in again.items():
            # Anything else that is saved is computed again, from inputs and products, unless it is smaller than those.
            sources = inside.products_of(key) - own - needed.keys()
            if each.nbytes < sum(products[source].nbytes for source in sources):
                account.allocate(each, name)
                needed[key] = each
            else:
                needed |= {source: products[source] for source in products if source in sources}
        kept = [x for x, each in zip(inputs, stand_ins, strict=True) if again or _key(each) in saved]
        kept += [account.moved(each) for each in needed.values()]
        for key in inside.allocated:
            if key not in outputs:
                account.release(key)
        ctx.save_for_backward(*kept)
        ctx.account, ctx.name, ctx.leaves = account, name, [*stand_ins, *parameters]
        results = tree_leaves(result)
        # The graph, and not its results, which live as long as whatever uses them.
        ctx.edges = [get_gradient_edge(each) if each.requires_grad else None for each in results]
        account.allocate(results, name)
        found = tuple(account.moved(each) for each in results)
        return found if isinstance(result, tuple) else found[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        # Held until the end; checkpointing computes them again here.
        kept = ctx.saved_tensors
        pairs = zip(ctx.edges, gradients, strict=True)
        wanted = [(edge, gradient) for edge, gradient in pairs if edge is not None and gradient is not None]
        outputs, given = zip(*wanted, strict=True)
        leaves = [each for each in ctx.leaves if each.requires_grad]
        with ctx.account.one_operator(f"{ctx.name} backward") as inside:
            inside.reads(kept)
            found = torch.autograd.grad(outputs, leaves, given, allow_unused=True)
            inside.writes(found)
        ctx.account.allocate(found, ctx.name)
        rest = iter(found)
        return None, None, None, None, *(next(rest) if each.requires_grad else None for each in ctx.leaves)


def _stand_in(account: Account, tensor: Tensor) -> Tensor:
    if not isinstance(tensor, FakeTensor) or not tensor.is_floating_point():
        return tensor
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    account.occupies_nothing(made)
    return made.requires_grad_(tensor.requires_grad)


def _key(tensor: Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key
