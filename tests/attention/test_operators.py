"""torch's private operators are as they are called, and those that run on a CPU keep their contract."""

import pytest
import torch

from ropewalk.attention import operators
from ropewalk.attention.operators import dense_backend, dense_backward, dense_forward

RESULTS = "(Tensor output, Tensor logsumexp, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
SIGNATURES = {
    "VARLEN": (
        "(Tensor query, Tensor key, Tensor value, Tensor cu_seq_q, Tensor? cu_seq_k, SymInt max_q, SymInt max_k, "
        "bool is_causal=False, float? scale=None, SymInt[]? window_size=None",
        "-> (Tensor, Tensor, Tensor)",
    ),
    "VARLEN_BACKWARD": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, Tensor cu_seq_q, "
        "Tensor cu_seq_k, SymInt max_q, SymInt max_k, bool is_causal, Tensor rng_state, float? scale=None, "
        "SymInt[]? window_size=None)",
        "-> (Tensor, Tensor, Tensor)",
    ),
    "CPU_FLASH": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None)",
        "-> (Tensor output, Tensor logsumexp)",
    ),
    "CPU_FLASH_BACKWARD": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None)",
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    ),
    "FLASH": (
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, "
        "bool return_debug_mask=False, *, float? scale=None)",
        f"-> {RESULTS}Tensor rng_state, Tensor unused, Tensor debug_attn_mask)",
    ),
    "FLASH_BACKWARD": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor cum_seq_q, "
        "Tensor cum_seq_k, SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, Tensor philox_seed, "
        "Tensor philox_offset, *, float? scale=None)",
        "-> (Tensor grad_query, Tensor grad_key, Tensor grad_value)",
    ),
    "CUDNN": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_bias, bool compute_log_sumexp, float dropout_p=0., "
        "bool is_causal=False, bool return_debug_mask=False, *, float? scale=None)",
        f"-> {RESULTS}Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)",
    ),
    "CUDNN_BACKWARD": (
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor philox_seed, "
        "Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q, Tensor cum_seq_k, SymInt max_q, SymInt max_k, "
        "float dropout_p, bool is_causal, *, float? scale=None)",
        "-> (Tensor, Tensor, Tensor)",
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_operators_are_declared_as_they_are_called(name):
    declared = str(getattr(operators, name).default._schema)
    arguments, results = SIGNATURES[name]
    # A version of torch may add arguments at the end of VARLEN's, which have defaults.
    assert arguments in declared
    assert declared.endswith(results)


def qkv(heads=4, kv_heads=2, queries=9, keys=9, width=8, dtype=torch.float64):
    torch.manual_seed(0)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(2, h, n, width, dtype=torch.float64).to(dtype) for h, n in shapes]


@pytest.mark.parametrize(("causal", "queries"), [(True, 9), (False, 9), (False, 3)])
def test_the_dense_operator_of_a_cpu_takes_grouped_heads(causal, queries):
    inputs = [x.requires_grad_() for x in qkv(queries=queries)]
    out, lse = dense_forward("CPU flash", *(x.detach() for x in inputs), causal, 0.3)
    q, k, v = inputs
    scores = q @ k.repeat_interleave(2, 1).mT * 0.3
    if causal:
        scores = scores.masked_fill(~torch.ones(9, 9, dtype=torch.bool).tril(), -torch.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    grad = torch.randn_like(expected)
    found = dense_backward("CPU flash", grad, *(x.detach() for x in inputs), out, lse, causal, 0.3)
    wanted = (expected, scores.logsumexp(-1), *torch.autograd.grad(expected, inputs, grad))
    for a, b in zip((out, lse, *found), wanted, strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=0, atol=1e-13)


def test_gradients_with_a_larger_log_sum_exp_are_those_of_a_part_of_the_keys():
    """Of a softmax over ten keys, the backward of the first six with the output and lse of all."""
    q, k, v = (x.requires_grad_() for x in qkv(keys=10))
    scores = q @ k.repeat_interleave(2, 1).mT
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    grad = torch.randn_like(expected)
    _, dk, dv = torch.autograd.grad(expected, (q, k, v), grad)
    first = [x.detach() for x in (q, k[:, :, :6], v[:, :, :6])]
    _, found_dk, found_dv = dense_backward(
        "CPU flash", grad, *first, expected.detach(), scores.logsumexp(-1).detach(), False, 1.0
    )
    torch.testing.assert_close(found_dk, dk[:, :, :6], rtol=0, atol=1e-13)
    torch.testing.assert_close(found_dv, dv[:, :, :6], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "value_width", "backend"),
    [
        ("cpu", torch.float64, 7, 7, "CPU flash"),
        ("cpu", torch.bfloat16, 7, 6, None),
        ("meta", torch.bfloat16, 64, 64, "flash"),
        ("meta", torch.float32, 64, 64, None),
        ("meta", torch.bfloat16, 60, 60, None),
        ("meta", torch.bfloat16, 512, 512, None),
        ("meta", torch.bfloat16, 64, 32, None),
    ],
)
def test_the_backend_is_named(device, dtype, width, value_width, backend):
    q, v = (torch.empty(3, 2, n, dtype=dtype, device=device) for n in (width, value_width))
    assert dense_backend(q, q, v) == backend


def test_hopper_takes_cudnn(monkeypatch):
    monkeypatch.setattr("ropewalk.attention.engines.capabilities.capability_of", lambda device: (9, 0))
    for width in (64, 256):
        q = torch.empty(3, 2, width, dtype=torch.bfloat16, device="meta")
        assert dense_backend(q, q, q) == "cuDNN"
    for backend in ("cuDNN", "flash"):
        shaped = torch.empty(1, 2, 256, 128, dtype=torch.bfloat16, device="meta")
        out, lse = dense_forward(backend, shaped, shaped, shaped, True, 1.0)
        assert (lse.shape, lse.dtype) == ((1, 2, 256), torch.float32)
        gradients = dense_backward(backend, out, shaped, shaped, shaped, out, lse, True, 1.0)
        assert {x.shape for x in gradients} == {shaped.shape}
