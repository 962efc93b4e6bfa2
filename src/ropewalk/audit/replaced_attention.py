"""Compute the attention of a transformers model outside of it, from queries and keys before their rotation.

The model's rotary module is replaced by one that returns cos = 1 and sin = 0, so its layers leave queries and keys
unrotated, and a registered attention function passes them on. One computation of angles, rotation, product and softmax,
each in any precision, then serves every decoder family without patching its classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.attention.options import AttentionOptions, Locality
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.compute.float64 import KeepFloat64, run_experts_one_by_one
from ropewalk.models.config.layers import CHUNKED
from ropewalk.models.config.model import ModelConfig
from ropewalk.models.rope.rotary import positions_for, rotary_module
from ropewalk.models.sharding import kept_in_float32

NAME = "ropewalk_audit"
"""Registered name of the attention function that passes on queries, keys and values."""


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention before rotation; the batch has one row.

    Attributes:
        layer: number of the layer, from 0.
        query: ``[heads, length, head_dim]``.
        key: ``[kv_heads, length, head_dim]``.
        value: ``[kv_heads, length, value_dim]``.
        options: scale, soft cap, window or chunk, and sinks.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    options: AttentionOptions


Answer = Callable[[AttentionCall], Tensor]
"""A function from a call to the attention's output, ``[heads, length, value_dim]``."""


@contextmanager
def replacing_attention(
    model: Any, answer: Answer, dtype: torch.dtype, rotate_positions: Tensor | None = None
) -> Iterator[None]:
    """Within the context manager, ``answer`` computes every layer's attention, and the rest runs in ``dtype``.

    The weights in memory are unchanged: each module's weights are cast while it runs. In float64, operations that
    transformers always does in float32 (norms, routers) run in float64 too.

    Args:
        model: a causal decoder; call its base model on one row, without a cache.
        answer: called once for each layer, with queries and keys before rotation.
        dtype: dtype of weights, hidden states and everything except the attention.
        rotate_positions: int64 ``[length]``: let the model rotate by itself, for these positions.

    Raises:
        EngineError: if the model does not accept external attention functions, or passes one unsupported arguments.
    """
    _register()
    parent, attribute, rotary = rotary_module(model)
    config = model.config.get_text_config()
    before = config._attn_implementation
    chunked = CHUNKED in (getattr(config, "layer_types", None) or ())
    counted = _Counted(answer, ModelConfig.of(config).localities if chunked else ())
    with ExitStack() as stack, torch.no_grad():
        evaluating(model, stack)
        stack.enter_context(float32_products())
        stack.callback(model.set_attn_implementation, before)
        model.set_attn_implementation(NAME)
        if dtype == torch.float64:
            before_them = run_experts_one_by_one(model)
            if before_them:
                stack.callback(model.set_experts_implementation, before_them)
        stack.callback(setattr, parent, attribute, rotary)
        setattr(parent, attribute, _Rotary(rotary, rotate_positions))
        # A load in this dtype would leave these parameters in float32 too.
        left = kept_in_float32(model, dtype)
        for module in model.modules():
            _cast_while_running(module, dtype, stack, left)
        _active.append(counted)
        stack.callback(_active.pop)
        if dtype == torch.float64:
            counted.keeping = stack.enter_context(KeepFloat64())
        yield


@contextmanager
def float32_products() -> Iterator[None]:
    """Within the context manager, float32 products are computed in float32, even if TF32 or bfloat16 is allowed.

    Sets each backend separately, because torch.get_float32_matmul_precision() raises if they differ.
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


class _Counted:
    """Numbers the calls, and allows the answer to round to float32 while everything else must not.

    transformers passes windows and chunks to a mask by the same name, so the config must say which it is.
    """

    def __init__(self, answer: Answer, localities: tuple[Locality, ...] = ()) -> None:
        """Create it; ``localities`` are those of each layer, if some layers of the model attend in chunks."""
        self.answer, self.localities, self.layer = answer, localities, 0
        self.keeping: KeepFloat64 | None = None

    def __call__(
        self, name: str, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        if self.localities:
            locality = self.localities[self.layer]
            if locality.reach != options.window:
                raise EngineError(
                    f"the window of layer {self.layer} ({name}), in tokens, is {options.window} in the model but "
                    f"{locality.reach} in the config; correct the config"
                )
            options = replace(options, window=locality.window, chunk=locality.chunk)
        call = AttentionCall(self.layer, query, key, value, options)
        self.layer += 1
        with self.unkept():
            return self.answer(call)

    @contextmanager
    def unkept(self) -> Iterator[None]:
        """Allow code inside to round float64 to float32."""
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
    """Replaces a model's rotary module: no rotation, or the model's own at given positions."""

    def __init__(self, own: nn.Module, position_ids: Tensor | None) -> None:
        super().__init__()
        # A copy, because a long sequence changes the buffers of a length-dependent method's module. The list hides it
        # from the module tree.
        self.own, self.position_ids = [deepcopy(own)], position_ids

    def __getattr__(self, name: str) -> Any:
        """What else a model asks its rotary module for, such as the layer types of LFM3's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["own"][0], name)

    def forward(
        self, x: Tensor, position_ids: Tensor, *kind: Any, **named: Any
    ) -> tuple[Tensor, Tensor] | Tensor:
        if self.position_ids is not None:
            position_ids = positions_for(self.own[0], self.position_ids)
        with _active[-1].unkept():
            # Outside of the float64 mode, so that the module's own roundings are visible.
            found = self.own[0](x, position_ids, *kind, **named)
        if isinstance(found, Tensor) and found.is_complex():
            return found if self.position_ids is not None else torch.ones_like(found)
        cos, sin = two_parts(found, self.own[0])
        if self.position_ids is not None:
            # In float64 the probe's rotation must be exact; otherwise the dtype is the module's own choice.
            return (cos.to(x.dtype), sin.to(x.dtype)) if x.dtype == torch.float64 else (cos, sin)
        return torch.ones_like(cos, dtype=x.dtype), torch.zeros_like(sin, dtype=x.dtype)


def _cast_while_running(module: nn.Module, dtype: torch.dtype, stack: ExitStack, left: set[int]) -> None:
    """Cast a module's own weights to another dtype while its forward runs, and restore them afterwards."""
    # Recurrent mixers read the weights of their convolution directly instead of calling it.
    convolutions = [child for child in module.children() if isinstance(child, nn.Conv1d)]
    own = [
        parameter
        for each in (module, *convolutions)
        for parameter in each.parameters(recurse=False)
        if parameter.is_floating_point() and parameter.dtype != dtype and id(parameter) not in left
    ]
    if not own:
        return
    kept: list[Tensor] = []

    def cast(_: nn.Module, args: tuple[Any, ...]) -> Any:
        # Swap .data instead of the parameter, so that tied weights remain one parameter.
        kept[:] = [parameter.data for parameter in own]
        if isinstance(module, nn.Embedding) and len(args) == 1:
            # Of an embedding only the rows that are looked up are cast.
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
    # Hooks do not run if Ctrl-C interrupts the module, so weights are also restored when the context ends.
    stack.callback(restore)
    for handle in (
        module.register_forward_pre_hook(cast),
        module.register_forward_hook(restore, always_call=True),
    ):
        stack.callback(handle.remove)


def _register() -> None:
    """Register the name with transformers, with a mask function that builds no mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


@dataclass(frozen=True)
class _Mask:
    """Stands for a mask with the information that is needed; some models pass their window only to the mask."""

    window: int | None

    def __getitem__(self, parts: tuple[slice, ...]) -> _Mask:
        """The mask of all queries and keys, which Gemma 4 takes from it before layers that share keys."""
        if all(part.start in (None, 0) and part.stop is None for part in parts):
            return self
        raise TypeError("a part of the mask is taken")


def _no_mask(*args: Any, **kwargs: Any) -> _Mask:
    return _Mask(kwargs.get("local_size"))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | _Mask | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    name = type(module).__name__
    if not _active:
        raise EngineError(f"{name} was called with the audit's attention outside of an audit")
    if isinstance(attention_mask, Tensor):
        raise EngineError(f"{name} attends through its own mask, which the audit does not support")
    if getattr(module, "is_causal", True) is False or options.get("is_causal") is False:
        raise EngineError(f"{name} attends in both directions; the audit needs a causal decoder")
    window = None if attention_mask is None else attention_mask.window
    if query.shape[0] != 1:
        raise RopewalkError(f"the audit takes one row at a time, got a batch of {query.shape[0]} rows")
    sinks = options.get("s_aux")
    output = _active[-1](
        name,
        query[0],
        key[0],
        value[0],
        AttentionOptions(
            scale=None if scaling is None else float(scaling),
            softcap=options.get("softcap"),
            window=options.get("sliding_window") if window is None else window,
            # Detached now, while it is cast: the module's hook restores the parameter itself afterwards.
            sinks=None if sinks is None else sinks.detach(),
        ),
    )
    return output.transpose(0, 1)[None].contiguous(), None


def two_parts(given: Any, rotary: nn.Module) -> tuple[Tensor, Tensor]:
    if not isinstance(given, tuple) or len(given) != 2 or any(part.is_complex() for part in given):
        raise EngineError(
            f"{type(rotary).__name__} does not return cos and sin, so the audit cannot separate its rotation"
        )
    return given
