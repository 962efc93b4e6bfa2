"""The kernels of flash-linear-attention for gated DeltaNet and Kimi's rule: ``chunk_gated_delta_rule``, ``chunk_kda``.

Both compute in chunks of 64 tokens. The forward keeps what its kernels read of inputs, normalised queries and keys, the
decays summed within chunks, and the triangular matrices of chunks; states, and what values become, are computed once
more in the backward. The states of all chunks, of key_dim x value_dim for each head, exist at once while a forward or a
backward runs.

Source: fla-core 0.6.0, ``ops/gated_delta_rule/chunk.py``, ``chunk_fwd.py`` and ``wy_fast.py``; ``ops/kda/chunk.py``,
``chunk_fwd.py``, ``chunk_bwd.py`` and ``chunk_intra.py``; ``ops/common/chunk_delta_h.py`` and ``chunk_o.py``: tensors
that they allocate, and the products of their kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ropewalk.planning.sizing.recurrent import DELTA_CHUNK
from ropewalk.training.simulation.recurrent.launch import backward_in_autocast, forward_in_autocast, launch

# Shapes: B rows, T tokens, H key heads, G value heads, K and V dimensions of a head, C tokens of a chunk, N sequences.

SUB_CHUNK = 16
"""Tokens of the blocks on the diagonal of a chunk, which Kimi's rule computes in float32."""
KEYS_OF_A_PROGRAM = {"dqkwg": 128, "intra": 32}
"""Dimensions of a key that a program of a kernel takes on Hopper; it writes a partial sum of gradients for each."""


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Outputs ``[B, T, G, V]`` and, if asked for, the state behind each sequence, float32 ``[N, G, K, V]``.

    Args:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, G, V]``.
        g: decays, float32 ``[B, T, G]``.
        beta: ``[B, T, G]``.
        initial_state: ``[N, G, K, V]``.
        output_final_state: whether to return the state, which ranks pass on; this call is then beside the model's work.
        use_qk_l2norm_in_kernel: whether queries and keys are normalised.
        cu_seqlens: offsets ``[N + 1]`` of sequences in one row; None for one sequence a row.
    """
    output: tuple[Tensor, Tensor | None] = _GatedDelta.apply(
        q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )
    return output


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """As :func:`chunk_gated_delta_rule`, with decays ``[B, T, G, K]``."""
    output: tuple[Tensor, Tensor | None] = _Kimi.apply(
        q, k, v, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens
    )
    return output


class _Products(NamedTuple):
    """Numbers of products of a kernel in a chunk, by their sizes: C x C x K, C x C x V, C x K x V, C x C x C."""

    ck: int = 0
    cv: int = 0
    kv: int = 0
    cc: int = 0


NONE = _Products()


@dataclass(frozen=True)
class _Call:
    """Sizes of a call.

    Attributes:
        tokens: of all rows.
        heads, key_dim, value_dim: G, K and V.
        sequences: number of them.
        chunks: of each row; no fewer than there are.
        beside: whether nothing of it is work of the model.
    """

    tokens: int
    heads: int
    key_dim: int
    value_dim: int
    sequences: int
    chunks: int
    beside: bool

    @classmethod
    def of(cls, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, beside: bool) -> _Call:
        rows, length = v.shape[:2]
        chunks, sequences = -(-length // DELTA_CHUNK), rows
        if cu_seqlens is not None:
            sequences = cu_seqlens.shape[0] - 1
            # Each sequence may end in a chunk that is not full.
            chunks = min(length, chunks + sequences - 1)
        return cls(rows * length, v.shape[2], k.shape[3], v.shape[3], sequences, chunks, beside)

    def flops(self, of: _Products) -> int:
        k, v, c = self.key_dim, self.value_dim, DELTA_CHUNK
        each = c * (of.ck * k + of.cv * v + of.cc * c) + of.kv * k * v
        return 2 * self.tokens * self.heads * each

    def run(
        self,
        name: str,
        reads: Iterable[Tensor | None],
        writes: Iterable[Tensor | None],
        new: _Products = NONE,
        again: _Products = NONE,
        gradient: bool = False,
    ) -> None:
        """Run a kernel with products of the model, and with those that it computes again."""
        made, repeated = self.flops(new), self.flops(again)
        launch(name, reads, writes, made + repeated, repeated + made * self.beside, gradient)

    def states(self, like: Tensor) -> Tensor:
        """The states before all chunks."""
        return like.new_empty(like.shape[0], self.chunks, self.heads, self.key_dim, self.value_dim)

    def keys(self, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """``[B, T, G, K]``."""
        return like.new_empty(*like.shape[:2], self.heads, self.key_dim, dtype=dtype or like.dtype)

    def scores(self, like: Tensor, dtype: torch.dtype | None = None, width: int = DELTA_CHUNK) -> Tensor:
        """``[B, T, G, C]``."""
        return like.new_empty(*like.shape[:2], self.heads, width, dtype=dtype or like.dtype)

    def advance(
        self, k: Tensor, w: Tensor, u: Tensor, g: Tensor, initial: Tensor | None, final: bool, again: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """States before all chunks, what values become, and the state behind each sequence if ``final``."""
        h, v_new = self.states(k), torch.empty_like(u)
        shape = (self.sequences, self.heads, self.key_dim, self.value_dim)
        behind = k.new_zeros(shape, dtype=torch.float32) if final else None
        products = _Products(kv=2)
        new, old = (NONE, products) if again else (products, NONE)
        self.run("chunk_delta_h_fwd", (k, w, u, g, initial), (h, v_new, behind), new, old, again)
        return h, v_new, behind

    def retreat(
        self,
        q: Tensor,
        k: Tensor,
        w: Tensor,
        g: Tensor,
        initial: Tensor | None,
        behind: Tensor | None,
        grad: Tensor,
        dv: Tensor,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Gradients of states before all chunks and before sequences, and of values."""
        dh, dv2 = self.states(q), torch.empty_like(dv)
        before = None if initial is None else torch.empty_like(initial, dtype=torch.float32)
        reads = (q, k, w, g, behind, grad, dv)
        self.run("chunk_delta_h_bwd", reads, (dh, before, dv2), _Products(kv=3), gradient=True)
        return dh, before, dv2


def _normalized(x: Tensor) -> tuple[Tensor, Tensor]:
    y, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    launch("l2norm_fwd", (x,), (y, rstd))
    return y, rstd


def _normalized_backward(y: Tensor, rstd: Tensor | None, dy: Tensor) -> Tensor:
    if rstd is None:
        return dy
    dx = torch.empty_like(y)
    launch("l2norm_bwd", (y, rstd, dy), (dx,), gradient=True)
    return dx


def _summed(g: Tensor, gradient: bool = False) -> Tensor:
    """Decays summed within chunks."""
    total = torch.empty_like(g, dtype=torch.float32)
    launch("chunk_local_cumsum", (g,), (total,), gradient=gradient)
    return total


def _of_key_heads(x: Tensor, heads: int) -> Tensor:
    """Gradients ``[B, T, G, K]``, added up over the value heads of each key head."""
    return x if x.shape[2] == heads else x.unflatten(2, (heads, -1)).sum(3)  # type: ignore[no-untyped-call,no-any-return]


def _decompressed(
    call: _Call, k: Tensor, v: Tensor, beta: Tensor, A: Tensor, g: Tensor, again: bool
) -> tuple[Tensor, Tensor]:
    """Keys and values multiplied with the inverse of a chunk's triangular matrix."""
    w, u, products = call.keys(k), torch.empty_like(v), _Products(1, 1)
    new, old = (NONE, products) if again else (products, NONE)
    call.run("recompute_w_u", (k, v, beta, A, g), (w, u), new, old, again)
    return w, u


class _GatedDelta(torch.autograd.Function):
    @staticmethod
    @forward_in_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        final: bool,
        normalize: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        # Copies of what is not contiguous live until the forward ends.
        given = [each.contiguous() for each in (q, k, v, g, beta)]
        q, k, v, g, beta = given
        call = _Call.of(k, v, cu_seqlens, beside=final)
        (q, q_rstd), (k, k_rstd) = (_normalized(each) if normalize else (each, None) for each in (q, k))
        g = _summed(g)
        A = call.scores(k).zero_()
        call.run("chunk_kkt_solve", (k, g, beta), (A,), _Products(ck=1))
        output, behind = _GatedDelta.outputs(call, q, k, v, g, beta, A, initial, final)
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, g, beta, A, initial)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return output, behind

    @staticmethod
    def outputs(
        call: _Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A: Tensor,
        initial: Tensor | None,
        final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        w, u = _decompressed(call, k, v, beta, A, g, again=False)
        h, v_new, behind = call.advance(k, w, u, g, initial, final, again=False)
        output = torch.empty_like(v)
        call.run("chunk_fwd_o", (q, k, v_new, h, g), (output,), _Products(1, 1, 1))
        return output, behind

    @staticmethod
    @backward_in_autocast
    def backward(ctx: Any, grad: Tensor | None, behind: Tensor | None) -> Any:  # type: ignore[override]
        q, q_rstd, k, k_rstd, v, g, beta, A, initial = ctx.saved_tensors
        grad = torch.zeros_like(v) if grad is None else grad.contiguous()
        dq, dk, *rest = _GatedDelta.gradients(ctx.call, q, k, v, g, beta, A, initial, grad, behind)
        dq, dk = _normalized_backward(q, q_rstd, dq), _normalized_backward(k, k_rstd, dk)
        return dq, dk, *rest, None, None, None

    @staticmethod
    def gradients(
        call: _Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        A: Tensor,
        initial: Tensor | None,
        grad: Tensor,
        behind: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        heads = k.shape[2]
        w, u = _decompressed(call, k, v, beta, A, g, again=True)
        h, v_new, _ = call.advance(k, w, u, g, initial, False, again=True)
        dv = torch.empty_like(grad)
        call.run("chunk_bwd_dv_local", (q, k, g, grad), (dv,), _Products(cv=1), _Products(ck=1), True)
        dh, dinitial, dv = call.retreat(q, k, w, g, initial, behind, grad, dv)
        dq, dk, dw = call.keys(q), call.keys(k), torch.empty_like(w)
        parts = -(-call.key_dim // KEYS_OF_A_PROGRAM["dqkwg"])
        dg = g.new_empty(parts, *g.shape, dtype=torch.float32)
        # No names for the tensors of a call: they would keep what is replaced.
        call.run(
            "chunk_bwd_dqkwg",
            (q, k, v_new, w, g, h, dv, grad, dh),
            (dq, dk, dw, dg),
            _Products(2, 1, 3),
            gradient=True,
        )
        dq, dk, dg = _of_key_heads(dq, heads), _of_key_heads(dk, heads), dg.sum(0)
        dk2, dv2, dbeta, dg2 = call.keys(k), torch.empty_like(v), torch.empty_like(beta), torch.empty_like(g)
        call.run(
            "prepare_wy_repr_bwd",
            (k, v, beta, g, A, dw, dv),
            (dk2, dv2, dbeta, dg2),
            _Products(4, 2),
            _Products(ck=1, cc=2),
            gradient=True,
        )
        dk.add_(_of_key_heads(dk2, heads))
        dg = _summed(dg.add_(dg2), gradient=True)
        return dq, dk, dv2, dg, dbeta, dinitial


class _Kimi(torch.autograd.Function):
    @staticmethod
    @forward_in_autocast
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        final: bool,
        normalize: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        given = [each.contiguous() for each in (q, k, v, g, beta)]
        q, k, v, g, beta = given
        call = _Call.of(k, v, cu_seqlens, beside=final)
        (q, q_rstd), (k, k_rstd) = (_normalized(each) if normalize else (each, None) for each in (q, k))
        total = _summed(g)
        output, behind, Aqk, Akk = _Kimi.outputs(call, q, k, v, total, beta, initial, final)
        ctx.save_for_backward(q, q_rstd, k, k_rstd, v, total, g, beta, Aqk, Akk, initial)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return output, behind

    @staticmethod
    def outputs(
        call: _Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial: Tensor | None,
        final: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        w, u, kg, Aqk, Akk = _Kimi.chunks(call, q, k, v, g, beta)
        h, v_new, behind = call.advance(kg, w, u, g, initial, final, again=False)
        output = torch.zeros_like(v)
        call.run("chunk_gla_fwd_o", (q, v_new, g, h, Aqk), (output,), _Products(cv=1, kv=1))
        return output, behind, Aqk, Akk

    @staticmethod
    def chunks(
        call: _Call, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        Aqk, Akk, diagonal = call.scores(k), call.scores(k).zero_(), call.scores(k, torch.float32, SUB_CHUNK)
        launch("chunk_kda_fwd_intra_token_parallel", (q, k, g, beta), (Aqk, diagonal))
        call.run("chunk_kda_fwd_inter_solve", (q, k, g, beta, diagonal), (Aqk, Akk), _Products(ck=2))
        w, u, _, kg = _Kimi.decompressed(call, k, v, g, beta, Akk, None, again=False)
        return w, u, kg, Aqk, Akk

    @staticmethod
    def decompressed(
        call: _Call, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A: Tensor, q: Tensor | None, again: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Keys and values as for the gated rule; queries, if given, and keys with their decays."""
        w, u, qg, kg = call.keys(k), torch.empty_like(v), None if q is None else call.keys(q), call.keys(k)
        products = _Products(1, 1)
        new, old = (NONE, products) if again else (products, NONE)
        call.run("recompute_w_u", (q, k, v, beta, A, g), (w, u, qg, kg), new, old, again)
        return w, u, qg, kg

    @staticmethod
    @backward_in_autocast
    def backward(ctx: Any, grad: Tensor | None, behind: Tensor | None) -> Any:  # type: ignore[override]
        q, q_rstd, k, k_rstd, v, g, g_input, beta, Aqk, Akk, initial = ctx.saved_tensors
        grad = torch.zeros_like(v) if grad is None else grad.contiguous()
        dq, dk, dv, dg, dbeta, dinitial = _Kimi.gradients(
            ctx.call, q, k, v, g, beta, Aqk, Akk, initial, grad, behind
        )
        dq, dk = _normalized_backward(q, q_rstd, dq), _normalized_backward(k, k_rstd, dk)
        found = [x.to(like.dtype) for x, like in ((dq, q), (dk, k), (dv, v), (dg, g_input), (dbeta, beta))]
        return *found, dinitial, None, None, None

    @staticmethod
    def gradients(
        call: _Call,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        Aqk: Tensor,
        Akk: Tensor,
        initial: Tensor | None,
        grad: Tensor,
        behind: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        heads, wide = k.shape[2], torch.float32
        w, u, qg, kg = _Kimi.decompressed(call, k, v, g, beta, Akk, q, again=True)
        assert qg is not None
        h, v_new, _ = call.advance(kg, w, u, g, initial, False, again=True)
        dAqk, dv = call.scores(v, wide), torch.empty_like(grad)
        call.run("chunk_kda_bwd_dAv", (q, k, v_new, Aqk, grad), (dAqk, dv), _Products(cv=2), gradient=True)
        dh, dinitial, dv = call.retreat(qg, kg, w, g, initial, behind, grad, dv)
        of_u, dq, dk, dv, dg = (
            dv,
            call.keys(q, wide),
            call.keys(k, wide),
            torch.empty_like(v),
            torch.empty_like(g),
        )
        dbeta, dAkk = torch.empty_like(beta, dtype=wide), torch.empty_like(Akk, dtype=wide)
        call.run(
            "chunk_kda_bwd_wy_dqkg",
            (q, k, v, v_new, g, beta, Akk, h, grad, dh, of_u),
            (dq, dk, dv, dg, dbeta, dAkk),
            _Products(2, 2, 3),
            _Products(cc=2),
            gradient=True,
        )
        del of_u
        dq, dk, dg, dbeta = _Kimi.within_chunks(call, q, k, g, beta, dAqk, dAkk, dq, dk, dg, dbeta)
        dq, dk = _of_key_heads(dq, heads), _of_key_heads(dk, heads)
        return dq, dk, dv, _summed(dg, gradient=True), dbeta, dinitial

    @staticmethod
    def within_chunks(
        call: _Call,
        q: Tensor,
        k: Tensor,
        g: Tensor,
        beta: Tensor,
        dAqk: Tensor,
        dAkk: Tensor,
        dq: Tensor,
        dk: Tensor,
        dg: Tensor,
        dbeta: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dq2, dk2, dg2 = (torch.empty_like(each) for each in (dq, dk, dg))
        parts = -(-call.key_dim // KEYS_OF_A_PROGRAM["intra"])
        dbeta2 = beta.new_empty(parts, *beta.shape, dtype=torch.float32)
        reads = (q, k, g, beta, dAqk, dAkk, dq, dk, dg)
        call.run("chunk_kda_bwd_intra", reads, (dq2, dk2, dbeta2, dg2), _Products(ck=4), gradient=True)
        return dq2, dk2, dg2, dbeta2.sum(0).add_(dbeta)
