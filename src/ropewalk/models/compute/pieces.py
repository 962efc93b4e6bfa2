"""Fuse what lies around a model's attention in training: norms, MLPs or experts, and the rotation of queries and keys.

No class or module of transformers is changed: each module object of the model gets a forward of its own.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.fused import compiled_where, recomputed
from ropewalk.models.compute.own_globals import with_globals

MLPS = ("MLP", "Mlp", "FeedForward", "FFN", "Experts")
"""Endings of the class names of MLPs, and of the experts of a mixture."""
ONE_GRAPH = ("grouped_mm", "batched_mm")
"""Implementations of experts in transformers that do not read on the host how many tokens an expert gets."""
ROTATION = "apply_rotary"
"""Beginning of the names of functions that rotate queries and keys."""
MOVES = ("transpose", "permute", "view", "reshape", "contiguous", "squeeze", "unsqueeze", "shape", "device")
"""Attributes of a tensor that neither compute with its values nor add up its gradients."""


def fuse_pieces(model: nn.Module, backend: str | None = None) -> list[str]:
    """Let norms and rotations keep less in training, and compile them and the MLPs, in place.

    A norm saves its input alone, and a rotation returns queries and keys in the dtype that they came in, to which
    attention would round them. This needs no compiler and changes no bit. Calls without gradients stay as they are.

    Args:
        model: a transformers model, which may have an adapter and be sharded by FSDP2.
        backend: compiler of torch that each norm, each MLP or the experts, and each rotation is compiled with, without
            graph breaks; None for none.

    Returns:
        Class names of pieces that are not compiled although ``backend`` asks for it.
    """
    if backend is not None:
        # Rows of another stage have another length, which would make the graphs of this one's depend on it.
        torch.compiler.reset()
    # peft wraps what it adapts, linear maps or whole experts.
    adapted = {
        id(inner) for each in model.modules() if hasattr(each, "base_layer") for inner in each.modules()
    }
    left = []
    for module in model.modules():
        forward = type(module).forward
        if backend and _is_mlp(module):
            if reason := _not_compiled(module, adapted):
                left.append(f"{type(module).__name__} ({reason})")
                continue
            module.forward = MethodType(_piece(forward, backend), module)  # type: ignore[method-assign]
        elif _is_norm(module):
            module.forward = MethodType(_piece(forward, backend), module)  # type: ignore[method-assign]
        # What wraps a forward, as that of indexers, calls it by itself.
        elif _rotations_in(forward) and isinstance(module.forward, MethodType):
            module.forward = MethodType(_with_rotation(forward, backend), module)  # type: ignore[method-assign]
    return sorted(set(left))


def _not_compiled(module: nn.Module, adapted: Collection[int]) -> str:
    """Why a compiler cannot follow an MLP or experts as one graph; empty if it can."""
    if type(module).__name__.endswith("Experts"):
        how = getattr(getattr(module, "config", None), "_experts_implementation", None)
        stock: Any = inspect.unwrap(type(module).forward)
        # The decorator of transformers that chooses an implementation gives experts this attribute.
        chosen = hasattr(module, "is_transposed") and how in ONE_GRAPH
        if not chosen and "bmm" not in stock.__code__.co_names:
            return "it runs one expert after the other"
    # The compiler would take an adapter's settings and parametrizations for constants, and compile each layer anew.
    if any(id(inner) in adapted for inner in module.modules()):
        return "it has an adapter inside"
    return ""


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm written out in torch; torch's own norms are one operator and save their input."""
    kind = type(module)
    return (
        "Norm" in kind.__name__
        and not kind.__module__.startswith("torch.")
        and not any(True for _ in module.children())
        and not any(True for _ in module.buffers())
    )


def _is_mlp(module: nn.Module) -> bool:
    """Whether a module is an MLP or the experts of a mixture, and not a router around one."""
    return type(module).__name__.endswith(MLPS) and not any(
        type(inner).__name__.endswith(MLPS) for inner in module.modules() if inner is not module
    )


@cache
def _piece(forward: Callable[..., Tensor], backend: str | None) -> Callable[..., Tensor]:
    if backend is None:
        return recomputed(forward)
    return compiled_where(lambda module, *_, **__: module.training, forward, backend)


def _rotations_in(forward: Callable[..., Any]) -> list[str]:
    """Names of the functions by which a forward rotates queries and keys."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return [name for name in getattr(code, "co_names", ()) if name.startswith(ROTATION)]


@cache
def _with_rotation(forward: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """The forward of an attention class, with functions of ours in place of those that rotate queries and keys.

    The copy has its own globals, so that the model file of transformers keeps its functions.
    """
    stock: Any = inspect.unwrap(forward)
    rotations = {name: stock.__globals__[name] for name in _rotations_in(stock)}
    if _passes_on(stock, rotations):
        rotations = {name: _rounded(rotate) for name, rotate in rotations.items()}
    if backend is not None:
        rotations = {name: compiled_where(_with_gradients, each, backend) for name, each in rotations.items()}
    return with_globals(stock, rotations)


def _passes_on(forward: Callable[..., Any], rotations: Collection[str]) -> bool:
    """Whether a forward passes rotated queries and keys to its attention without computing with them.

    A norm or a scale between them needs what the rotation computed in float32, and the gradients of keys that are
    repeated, or stored for other layers, are added in float32. The source tells; without it, the answer is no.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    rotated: set[str] = set()
    # In the order of the lines, so that names are followed from the rotation on.
    for node in sorted((each for each in ast.walk(tree) if hasattr(each, "lineno")), key=_end):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            if called in rotations or (called == "torch.cat" and rotated & _names(node.value)):
                rotated |= {name for target in node.targets for name in _names(target)}
        if isinstance(node, ast.Assign) and _stores(node) and rotated & _names(node.value):
            return False
        computes = isinstance(node, ast.BinOp) or (isinstance(node, ast.Attribute) and node.attr not in MOVES)
        calls = isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.")
        parts = [each.id for each in ast.iter_child_nodes(node) if isinstance(each, ast.Name)]
        if (computes or calls) and rotated.intersection(parts):
            return False
    return True


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def _stores(assignment: ast.Assign) -> bool:
    return any(isinstance(target, ast.Subscript) for target in assignment.targets)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _with_gradients(*_: Any, **__: Any) -> bool:
    return torch.is_grad_enabled()


def _rounded(rotation: Callable[..., Any]) -> Callable[..., Any]:
    """A rotation in the dtype of its angles whose results have the dtype of its arguments."""

    @wraps(rotation)
    def rotate(*args: Any, **kwargs: Any) -> Any:
        rotated = rotation(*args, **kwargs)
        # Generation rounds keys in its cache.
        if not torch.is_grad_enabled():
            return rotated
        given = (*args, *kwargs.values())
        if isinstance(rotated, Tensor):
            return rotated.to(given[0].dtype)
        return tuple(x.to(before.dtype) for x, before in zip(rotated, given, strict=False))

    return rotate
