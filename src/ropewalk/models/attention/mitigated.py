"""Attention with mitigations of RoPE's rounding as users would run it: on PyTorch's fused attention, not emulated.

A mitigation is a registered attention function together with a rotary module, both installed within a context manager.
All functions end in transformers' own ``sdpa`` function with transformers' own masks, so grouped heads, sliding windows
and the choice of a kernel are those of a stock model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ropewalk.errors import EngineError, RopewalkError
from ropewalk.models.config import ModelConfig
from ropewalk.models.rotary import rotary_module, swap_rotary
from ropewalk.rope import RotaryEmbedding

FLASH_HEAD_DIM = 256
"""Largest head_dim that flash attention supports on CUDA."""

FUSED_MITIGATIONS = (
    "exact angles",
    "float32 rotation",
    "tf32 attention",
    "split product",
    "float32 attention",
)
"""Mitigations that run on fused attention with the exact rotary module."""


def copy_in_dtype(model: Any, dtype: torch.dtype) -> Any:
    """A copy of a model as transformers would load it in a dtype, for experiments that must not change the model.

    Weights that already have ``dtype`` are shared, not copied. The rotary module keeps its frequencies, which
    ``model.to(dtype)`` would round.

    Args:
        model: a causal decoder from transformers with its own rotary module.
        dtype: dtype of the copy's parameters and saved buffers.

    Returns:
        The copy, in evaluation mode.

    Raises:
        RopewalkError: if the model does not have exactly one rotary module of transformers' own.
    """
    if isinstance(rotary_module(model)[2], RotaryEmbedding):
        raise RopewalkError(
            f"{type(model).__name__} already runs ropewalk's rotary module; load it with exact_rope=False"
        )
    with torch.no_grad():
        # deepcopy takes these instead of copying, so that the weights never exist in both dtypes and twice.
        memo: dict[int, Any] = {id(p): _in_dtype(p, dtype) for p in model.parameters()}
    copied = copy.deepcopy(model, memo)
    saved = copied.state_dict().keys()
    for path, module in copied.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Buffers that are not saved, such as the frequencies, are float32 in the class whatever is loaded.
            is_saved = (f"{path}.{name}" if path else name) in saved
            if is_saved and buffer.is_floating_point():
                setattr(module, name, buffer.to(dtype))
    return copied.eval()


def _in_dtype(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    if not parameter.is_floating_point() or parameter.dtype == dtype:
        return parameter
    return nn.Parameter(parameter.detach().to(dtype), requires_grad=False)


def fused_refusal(model: Any) -> str | None:
    """Why a model cannot run on PyTorch's fused attention, in one sentence; None if it can."""
    name, cap = type(model).__name__, ModelConfig.of(model.config).softcap
    if cap is not None:
        return (
            f"{name} caps its attention scores at {cap:g}, which PyTorch's fused attention does not support"
        )
    if any(key.rpartition(".")[2] == "sinks" for key, _ in model.named_parameters()):
        return f"{name} has learned attention sinks, which PyTorch's fused attention does not support"
    # from_pretrained checks this attribute of the class, but a registered function bypasses the check.
    if not getattr(model, "_supports_sdpa", True):
        return f"transformers does not run {name} on PyTorch's fused attention"
    return None


def exact_rotary(model: Any) -> RotaryEmbedding:
    """A rotary module with float64 angles for a model, which keeps its own.

    Raises:
        RopewalkError: if the model's own does not compute what its config states.
    """
    parent, attribute, own = rotary_module(model)
    try:
        swap_rotary(model, ModelConfig.of(model.config).methods)
        exact = getattr(parent, attribute)
    finally:
        setattr(parent, attribute, own)
    assert isinstance(exact, RotaryEmbedding)
    return exact


class RoundedRotaryEmbedding(nn.Module):
    """Exact angles, with cos and sin in the dtype of the activations, so that the rotation runs in that dtype too.

    There is no 16-bit complex dtype: a model with complex rotation runs it in float32 anyway.
    """

    def __init__(self, exact: RotaryEmbedding) -> None:
        super().__init__()
        self.exact = exact

    def forward(
        self, x: Tensor, position_ids: Tensor, *kind: Any, **named: Any
    ) -> tuple[Tensor, Tensor] | Tensor:
        """cos and sin of the exact module, cast to ``x.dtype``; the arguments are the exact module's."""
        found = self.exact(x, position_ids, *kind, **named)
        return found if isinstance(found, Tensor) else (found[0].to(x.dtype), found[1].to(x.dtype))


@contextmanager
def attending(model: Any, implementation: str) -> Iterator[None]:
    """Run a model with the named attention implementation within the context manager.

    Args:
        model: a causal decoder; its rotary module is not changed.
        implementation: ``eager``, ``sdpa``, or a name registered with transformers.

    Raises:
        EngineError: if the model does not accept it.
    """
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation(implementation)
        # transformers only warns if a class computes attention itself, so check the result.
        if model.config._attn_implementation != implementation:
            raise EngineError(f"{type(model).__name__} does not accept external attention functions")
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def mitigated(model: Any, name: str, exact: RotaryEmbedding) -> Iterator[set[torch.dtype]]:
    """Run a model with one of :data:`FUSED_MITIGATIONS` within the context manager.

    Args:
        model: a causal decoder whose weights are in the dtype that the mitigation is for.
        name: name of the mitigation.
        exact: result of :func:`exact_rotary`.

    Yields:
        The dtypes in which queries and keys (the narrower of the two) have arrived at the attention function so far;
        always empty for ``exact angles``.

    Raises:
        RopewalkError: if the mitigation is unknown.
    """
    if name not in FUSED_MITIGATIONS:
        raise RopewalkError(f"unknown mitigation {name!r}; choose one of {', '.join(FUSED_MITIGATIONS)}")
    _register()
    parent, attribute, own = rotary_module(model)
    arrived: set[torch.dtype] = set()
    with ExitStack() as stack:
        stack.enter_context(attending(model, _registered(name)))
        stack.callback(setattr, parent, attribute, own)
        setattr(parent, attribute, RoundedRotaryEmbedding(exact) if name == "exact angles" else exact)
        _arrived.append(arrived)
        stack.callback(_arrived.pop)
        yield arrived


_arrived: list[set[torch.dtype]] = []


def _registered(name: str) -> str:
    return "sdpa" if name == "exact angles" else f"ropewalk_{name.replace(' ', '_')}"


def _register() -> None:
    """Register the mitigations with transformers, with the mask function of its fused attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name, function in _FUNCTIONS.items():
        AttentionInterface.register(_registered(name), function)
        AttentionMaskInterface.register(_registered(name), ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def _fused(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """transformers' fused attention: ``[batch, length, heads, value_dim]`` in the dtype of all three inputs."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if attention_mask is not None and attention_mask.is_floating_point():
        attention_mask = attention_mask.to(query.dtype)
    output: Tensor = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, **options)[0]
    return output


def _arrives(module: nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]) -> None:
    if options.get("s_aux") is not None or options.get("softcap") is not None:
        raise EngineError(
            f"{type(module).__name__} changes its attention scores in a way that PyTorch's fused attention cannot "
            "compute"
        )
    if _arrived:
        # Latent attention may round only its keys.
        _arrived[-1].add(min(query.dtype, key.dtype, key=lambda dtype: dtype.itemsize))


def float32_rotation(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Round queries and keys, rotated in float32, once to the values' dtype, and attend in that dtype.

    Args:
        module: the attention layer.
        query: ``[batch, heads, length, head_dim]``, float32 from an exact rotation.
        key: ``[batch, kv_heads, length, head_dim]``, float32 from an exact rotation.
        value: ``[batch, kv_heads, length, value_dim]`` in the model's dtype.
        attention_mask: mask that transformers builds for ``sdpa``, or None for plain causal attention.
        options: other arguments that transformers passes to attention functions.

    Returns:
        ``[batch, length, heads, value_dim]`` in the values' dtype, and no weights.
    """
    _arrives(module, query, key, options)
    query, key = query.to(value.dtype), key.to(value.dtype)
    return _fused(module, query, key, value, attention_mask, **options), None


def float32_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Keep queries and keys in float32, widen the values to it, and round only the output.

    Fused attention has one dtype for all three inputs, so a float32 product with values in the model's dtype does not
    exist: this is float32 attention throughout. Arguments and result are those of :func:`float32_rotation`.
    """
    with _float32_products("ieee"):
        return _in_float32(module, query, key, value, attention_mask, options), None


def tf32_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """:func:`float32_attention` with TF32 allowed, for CUDA devices that have it.

    For float32, PyTorch's memory-efficient kernel computes each product as three TF32 products whether TF32 is allowed
    or not (CUTLASS's ``OpMultiplyAddFastF32``), so allowing TF32 matters only if no fused kernel is used.
    """
    with _float32_products("tf32"):
        return _in_float32(module, query, key, value, attention_mask, options), None


@contextmanager
def _float32_products(precision: str) -> Iterator[None]:
    """Run float32 matrix products on CUDA in ``ieee`` or ``tf32`` precision.

    Applies only to the attention: the projections of a float32 model are not part of the mitigation.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _in_float32(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    _arrives(module, query, key, options)
    output = _fused(module, query.float(), key.float(), value.float(), attention_mask, **options)
    return output.to(value.dtype)


def split_product(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Split queries and keys into sums of two numbers of the values' dtype, and add the three largest products.

    ``[q_high, q_high, q_low] · [k_high, k_low, k_high]`` with three times the head_dim is a single call of fused
    attention in the model's dtype, whose kernels accumulate products in float32. Arguments and result are those of
    :func:`float32_rotation`.
    """
    _arrives(module, query, key, options)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    q_high, q_low = _halves(query, value.dtype)
    k_high, k_low = _halves(key, value.dtype)
    # (qh + ql)(kh + kl) without ql·kl, which is below float32's precision: one wider product for three.
    query = torch.cat((q_high, q_high, q_low), dim=-1)
    key = torch.cat((k_high, k_low, k_high), dim=-1)
    width, wider = value.shape[-1], query.shape[-1]
    # Flash attention needs values as wide as the keys. Beyond its largest head_dim only kernels without that
    # requirement remain, while on the CPU the alternative would materialise all scores.
    if value.device.type == "cpu" or wider <= FLASH_HEAD_DIM:
        value = nn.functional.pad(value, (0, wider - width))
    output = _fused(module, query, key, value, attention_mask, scaling=scaling, **options)
    return output[..., :width], None


def _halves(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    high = x.to(dtype)
    return high, (x - high).to(dtype)


_FUNCTIONS: dict[str, Callable[..., tuple[Tensor, None]]] = {
    "float32 rotation": float32_rotation,
    "tf32 attention": tf32_attention,
    "split product": split_product,
    "float32 attention": float32_attention,
}
