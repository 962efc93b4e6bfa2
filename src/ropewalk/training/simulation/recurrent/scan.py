"""The kernels of mamba-ssm for Mamba-2: the scan alone, and one with the convolution, the gate and the last map.

The scan keeps its inputs, its output and the sums of decays. The larger function keeps its input, the output before the
gate and weights, and computes the convolution once more. Both compute the states before all chunks, in float32 and then
in the dtype of the inputs, once more in their backward, in which several such tensors exist at once.

Source: mamba-ssm 2.3.2.post1, ``ssd_combined.py``, ``layernorm_gated.py`` and the files of kernels in ``ops/triton``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.training.simulation.recurrent import convolution
from ropewalk.training.simulation.recurrent.launch import backward_in_autocast, forward_in_autocast, launch

# Shapes: B rows, L tokens, H heads of P dimensions, G groups, N numbers of a state, S tokens of a chunk.

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Inputs ``[B, L, H, P]``, step sizes ``[B, L, H]``, A ``[H]``, B and C ``[B, L, G, N]``."""

BLOCK = 32
"""Tokens of a chunk that a program takes at least; one kernel writes a partial sum for each."""
MULTIPROCESSORS = 132
"""Those of an H100 or H200; kernels divide the heads of a group among programs if there would be fewer of them."""


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: Any = None,
    return_final_states: bool = False,
) -> Any:
    """``[B, L, H, P]`` and, if asked for, the states behind the rows, float32 ``[B, H, P, N]``.

    Args:
        x, dt, A, B, C: inputs, step sizes, and the matrices of the state.
        chunk_size: tokens of a chunk.
        D: ``[H]``.
        dt_bias: ``[H]``.
        initial_states: ``[B, H, P, N]``.
        seq_idx: int32 ``[B, L]``, number of each token's run.
        dt_softplus, dt_limit: change values alone.
        return_final_states: whether to return states, which ranks pass on; the call is then beside the model's work.
    """
    found: tuple[Tensor, Tensor] = _Scan.apply(
        x, dt, A, B, C, D, dt_bias, initial_states, seq_idx, chunk_size, return_final_states
    )
    return found if return_final_states else found[0]


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    dt_limit: Any = None,
    return_final_states: bool = False,
    activation: Any = None,
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: Any = None,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int = 0,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    """``[B, L, hidden]`` from a mixer's projected hidden states.

    Args:
        zxbcdt: ``[B, L, 2·H·P + 2·G·N + H]``: gate, inputs of the convolution, and step sizes.
        conv1d_weight, conv1d_bias: ``[H·P + 2·G·N, width]`` and ``[H·P + 2·G·N]``.
        dt_bias, A, D: ``[H]``.
        chunk_size: tokens of a chunk.
        seq_idx: int32 ``[B, L]``, number of each token's run.
        rmsnorm_weight: ``[H·P]``; None for a gate without a norm.
        outproj_weight, outproj_bias: the last map.
        headdim, ngroups: P and G.
        dt_limit, activation, rmsnorm_eps, norm_before_gate: change values alone.
        return_final_states: transformers asks for none in training.
    """
    assert outproj_weight is not None
    assert not return_final_states
    output: Tensor = _Mixer.apply(
        zxbcdt,
        conv1d_weight,
        conv1d_bias,
        dt_bias,
        A,
        D,
        rmsnorm_weight,
        outproj_weight,
        outproj_bias,
        seq_idx,
        chunk_size,
        headdim,
        ngroups,
    )
    return output


@dataclass(frozen=True)
class _Call:
    """Sizes of a scan.

    Attributes:
        rows, length, heads, head_dim, groups, state, chunk: B, L, H, P, G, N and S.
        beside: whether nothing of it is work of the model.
    """

    rows: int
    length: int
    heads: int
    head_dim: int
    groups: int
    state: int
    chunk: int
    beside: bool = False

    @classmethod
    def of(cls, x: Tensor, B: Tensor, chunk: int, beside: bool = False) -> _Call:
        rows, length, heads, head_dim = x.shape
        return cls(rows, length, heads, head_dim, B.shape[2], B.shape[3], chunk, beside)

    @property
    def chunks(self) -> int:
        return -(-self.length // self.chunk)

    @property
    def scores(self) -> int:
        """Operations of C with B in all chunks."""
        return 2 * self.rows * self.length * self.chunk * self.groups * self.state

    @property
    def within(self) -> int:
        """Operations of scores with inputs."""
        return 2 * self.rows * self.length * self.chunk * self.heads * self.head_dim

    @property
    def with_state(self) -> int:
        """Operations of one product of all tokens with states."""
        return 2 * self.rows * self.length * self.heads * self.head_dim * self.state

    def run(
        self, name: str, reads: Any, writes: Any, new: int = 0, again: int = 0, gradient: bool = False
    ) -> None:
        """Run a kernel with operations of the model, and with those that it computes again."""
        launch(name, reads, writes, new + again, again + new * self.beside, gradient)

    @property
    def splits(self) -> int:
        """Partial sums of gradients for each group of heads."""
        of_group = self.heads // self.groups
        each = max(1, min(-(-self.rows * self.chunks * self.heads // MULTIPROCESSORS), of_group))
        return -(-of_group // each)

    def steps(self, like: Tensor) -> Tensor:
        """float32 ``[B, H, chunks, S]``."""
        return like.new_empty(self.rows, self.heads, self.chunks, self.chunk, dtype=torch.float32)

    def states(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, chunks, H, P, N]``."""
        return like.new_empty(self.rows, self.chunks, self.heads, self.head_dim, self.state, dtype=dtype)

    def pairs(self, like: Tensor) -> Tensor:
        """float32 ``[B, chunks, G, S, S]``."""
        return like.new_empty(
            self.rows, self.chunks, self.groups, self.chunk, self.chunk, dtype=torch.float32
        )

    def prepare(
        self,
        given: Given,
        dt_bias: Tensor | None,
        initial: Tensor | None,
        seq_idx: Tensor | None,
        dtype: torch.dtype,
        again: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sums of decays, step sizes, states before all chunks, and those behind the rows."""
        x, dt, A, B, _ = given
        decays, steps = self.steps(dt), self.steps(dt)
        launch("chunk_cumsum_fwd", (dt, A, dt_bias), (decays, steps), gradient=again)
        states = self.states(x, torch.float32)
        new, old = (0, self.with_state) if again else (self.with_state, 0)
        self.run("chunk_state_fwd", (B, x, steps, decays, seq_idx), (states,), new, old, again)
        before, behind = (
            self.states(x, dtype),
            x.new_empty(self.rows, self.heads, self.head_dim, self.state, dtype=torch.float32),
        )
        launch("state_passing_fwd", (states, decays, initial, seq_idx), (before, behind), gradient=again)
        return decays, steps, before, behind

    def multiply(self, C: Tensor, B: Tensor, seq_idx: Tensor | None, again: bool = False) -> Tensor:
        """Products of C and B in chunks."""
        made = self.pairs(C)
        new, old = (0, self.scores) if again else (self.scores, 0)
        self.run("bmm_chunk_fwd", (C, B, seq_idx), (made,), new, old, again)
        return made

    def forward(
        self,
        given: Given,
        D: Tensor | None,
        z: Tensor | None,
        dt_bias: Tensor | None,
        initial: Tensor | None,
        seq_idx: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """Output, the output before the gate if there is one, sums of decays, states before chunks and behind rows."""
        x, _, _, B, C = given
        decays, steps, before, behind = self.prepare(given, dt_bias, initial, seq_idx, C.dtype)
        pairs = self.multiply(C, B, seq_idx)
        output = x.new_empty(x.shape)
        ungated = None if z is None else x.new_empty(x.shape)
        reads = (pairs, x, steps, decays, C, before, D, z, seq_idx)
        self.run("chunk_scan_fwd", reads, (output, ungated), self.within + self.with_state)
        return output, ungated, decays, before, behind

    def backward(
        self,
        given: Given,
        D: Tensor | None,
        dt_bias: Tensor | None,
        initial: Tensor | None,
        seq_idx: Tensor | None,
        grad: Tensor,
        behind: Tensor | None,
        into: tuple[Tensor | None, Tensor, Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of inputs, A, D, the bias of step sizes and initial states.

        Args:
            grad: gradient of the output, without its gate.
            behind: gradient of the states behind the rows.
            into: where the gradients of inputs, if given, of step sizes, B and C go.
        """
        x, dt, A, B, C = given
        dx, ddt, dB, dC = into
        dt_in = dt.clone()
        pairs = self.multiply(C, B, seq_idx, again=True)
        decays, steps, states, _ = self.prepare(given, dt_bias, initial, seq_idx, torch.float32, again=True)
        gradients = self.states(x, torch.float32)
        self.run(
            "chunk_scan_bwd_dstates", (C, decays, grad, seq_idx), (gradients,), self.with_state, gradient=True
        )
        gradients, states, dinitial = self.passed_back(x, decays, states, gradients, initial, behind, seq_idx)
        dx = torch.empty_like(x) if dx is None else dx
        dsteps, dD = self.steps(x), None if D is None else torch.empty_like(D)
        self.run(
            "chunk_scan_chunk_state_bwd_dx",
            (x, pairs, grad, steps, decays, seq_idx, D, B, gradients),
            (dx, dsteps, dD),
            self.within + self.with_state,
            gradient=True,
        )
        of_B, later = self.of_groups("chunk_state_bwd_db", x, (x, gradients, B, steps, decays, seq_idx))
        of_C, earlier = self.of_groups("chunk_scan_bwd_dc", x, (grad, states, C, decays, seq_idx))
        shape = self.rows, self.chunks, self.splits, self.groups, self.chunk, self.chunk
        dpairs = x.new_empty(shape, dtype=torch.float32)
        self.run(
            "chunk_scan_bwd_dcb", (x, grad, steps, decays, seq_idx), (dpairs,), self.within, gradient=True
        )
        dpairs = dpairs.sum(2)
        for a, residual, result in ((C, of_B, dB), (B, of_C, dC)):
            self.run("bmm_chunk_bwd", (a, dpairs, residual), (result,), self.scores, gradient=True)
        # Of the sums of decays: before, behind and within a chunk.
        partial = self.steps(x)[:, :, :, None].expand(-1, -1, -1, -(-self.chunk // BLOCK), -1).contiguous()
        self.run("chunk_scan_bwd_ddAcs", (x, grad, steps, decays, pairs), (partial,), 0, self.within, True)
        within = partial.sum(3)
        within += later + earlier.flip([-1]).cumsum(-1).flip([-1])
        dA, dbias = torch.empty_like(A), None if dt_bias is None else torch.empty_like(dt_bias)
        launch("chunk_cumsum_bwd", (within, dsteps, dt_in, A, dt_bias), (ddt, dA, dbias), gradient=True)
        return dx, dA, dD, dbias, dinitial

    def of_groups(self, name: str, x: Tensor, reads: Any) -> tuple[Tensor, Tensor]:
        """Gradients of B or C, float32 ``[B, L, G, N]``, and of sums of decays."""
        shape = self.rows, self.length, self.splits, self.groups, self.state
        parts, decays = x.new_empty(shape, dtype=torch.float32), self.steps(x)
        self.run(name, reads, (parts, decays), self.with_state, gradient=True)
        return parts.sum(2), decays

    def passed_back(
        self,
        x: Tensor,
        decays: Tensor,
        states: Tensor,
        gradients: Tensor,
        initial: Tensor | None,
        behind: Tensor | None,
        seq_idx: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Gradients of the states behind chunks, and those states, in the dtype of inputs; of initial states."""
        narrow, converted = (self.states(x, x.dtype) for _ in range(2))
        dinitial = None if initial is None else torch.empty_like(initial)
        reads = (gradients, states, decays, behind, seq_idx)
        launch("state_passing_bwd", reads, (narrow, converted, dinitial), gradient=True)
        return narrow, converted, dinitial


class _Scan(torch.autograd.Function):
    @staticmethod
    @forward_in_autocast
    def forward(
        ctx: Any,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None,
        dt_bias: Tensor | None,
        initial: Tensor | None,
        seq_idx: Tensor | None,
        chunk: int,
        final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        call = _Call.of(x, B, chunk, beside=final)
        output, _, decays, _, behind = call.forward((x, dt, A, B, C), D, None, dt_bias, initial, seq_idx)
        ctx.save_for_backward(output, x, dt, decays, A, B, C, D, dt_bias, initial, seq_idx)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return output, behind if final else None

    @staticmethod
    @backward_in_autocast
    def backward(ctx: Any, grad: Tensor | None, behind: Tensor | None) -> Any:  # type: ignore[override]
        output, x, dt, _, A, B, C, D, dt_bias, initial, seq_idx = ctx.saved_tensors
        grad = torch.zeros_like(output) if grad is None else grad
        ddt, dB, dC = (torch.empty_like(each) for each in (dt, B, C))
        dx, dA, dD, dbias, dinitial = ctx.call.backward(
            (x, dt, A, B, C), D, dt_bias, initial, seq_idx, grad, behind, (None, ddt, dB, dC)
        )
        return dx, ddt, dA, dB, dC, dD, dbias, dinitial, None, None, None


class _Mixer(torch.autograd.Function):
    @staticmethod
    @forward_in_autocast
    def forward(
        ctx: Any,
        zxbcdt: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dt_bias: Tensor,
        A: Tensor,
        D: Tensor,
        norm: Tensor | None,
        last: Tensor,
        last_bias: Tensor | None,
        seq_idx: Tensor | None,
        chunk: int,
        head_dim: int,
        groups: int,
    ) -> Tensor:
        ctx.sizes = len(A), head_dim, groups, chunk
        z, xBC, dt = _parts(zxbcdt, weight, ctx.sizes)
        x, B, C = _inputs(convolution.convolved(xBC.transpose(1, 2), weight, bias, seq_idx), ctx.sizes)
        call = _Call.of(x, B, chunk)
        given = x, dt, A, B, C
        # The rest, such as states, lives until the end.
        if norm is None:
            gated = z.unflatten(2, (-1, head_dim))
            output, kept, *_rest = call.forward(given, D, gated, dt_bias, None, seq_idx)
            output, rstd = output.flatten(2), None
        else:
            kept, _, *_rest = call.forward(given, D, None, dt_bias, None, seq_idx)
            output = torch.empty_like(kept).flatten(2)
            rstd = kept.new_empty(groups * call.rows * call.length, dtype=torch.float32)
            launch("layer_norm_fwd", (kept, z, norm), (output, rstd))
        assert kept is not None
        device = last.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            output, last = output.to(dtype), last.to(dtype)
            last_bias = None if last_bias is None else last_bias.to(dtype)
        ctx.save_for_backward(zxbcdt, weight, bias, kept, A, D, dt_bias, seq_idx, norm, rstd, last, last_bias)
        # With gradients, which nothing here needs, so that a backward that repeats it is seen to do so.
        with torch.enable_grad():
            return F.linear(output, last.detach(), None if last_bias is None else last_bias.detach())

    @staticmethod
    @backward_in_autocast
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        zxbcdt, weight, bias, kept, A, D, dt_bias, seq_idx, norm, rstd, last, last_bias = ctx.saved_tensors
        z, xBC, dt = _parts(zxbcdt, weight, ctx.sizes)
        output = room = kept.new_empty(kept.shape).flatten(2)
        x, B, C = _inputs(
            convolution.convolved(xBC.transpose(1, 2), weight, bias, seq_idx, again=True), ctx.sizes
        )
        dzxbcdt, dxBC = torch.empty_like(zxbcdt), torch.empty_like(xBC)
        dz, into_xBC, ddt = _parts(dzxbcdt, weight, ctx.sizes)
        dx, dB, dC = _inputs(dxBC.transpose(1, 2), ctx.sizes)
        call = _Call.of(x, B, ctx.sizes[3])
        of_output = F.linear(grad, last.t())
        dnorm = None
        if norm is None:
            ungated, output = of_output.new_empty(kept.shape), kept.new_empty(kept.shape).flatten(2)
            launch("chunk_scan_bwd_dz", (of_output, kept, z, x, D), (dz, ungated, output), gradient=True)
        else:
            ungated, dnorm = torch.empty_like(kept), torch.empty_like(norm)
            launch(
                "layer_norm_bwd", (of_output, kept, norm, rstd, z), (ungated, dnorm, dz, room), gradient=True
            )
        _, dA, dD, dbias, _ = call.backward(
            (x, dt, A, B, C), D, dt_bias, None, seq_idx, ungated, None, (dx, ddt, dB, dC)
        )
        dlast = torch.einsum("bso,bsd->od", grad, output)
        dlast_bias = None if last_bias is None else grad.sum((0, 1))
        _, dweight, dconv_bias = convolution.gradients(
            xBC.transpose(1, 2), weight, bias, dxBC.transpose(1, 2), seq_idx, into_xBC.transpose(1, 2)
        )
        return dzxbcdt, dweight, dconv_bias, dbias, dA, dD, dnorm, dlast, dlast_bias, *[None] * 4


def _parts(zxbcdt: Tensor, weight: Tensor, sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Gate, inputs of the convolution, and step sizes."""
    heads, head_dim, _, _ = sizes
    z, xBC, dt = zxbcdt.split([heads * head_dim, weight.shape[0], heads], -1)  # type: ignore[no-untyped-call]
    return z, xBC, dt


def _inputs(xBC_BCL: Tensor, sizes: tuple[int, int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs ``[B, L, H, P]``, B and C ``[B, L, G, N]`` of a scan."""
    heads, head_dim, groups, _ = sizes
    xBC = xBC_BCL.transpose(1, 2)
    each = (xBC.shape[2] - heads * head_dim) // 2
    x, B, C = xBC.split([heads * head_dim, each, each], -1)  # type: ignore[no-untyped-call]
    return x.unflatten(2, (heads, head_dim)), B.unflatten(2, (groups, -1)), C.unflatten(2, (groups, -1))
