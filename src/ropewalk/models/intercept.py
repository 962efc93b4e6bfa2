"""A transformers model whose attention is computed elsewhere, from queries and keys that are not rotated yet.

The model's rotary module is made to hand out cos = 1 and sin = 0, so its layers leave queries and keys as they
are, and a registered attention function passes them on. So one computation of angles, rotation, product and
softmax, each in whatever precision is asked for, serves every decoder family without a patched class. How the model
would have rotated is measured in ``subject``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.rotary import rotary_module

NAME = "ropewalk_intercept"
"""Registered name of the attention function that passes queries, keys and values on."""


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention, before rotation; the batch has one row.

    Attributes:
        layer: number of the layer, from 0.
        query: ``[heads, length, head_dim]``.
        key: ``[kv_heads, length, head_dim]``.
        value: ``[kv_heads, length, value_dim]``.
        scale: multiplier of q·k.
        softcap: scores become ``softcap * tanh(scores / softcap)``; None for none.
        window: sliding window in tokens; None where all earlier tokens are seen.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    softcap: float | None
    window: int | None


Answer = Callable[[AttentionCall], Tensor]
"""From a call to the attention's output, ``[heads, length, value_dim]``."""


@contextmanager
def intercepted(
    model: Any, answer: Answer, dtype: torch.dtype, rotate_positions: Tensor | None = None
) -> Iterator[None]:
    """While the context is open, ``answer`` computes every layer's attention, and the rest runs in ``dtype``.

    The weights stay as they are in memory: each module's are cast while it runs. In float64 also what transformers
    does in float32 whatever the model's dtype (norms, routers) runs in float64.

    Args:
        model: a causal decoder; call its base model on one row, without a cache.
        answer: called once a layer, with queries and keys before rotation.
        dtype: of weights, hidden states and everything but the attention.
        rotate_positions: int64 ``[length]``: let the model rotate by itself, for these positions.

    Raises:
        EngineError: if the model takes no attention function from outside, or hands it something unknown.
    """
    _register()
    parent, attribute, rotary = rotary_module(model)
    before = model.config.get_text_config()._attn_implementation
    counted = _Counted(answer)
    with ExitStack() as stack, torch.no_grad():
        evaluating(model, stack)
        stack.enter_context(float32_products())
        stack.callback(model.set_attn_implementation, before)
        model.set_attn_implementation(NAME)
        if dtype == torch.float64:
            _run_experts_one_by_one(model, stack)
        stack.callback(setattr, parent, attribute, rotary)
        setattr(parent, attribute, _Rotary(rotary, rotate_positions))
        left = kept_in_float32(model, dtype)
        for module in model.modules():
            _cast_while_running(module, dtype, stack, left)
        _active.append(counted)
        stack.callback(_active.pop)
        if dtype == torch.float64:
            counted.keeping = stack.enter_context(_KeepFloat64())
        yield


@contextmanager
def float32_products() -> Iterator[None]:
    """While the context is open, float32 products are that: TF32 or bfloat16, if users allow them, are others.

    One setting a backend: torch.get_float32_matmul_precision() raises where someone has set one of these alone.
    """
    backends: Any = torch.backends
    settings = (backends.cuda.matmul, backends.mkldnn.matmul)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, precision in zip(settings, before, strict=True):
            setting.fp32_precision = precision


def evaluating(model: nn.Module, stack: ExitStack) -> None:
    stack.callback(model.train, model.training)
    model.eval()


def _run_experts_one_by_one(model: Any, stack: ExitStack) -> None:
    """The grouped matrix product of a mixture of experts has no float64."""
    grouped: dict[str, str | None] = getattr(model, "get_experts_implementation", dict)()
    if any(implementation is not None for implementation in grouped.values()):
        stack.callback(model.set_experts_implementation, grouped)
        model.set_experts_implementation("eager")


class _Counted:
    """Numbers the calls, and lets the answer round to float32 where everything else must not."""

    def __init__(self, answer: Answer) -> None:
        self.answer, self.layer = answer, 0
        self.keeping: _KeepFloat64 | None = None

    def __call__(self, **parts: Any) -> Tensor:
        call = AttentionCall(layer=self.layer, **parts)
        self.layer += 1
        with self.unkept():
            return self.answer(call)

    @contextmanager
    def unkept(self) -> Iterator[None]:
        """What runs in here may round float64 to float32."""
        if self.keeping is None:
            yield
            return
        self.keeping.paused = True
        try:
            yield
        finally:
            self.keeping.paused = False


_active: list[_Counted] = []


class _Rotary(nn.Module):
    """In place of a model's rotary module: no rotation, or the model's own at given positions."""

    def __init__(self, own: nn.Module, position_ids: Tensor | None) -> None:
        super().__init__()
        # A copy: a long sequence changes what the module of a length-dependent method holds. The list hides it from
        # the module tree.
        self.own, self.position_ids = [deepcopy(own)], position_ids

    def forward(self, x: Tensor, position_ids: Tensor, *kind: Any, **named: Any) -> tuple[Tensor, Tensor]:
        if self.position_ids is not None:
            position_ids = self.position_ids[None]
        with _active[-1].unkept():
            # As it runs by itself: its own roundings are to be seen, not kept from it.
            found = self.own[0](x, position_ids, *kind, **named)
        if not isinstance(found, tuple) or len(found) != 2:
            raise EngineError(
                f"{type(self.own[0]).__name__} does not give cos and sin, so nothing can be rotated apart"
            )
        cos, sin = found
        if self.position_ids is not None:
            # In float64 the probe's rotation is to be exact; elsewhere the dtype is the module's own choice.
            return (cos.to(x.dtype), sin.to(x.dtype)) if x.dtype == torch.float64 else (cos, sin)
        return torch.ones_like(cos, dtype=x.dtype), torch.zeros_like(sin, dtype=x.dtype)


class _KeepFloat64(TorchFunctionMode):
    """Whoever asks for float32 of a float64 tensor gets float64: norms that compute in float32, for instance."""

    paused = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused or not args or not isinstance(args[0], Tensor) or args[0].dtype != torch.float64:
            return func(*args, **kwargs)
        if func is Tensor.float:
            return args[0]
        return func(*(_wider(a) for a in args), **{key: _wider(a) for key, a in kwargs.items()})


def _wider(argument: Any) -> Any:
    return torch.float64 if argument is torch.float32 else argument


def kept_in_float32(model: Any, dtype: torch.dtype) -> set[int]:
    """Ids of the parameters that transformers keeps in float32 when it loads a model in a dtype: routers, for instance.

    The lists of names are transformers' own and private; a test compares with a real load.
    """
    names: set[str] = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype not in (torch.bfloat16, torch.float16) or not names:
        return set()
    pattern = re.compile(r"(^|\.)(" + "|".join(map(re.escape, sorted(names))) + r")($|\.)")
    return {id(parameter) for name, parameter in model.named_parameters() if pattern.search(name)}


def _cast_while_running(module: nn.Module, dtype: torch.dtype, stack: ExitStack, left: set[int]) -> None:
    """A module's own weights in another dtype from its first line to its last, and then as they were."""
    own = [
        parameter
        for parameter in module.parameters(recurse=False)
        if parameter.is_floating_point() and parameter.dtype != dtype and id(parameter) not in left
    ]
    if not own:
        return
    kept: list[Tensor] = []

    def cast(_: nn.Module, args: tuple[Any, ...]) -> Any:
        kept[:] = [parameter.data for parameter in own]
        if isinstance(module, nn.Embedding) and len(args) == 1:
            # Of a vocabulary only the rows that are looked up.
            rows, index = args[0].unique(return_inverse=True)
            module.padding_idx = None
            own[0].data = kept[0][rows].to(dtype)
            return (index,)
        for parameter, data in zip(own, kept, strict=True):
            parameter.data = data.to(dtype)
        return None

    def restore(*_: Any) -> None:
        for parameter, data in zip(own, kept, strict=False):
            parameter.data = data
        if isinstance(module, nn.Embedding):
            module.padding_idx = padding_idx
        kept.clear()

    padding_idx = getattr(module, "padding_idx", None)
    # A hook does not run when someone presses Ctrl-C inside the module.
    stack.callback(restore)
    for handle in (
        module.register_forward_pre_hook(cast),
        module.register_forward_hook(restore, always_call=True),
    ):
        stack.callback(handle.remove)


def _register() -> None:
    """Make the name known to transformers, with a mask function that builds no mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


@dataclass(frozen=True)
class _Mask:
    """In place of a mask, what one needs to know of it: some models tell their window to the mask alone."""

    window: int | None


def _no_mask(*args: Any, **kwargs: Any) -> _Mask:
    return _Mask(kwargs.get("local_size"))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _Mask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    name = type(module).__name__
    if not _active:
        raise EngineError(f"{name} was called with the audit's attention outside of an audit")
    if options.get("s_aux") is not None:
        raise EngineError(f"{name} has learned attention sinks, which the audit does not compute")
    if isinstance(attention_mask, Tensor):
        raise EngineError(f"{name} attends through a mask of its own, which the audit does not know")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise EngineError(f"{name} attends in both directions; the audit needs a causal decoder")
    window = None if attention_mask is None else attention_mask.window
    if query.shape[0] != 1:
        raise RopewalkError(f"the audit takes one row at a time, got a batch of {query.shape[0]}")
    output = _active[-1](
        query=query[0],
        key=key[0],
        value=value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=options.get("softcap"),
        window=options.get("sliding_window") if window is None else window,
    )
    return output.transpose(0, 1)[None].contiguous(), None
