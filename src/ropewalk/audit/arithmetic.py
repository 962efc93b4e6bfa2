"""Arithmetic: the precision in which each step from hidden states to attention weights is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from ropewalk.audit.results import STEPS
from ropewalk.errors import RopewalkError

Angles = Literal["exact", "model"]
Product = Literal["float64", "float32", "tf32", "split", "bfloat16", "float16"]
PRODUCTS: tuple[Product, ...] = get_args(Product)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Dtypes that can be audited, by name."""


@dataclass(frozen=True)
class Arithmetic:
    """A precision for every step of a forward pass.

    Attributes:
        angles: ``exact`` computes position times inv_freq, cos and sin in float64 from the config; ``model`` uses the
            model's own rotary module.
        cos_sin: dtype that cos and sin are rounded to.
        rotation: dtype that the four products of a rotation are rounded to. ``product`` rounds their sum.
        product: format that rotated queries and keys are rounded to before q·k: a dtype, ``tf32`` (10 mantissa bits)
            or ``split`` (the sum of two bfloat16 numbers, with the three largest of their four products).
            Sums of products run in float32, as in the hardware's matrix units, and in float64 for ``float64``.
        scores: dtype that q·k is rounded to, before and after scaling.
        softmax: dtype that softmax is computed in.
        weights: dtype that the attention weights are rounded to.
        rest: dtype of the weights, hidden states, values and everything else.
    """

    angles: Angles
    cos_sin: torch.dtype
    rotation: torch.dtype
    product: Product
    scores: torch.dtype
    softmax: torch.dtype
    weights: torch.dtype
    rest: torch.dtype

    def __post_init__(self) -> None:
        if self.product not in PRODUCTS:
            raise RopewalkError(f"unknown product {self.product!r}; choose one of {', '.join(PRODUCTS)}")

    @property
    def wide(self) -> torch.dtype:
        """The dtype in which steps run before their results are rounded: float32, or wider if any step needs it."""
        dtypes = (self.cos_sin, self.rotation, self.scores, self.softmax, self.weights, self.rest)
        return torch.float64 if torch.float64 in dtypes or self.product == "float64" else torch.float32

    def with_step(self, step: str, of: Arithmetic) -> Arithmetic:
        """This arithmetic with one step, named as in ``STEPS``, taken from another arithmetic."""
        fields = {
            "angles": ("angles",),
            "cos_sin": ("cos_sin",),
            "rotation": ("rotation",),
            "product": ("product", "scores"),
            "softmax": ("softmax", "weights"),
            "rest": ("rest",),
        }
        if step not in fields:
            raise RopewalkError(f"unknown step {step!r}; choose one of {', '.join(STEPS)}")
        return replace(self, **{name: getattr(of, name) for name in fields[step]})


EXACT = Arithmetic(
    "exact",
    torch.float64,
    torch.float64,
    "float64",
    torch.float64,
    torch.float64,
    torch.float64,
    torch.float64,
)
"""Everything in float64: the reference arithmetic."""


def stock_arithmetic(
    dtype: torch.dtype,
    angles: Angles = "model",
    cos_sin: torch.dtype | None = None,
    rotation: torch.dtype | None = None,
) -> Arithmetic:
    """The arithmetic of transformers for a model of this dtype under eager attention.

    The model's rotary module computes angles in float32. cos, sin and the rotation use the model's dtype, and q·k is
    rounded to it. The softmax runs in float32, and its weights are rounded to the model's dtype.

    Args:
        dtype: dtype of the model; float64 gives :data:`EXACT`.
        angles: ``exact`` replaces only the angles of the rotary module.
        cos_sin, rotation: dtypes of cos and sin and of the rotation, for models that do not use their own dtype
            there (OLMo 2 and Cohere use float32); see :meth:`~ropewalk.audit.passes.Runner.stock`.
    """
    if dtype == torch.float64:
        return EXACT
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise RopewalkError(f"unknown dtype {name!r}; choose one of {', '.join(DTYPES)}")
    # The check above makes it one of the products, which mypy cannot see.
    product: Product = name  # type: ignore[assignment]
    return Arithmetic(
        angles, cos_sin or dtype, rotation or dtype, product, dtype, torch.float32, dtype, dtype
    )


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Values rounded to a dtype and returned in their original dtype."""
    return x if x.dtype == dtype else x.to(dtype).to(x.dtype)


def tf32(x: Tensor) -> Tensor:
    """float32 values rounded to nearest even with 10 mantissa bits, as tensor cores read them for TF32."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    # Just under half of the 13 dropped bits, plus the last kept bit: rounds to nearest, ties to even.
    odd = (bits >> 13) & 1
    kept = (bits + 0xFFF + odd) & ~0x1FFF
    # A carry out of the mantissa would turn a NaN into another value.
    return torch.where(x.to(torch.float32).isfinite(), kept.view(torch.float32), x.to(torch.float32))


def split_bfloat16(x: Tensor) -> tuple[Tensor, Tensor]:
    """float32 values as a sum of two bfloat16 numbers with 16 mantissa bits in total, both returned as float32."""
    high = x.to(torch.bfloat16).to(torch.float32)
    # What the first rounding lost, again in bfloat16.
    return high, (x.to(torch.float32) - high).to(torch.bfloat16).to(torch.float32)


def operands(x: Tensor, product: Product) -> tuple[Tensor, ...]:
    """Queries or keys as a product reads them: two parts for ``split``; float64 for ``float64``, otherwise float32."""
    if product == "float64":
        return (x.to(torch.float64),)
    if product == "split":
        return split_bfloat16(x)
    if product == "tf32":
        return (tf32(x),)
    # Tensor cores round the operands and sum in float32, which float32 products of rounded operands reproduce.
    return (x.to(DTYPES[product]).to(torch.float32),)


def multiplied(query: Sequence[Tensor], key: Sequence[Tensor]) -> Tensor:
    """``query @ key^T`` of operands. With two parts each, the product of the two small parts is left out."""
    product = query[0] @ key[0].transpose(-2, -1)
    if len(query) > 1:
        product += query[0] @ key[1].transpose(-2, -1) + query[1] @ key[0].transpose(-2, -1)
    return product
