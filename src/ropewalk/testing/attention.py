"""The float64 oracle of packed attention, a second one by repeated anchors, and the budget they set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.layout import PackedLayout

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def oracle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layouts: Sequence[PackedLayout],
    scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention by the layouts' definition, in the dtype of its inputs; give float64 for an oracle.

    Args and returns: as :func:`ropewalk.attend`, one layout a row.
    """
    visible = torch.stack([layout.dense_mask() for layout in layouts]).unsqueeze(1).to(q.device)
    return plain_attention(q, k, v, visible, scale or 1 / math.sqrt(q.shape[-1]), softcap)


def repeated_anchor_attention(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
    """Anchor attention of one row as AnchorContext computes it: the anchor stands before every document.

    Independent of the mask and of the engines: each document is run by itself behind a copy of the anchor.
    """
    scale = 1 / math.sqrt(q.shape[-1])
    output = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
    anchor = torch.arange(layout.anchor_length)
    for document in layout.document_ids.unique().tolist():
        own = (layout.document_ids == document).nonzero().flatten()
        index = own if document < 0 else torch.cat([anchor, own])
        causal = torch.ones(len(index), len(index), dtype=torch.bool).tril().to(q.device)
        part = plain_attention(q[:, :, index], k[:, :, index], v[:, :, index], causal, scale, None)
        output[:, :, own] = part[:, :, len(index) - len(own) :]
    return output


@dataclass(frozen=True)
class AttentionErrors:
    """Largest deviations from the float64 oracle, of an engine and of plain attention in the same dtype.

    Attributes:
        engine: for output and gradients of q, k, v in turn.
        plain: the same for plain attention in the engine's dtype.
        unit: one rounding, in that dtype, of the largest value that each is computed from: what "equal" can
            mean at best. For the gradients of q and k these are the products of cotangent and value before
            their mean is taken away: where the two cancel, the difference is all rounding. For that of v it is the
            sum over queries without its signs, for the same reason, and half a rounding for each level of a
            pairwise sum, since no kernel sums all queries of a group exactly.
    """

    engine: tuple[float, ...]
    plain: tuple[float, ...]
    unit: tuple[float, ...]

    @property
    def worst_share(self) -> float:
        """The largest error as a share of the budget ``2 * plain + unit``; at most 1 is within it."""
        budgets = (2 * p + u for p, u in zip(self.plain, self.unit, strict=True))
        return max(e / budget if e else 0.0 for e, budget in zip(self.engine, budgets, strict=True))


def attention_errors(
    engine: Attention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layouts: Sequence[PackedLayout],
    softcap: float | None = None,
    gradients: bool = True,
) -> AttentionErrors:
    """Hold an engine against the float64 oracle, output and gradients.

    Args:
        engine: the attention to test, of q, k, v.
        q, k, v: as for :func:`ropewalk.attend`, in the dtype to test in.
        layouts: one a row.
        softcap: as for attend.
        gradients: whether the engine has a backward.
    """
    cotangent = cotangent_of(q, k, v)

    def values(attention: Attention, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.detach().to(dtype).requires_grad_(gradients) for x in (q, k, v)]
        output = attention(*inputs)
        grads = torch.autograd.grad(output, inputs, cotangent.to(dtype)) if gradients else ()
        return [x.detach().double() for x in (output, *grads)]

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracle_attention(q, k, v, layouts, softcap=softcap)

    exact = values(oracle, torch.float64)

    def errors(found: list[Tensor]) -> tuple[float, ...]:
        # NaN must not slip through a maximum.
        return tuple(
            float((a - b).abs().nan_to_num(nan=math.inf).max()) for a, b in zip(found, exact, strict=True)
        )

    eps = torch.finfo(q.dtype).eps
    products = float(cotangent.norm(dim=-1).max() * v.double().norm(dim=-1).max()) / math.sqrt(q.shape[-1])
    sources = (
        0.0,
        products * float(k.abs().max()),
        products * float(q.abs().max()),
        _summed(oracle, q, k, v, cotangent) if gradients else 0.0,
    )
    return AttentionErrors(
        engine=errors(values(engine, q.dtype)),
        plain=errors(values(oracle, q.dtype)),
        unit=tuple(eps * max(float(x.abs().max()), s) for x, s in zip(exact, sources, strict=False)),
    )


def cotangent_of(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What :func:`attention_errors` gives the backward of q, k, v; the same at every call, in float64."""
    torch.manual_seed(0)
    return torch.randn(*q.shape[:3], v.shape[-1], dtype=torch.float64).to(q.device)


def _summed(attention: Attention, q: Tensor, k: Tensor, v: Tensor, cotangent: Tensor) -> float:
    """The largest sum over queries of weight times ``|cotangent|``, times half the levels of a pairwise sum."""
    values = v.detach().double().requires_grad_()
    output = attention(q.detach().double(), k.detach().double(), values)
    (gradient,) = torch.autograd.grad(output, values, cotangent.abs())
    queries = q.shape[2] * q.shape[1] // k.shape[1]
    return float(gradient.max()) * max(1.0, math.log2(queries) / 2)
