"""Fused functions: the same bits on a CPU, one compilation on a GPU, and the hook of the dry run."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
import torch._dynamo.testing

from ropewalk import fused as module
from ropewalk.fused import compiled_where, compiler_missing, fused, fused_calls_run_by, recomputed


def gated(gate, up):
    return torch.nn.functional.silu(gate) * up, gate.sum()


def test_a_cpu_runs_the_function_itself():
    gate, up = torch.randn(2, 5, 7)
    with mock.patch("torch.compile", side_effect=AssertionError):
        for ours, plain in zip(fused(gated)(gate, up=up), gated(gate, up), strict=True):
            assert torch.equal(ours, plain)


def test_a_runner_gets_every_call_until_its_context_ends():
    calls = []

    def runner(function, args, kwargs):
        calls.append((function, args, kwargs))
        return function(*args, **kwargs)

    x = torch.ones(3)
    function = fused(gated)
    with fused_calls_run_by(runner), fused_calls_run_by(runner):
        function(x, up=x)
    function(x, x)
    assert calls == [(gated, (x,), {"up": x})]


def test_a_function_inside_a_compiled_one_is_a_part_of_it():
    """One graph without a break, and the runner of a dry run is not called."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    inner = fused(gated)
    outer = torch.compile(lambda x: inner(x + 1, x)[0], backend=counter, fullgraph=True)
    x = torch.randn(4)
    assert torch.equal(outer(x), gated(x + 1, x)[0])
    assert counter.frame_count == 1


def test_more_graphs_than_torch_allows_are_compiled_in_any_thread_and_the_limit_of_others_stays():
    """Autograd runs checkpointed layers again in a thread of its own, and torch keeps limits by thread."""
    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("eager")
    function = compiled_where(lambda *_: True, lambda x: x + 1, counter)
    limit = torch._dynamo.config.recompile_limit
    # Each number of dimensions needs a graph.
    for number in range(limit):
        function(torch.ones([2] * number))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(function, torch.ones([2] * limit)).result().shape == (2,) * limit
    function(torch.ones([2] * (limit + 1)))
    assert counter.frame_count == limit + 2
    assert torch._dynamo.config.recompile_limit == limit


@pytest.mark.parametrize(
    ("device", "triton", "compiler", "missing"),
    [
        ("cuda", True, True, ""),
        ("cuda", False, True, "the package triton"),
        ("cuda", True, False, "a compiler (cc or gcc or clang)"),
        ("cpu", False, True, ""),
        ("cpu", False, False, "a compiler (g++ or clang++ or c++)"),
        ("mps", True, True, "a CUDA device or the CPU"),
    ],
)
def test_what_a_compiler_lacks_is_named(device, triton, compiler, missing):
    with (
        mock.patch.object(module.importlib.util, "find_spec", return_value=triton or None),
        mock.patch.object(module.shutil, "which", return_value="/usr/bin/c" if compiler else None),
    ):
        assert compiler_missing.__wrapped__(device) == missing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_compiles_once_for_one_shape():
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile
    with mock.patch("torch.compile", lambda f, **options: compiled(f, backend=counter, **options)):
        function = fused(gated)
        for _ in range(3):
            gate, up = torch.randn(2, 64, 32, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(function(gate, up), gated(gate, up))
    assert counter.frame_count == 1


class Norm(torch.nn.Module):
    """A norm as transformers writes it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(16, dtype=torch.bfloat16))

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def with_gradients(norm, forward, x, residual):
    """The outputs and gradients of a norm beside a residual, and the tensors that autograd saves of the norm."""
    x, norm.weight.grad = x.clone().requires_grad_(), None
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        normed = forward(norm, x)
    (normed * residual + x).sum().backward()
    return [normed.detach(), x.grad, norm.weight.grad], saved


@pytest.mark.parametrize("autocast", [False, True])
def test_a_recomputed_norm_has_the_same_bits_and_saves_its_input_alone(autocast):
    norm = Norm()
    x, residual = torch.randn(2, 3, 5, 16).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plain, much = with_gradients(norm, Norm.forward, x, residual)
        ours, saved = with_gradients(norm, recomputed(Norm.forward), x, residual)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(one, other)
    assert len(much) > 3
    assert [each.shape for each in saved] == [x.shape]


def test_a_recomputed_product_sees_the_forwards_autocast():
    """The backward runs outside of it, where the product would be in float32."""

    class Product(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x.float()).tanh()

    module, x = Product(16, 16), torch.randn(4, 16, dtype=torch.bfloat16)
    gradients = []
    for forward in (Product.forward, recomputed(Product.forward)):
        module.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = forward(module, x)
        output.float().sum().backward()
        gradients.append(module.weight.grad)
    assert torch.equal(*gradients)


def test_a_norm_in_float32_is_left_alone():
    norm = Norm().float()
    x = torch.randn(3, 16, requires_grad=True)
    assert type(recomputed(Norm.forward)(norm, x).grad_fn) is type(norm(x).grad_fn)


def test_a_condition_selects_the_calls_to_compile():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    function = compiled_where(lambda x: x.requires_grad, torch.sin, counter)
    x = torch.randn(3)
    function(x)
    assert counter.frame_count == 0
    assert torch.equal(function(x.requires_grad_()), x.sin())
    function(x)
    assert counter.frame_count == 1
