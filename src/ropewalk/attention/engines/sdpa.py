"""The sdpa kernel: torch's dense attention, one call for each run. The default on a CPU, and for single runs on Hopper.

cuDNN compiles a graph for each shape, which takes longer than a call. If a batch has runs of different
lengths, a run is therefore computed as a slice of a length in steps of 256. It is exact: a causal query does not see
the rows behind its run, and in the backward these rows have a log-sum-exp so large that they add nothing.

What torch's operators do not compute, such as windows, runs in :mod:`ropewalk.attention.engines.plain`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.attention.engines import plain
from ropewalk.attention.engines.runs import RunGroup, Runs
from ropewalk.attention.operators import Backend, dense_backend, dense_backward, dense_forward
from ropewalk.attention.options import AttentionOptions

STEP = 256
"""Tokens by which the lengths of slices differ: 88 shapes in 100 rows of 128K, for 5 % more operations."""
NOTHING = 1e9
"""A log-sum-exp with which no score has a weight."""


def forward(q: Tensor, k: Tensor, v: Tensor, runs: Runs, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """See :class:`ropewalk.attention.engines.runs.Kernel`."""
    parts = _parts(q, k, v, runs, options)
    if len(parts) == 1:
        found, sums = parts[0].forward(q, k, v)
        return found.transpose(1, 2).flatten(0, 1), sums.transpose(0, 1).flatten(1)
    out, lse = q.new_empty(*q.shape[:2], v.shape[2]), runs.new_lse(q)
    for part in parts:
        part.group.queries_of(out)[:], part.group.lse_of(lse)[:] = part.forward(q, k, v)
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    runs: Runs,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`ropewalk.attention.engines.runs.Kernel`."""
    parts = _parts(q, k, v, runs, options)
    if len(parts) == 1:
        found = parts[0].backward(grad, q, k, v, out, lse)
        dq, dk, dv = (x.transpose(1, 2).flatten(0, 1) for x in found)
        return dq, dk, dv
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    for part in parts:
        group = part.group
        group.queries_of(dq)[:], group.keys_of(dk)[:], group.keys_of(dv)[:] = part.backward(
            grad, q, k, v, out, lse
        )
    return dq, dk, dv


def _parts(q: Tensor, k: Tensor, v: Tensor, runs: Runs, options: AttentionOptions) -> list[_Part]:
    backend = dense_backend(q, k, v) if options.softcap is None else None
    # A single group is the whole batch, whose shape recurs as well.
    sliced = backend == "cuDNN" and not runs.recurring and len(runs.groups) > 1
    parts = []
    for group in runs.singles if sliced else runs.groups:
        whole = options.window is None or options.window >= group.keys
        parts.append(_Part(group, backend if whole else None, sliced, options))
    return parts


@dataclass(frozen=True, eq=False)
class _Part:
    """Attention of some runs of equal size.

    Attributes:
        group: the runs; a single one if it is sliced.
        backend: operator to run; None for plain torch.
        sliced: whether lengths are rounded up to multiples of ``STEP``.
        options: scale, soft cap and window.
    """

    group: RunGroup
    backend: Backend | None
    sliced: bool
    options: AttentionOptions

    def forward(self, q_QHD: Tensor, k_SKD: Tensor, v_SKV: Tensor) -> tuple[Tensor, Tensor]:
        """``[runs, H, queries, V]``, and the log-sum-exp ``[runs, H, queries]``."""
        group, scale = self.group, self.options.scale_of(q_QHD.shape[2])
        if self.backend is None:
            return plain.forward_of_group(
                group.queries_of(q_QHD), group.keys_of(k_SKD), group.keys_of(v_SKV), self.options
            )
        own = self._queries(q_QHD), self._last_keys(k_SKD), self._last_keys(v_SKV)
        out, lse = dense_forward(self.backend, *own, True, scale)
        out, lse = out[:, :, : group.queries], lse[:, :, : group.queries]
        if not self._before:
            return out, lse
        # Keys before the queries: all of them are seen.
        seen = group.queries_of(q_QHD), self._first_keys(k_SKD), self._first_keys(v_SKV)
        other, other_lse = dense_forward(self._exact_backend, *seen, False, scale)
        m = torch.logaddexp(lse, other_lse)
        both = [o.to(m.dtype) * (each - m).exp()[..., None] for o, each in ((out, lse), (other, other_lse))]
        return (both[0] + both[1]).to(out.dtype), m

    def backward(
        self, grad_QHV: Tensor, q_QHD: Tensor, k_SKD: Tensor, v_SKV: Tensor, out_QHV: Tensor, lse_HQ: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients ``[runs, H, queries, D]``, ``[runs, K, keys, D]`` and ``[runs, K, keys, V]``."""
        group, scale = self.group, self.options.scale_of(q_QHD.shape[2])
        grad, q, out = (group.queries_of(x) for x in (grad_QHV, q_QHD, out_QHV))
        lse = group.lse_of(lse_HQ)
        if self.backend is None:
            return plain.backward_of_group(
                grad, q, group.keys_of(k_SKD), group.keys_of(v_SKV), out, lse, self.options
            )
        dq, dk, dv = dense_backward(
            self.backend,
            self._queries(grad_QHV),
            self._queries(q_QHD),
            self._last_keys(k_SKD),
            self._last_keys(v_SKV),
            self._queries(out_QHV),
            F.pad(lse, (0, self._length - group.queries), value=NOTHING),
            True,
            scale,
        )
        dq, dk, dv = (x[:, :, : group.queries] for x in (dq, dk, dv))
        if not self._before:
            return dq, dk, dv
        before = self._first_keys(k_SKD), self._first_keys(v_SKV)
        more, dk_before, dv_before = dense_backward(
            self._exact_backend, grad, q, before[0], before[1], out, lse, False, scale
        )
        return dq + more, torch.cat([dk_before, dk], 2), torch.cat([dv_before, dv], 2)

    @property
    def _before(self) -> int:
        """Keys of a run before those of its queries."""
        return self.group.keys - self.group.queries

    @property
    def _length(self) -> int:
        """Length of the run, or of the slice."""
        return -(-self.group.queries // STEP) * STEP if self.sliced else self.group.queries

    @property
    def _exact_backend(self) -> Backend:
        # FlashAttention compiles nothing for a shape.
        assert self.backend is not None
        return "flash" if self.sliced else self.backend

    def _queries(self, x_QHD: Tensor) -> Tensor:
        group = self.group
        return self._slice(x_QHD, group.first_query) if self.sliced else group.queries_of(x_QHD)

    def _last_keys(self, x_SKD: Tensor) -> Tensor:
        """As many keys as there are queries."""
        if self.sliced:
            return self._slice(x_SKD, self.group.first_key + self._before)
        return self.group.keys_of(x_SKD)[:, :, self._before :]

    def _first_keys(self, x_SKD: Tensor) -> Tensor:
        return self.group.keys_of(x_SKD)[:, :, : self._before]

    def _slice(self, x_QHD: Tensor, start: int) -> Tensor:
        """``[1, H, length, D]``: what follows in the buffer, and zeros behind its end."""
        own = x_QHD[start : start + self._length]
        padded = F.pad(own, (0, 0, 0, 0, 0, self._length - len(own))) if len(own) < self._length else own
        return padded[None].transpose(1, 2)
