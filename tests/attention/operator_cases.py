"""torch's attention operators for CUDA, written out from their documentation, for tests on a CPU.

Each checks its arguments as a kernel would, computes in float32 and rounds its results to the dtype of the inputs.
"""

import math

import torch

from ropewalk.attention import operators
from ropewalk.attention.engines import varlen


def _scores(q, k, seen, scale):
    groups = q.shape[1] // k.shape[1]
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.repeat_interleave(groups, 1).float()) * scale
    return scores.masked_fill(~seen, -math.inf)


def _forward(q, k, v, seen, scale):
    """``[n, H, V]`` and ``[H, n]`` of ``[n, H, D]``, ``[m, K, D]``, ``[m, K, V]``; a query may see nothing."""
    scores, groups = _scores(q, k, seen, scale), q.shape[1] // k.shape[1]
    weights = scores.softmax(-1).nan_to_num(0.0)
    out = torch.einsum("hnm,mhd->nhd", weights, v.repeat_interleave(groups, 1).float())
    return out.to(q.dtype), scores.logsumexp(-1)


def _backward(grad, q, k, v, out, lse, seen, scale):
    groups = q.shape[1] // k.shape[1]
    grad_f, q_f = grad.float(), q.float()
    weights = (_scores(q, k, seen, scale) - lse[..., None]).exp()
    delta = (grad_f * out.float()).sum(-1).T
    dp = torch.einsum("nhd,mhd->hnm", grad_f, v.repeat_interleave(groups, 1).float())
    ds = weights * (dp - delta[..., None]) * scale
    dq = torch.einsum("hnm,mhd->nhd", ds, k.repeat_interleave(groups, 1).float())
    dk = torch.einsum("hnm,nhd->mhd", ds, q_f).unflatten(1, (-1, groups)).sum(2)
    dv = torch.einsum("hnm,nhd->mhd", weights, grad_f).unflatten(1, (-1, groups)).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _seen_in_runs(cu_q, cu_k, window):
    seen = torch.zeros(int(cu_q[-1]), int(cu_k[-1]), dtype=torch.bool)
    for run in range(len(cu_q) - 1):
        (a, b), (c, d) = cu_q[run : run + 2].tolist(), cu_k[run : run + 2].tolist()
        own = torch.ones(b - a, d - c, dtype=torch.bool).tril((d - c) - (b - a))
        seen[a:b, c:d] = own if window < 0 else own.triu((d - c) - (b - a) - window)
    return seen


def _check_runs(q, k, v, cu_q, cu_k, max_q, max_k, is_causal, window_size):
    assert len(cu_q) == len(cu_k) <= varlen.MAX_RUNS + 1
    assert (max_q, max_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
    assert cu_q.dtype == cu_k.dtype == torch.int32
    assert (int(cu_q[-1]), int(cu_k[-1])) == (len(q), len(k))
    assert {x.stride(2) for x in (q, k, v)} == {1}
    assert q.shape[2] == k.shape[2] == v.shape[2]
    assert k.shape == v.shape
    # Grouped heads reach the kernel as they are.
    assert q.shape[1] % k.shape[1] == 0
    assert window_size[1] == 0
    assert is_causal == (window_size[0] < 0)


def varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, *, scale, window_size):
    _check_runs(q, k, v, cu_q, cu_k, max_q, max_k, is_causal, window_size)
    return (*_forward(q, k, v, _seen_in_runs(cu_q, cu_k, window_size[0]), scale), torch.zeros(2))


def varlen_backward(
    grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, is_causal, rng_state, *, scale, window_size
):
    _check_runs(q, k, v, cu_q, cu_k, max_q, max_k, is_causal, window_size)
    assert grad.stride(2) == 1
    assert lse.is_contiguous()
    assert (lse.shape, lse.dtype) == ((q.shape[1], len(q)), torch.float32)
    return _backward(grad, q, k, v, out, lse, _seen_in_runs(cu_q, cu_k, window_size[0]), scale)


def _by_token(x):
    return x.transpose(0, 1)


def _check_dense(q, k, v, causal):
    assert {x.stride(3) for x in (q, k, v)} == {1}
    assert q.shape[3] == k.shape[3] == v.shape[3]
    assert not causal or q.shape[2] == k.shape[2]


def _dense_forward(q, k, v, causal, scale):
    _check_dense(q, k, v, causal)
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = seen.tril() if causal else seen
    parts = [_forward(*map(_by_token, each), seen, scale) for each in zip(q, k, v, strict=True)]
    return torch.stack([out.transpose(0, 1) for out, _ in parts]), torch.stack([lse for _, lse in parts])


def _dense_backward(grad, q, k, v, out, lse, causal, scale):
    _check_dense(q, k, v, causal)
    assert lse.is_contiguous()
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
    seen = seen.tril() if causal else seen
    parts = [
        _backward(*map(_by_token, each[:5]), each[5], seen, scale)
        for each in zip(grad, q, k, v, out, lse, strict=True)
    ]
    return tuple(torch.stack([x.transpose(0, 1) for x in each]) for each in zip(*parts, strict=True))


class Shapes(list):
    """Shapes of queries and keys for which cuDNN would compile a graph."""


def use_written_out(patch, backend="cuDNN"):
    """Let all engines run as on a GPU, whose dense attention is that of a backend, with operators that are written out.

    Args:
        patch: pytest's monkeypatch.
        backend: what torch would choose.

    Returns:
        The shapes of calls of cuDNN.
    """
    shapes = Shapes()

    def cudnn(q, k, v, bias, with_lse, dropout, causal, debug, *, scale):
        assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
        shapes.append((q.shape, k.shape))
        out, lse = _dense_forward(q, k, v, causal, scale)
        return out, lse[..., None], None, None, q.shape[2], k.shape[2], torch.zeros(()), torch.zeros(()), None

    def cudnn_backward(
        grad, q, k, v, out, lse, seed, offset, bias, cu_q, cu_k, most_q, most_k, dropout, causal, *, scale
    ):
        assert (bias, cu_q, cu_k, dropout) == (None, None, None, 0.0)
        assert (most_q, most_k) == (q.shape[2], k.shape[2])
        assert lse.shape[3] == 1
        return _dense_backward(grad, q, k, v, out, lse[..., 0], causal, scale)

    def flash(q, k, v, dropout, causal, debug, *, scale):
        assert (dropout, debug) == (0.0, False)
        out, lse = _dense_forward(q, k, v, causal, scale)
        return out, lse, None, None, q.shape[2], k.shape[2], torch.zeros(2), torch.zeros(()), None

    def flash_backward(
        grad, q, k, v, out, lse, cu_q, cu_k, most_q, most_k, dropout, causal, seed, offset, *, scale
    ):
        assert (cu_q, cu_k, dropout) == (None, None, 0.0)
        assert (most_q, most_k) == (q.shape[2], k.shape[2])
        return _dense_backward(grad, q, k, v, out, lse, causal, scale)

    patch.setattr(operators, "VARLEN", varlen_forward)
    patch.setattr(operators, "VARLEN_BACKWARD", varlen_backward)
    patch.setattr(operators, "CUDNN", cudnn)
    patch.setattr(operators, "CUDNN_BACKWARD", cudnn_backward)
    patch.setattr(operators, "FLASH", flash)
    patch.setattr(operators, "FLASH_BACKWARD", flash_backward)
    patch.setattr("ropewalk.attention.engines.sdpa.dense_backend", lambda q, k, v: backend)
    return shapes
