"""Fused functions: the same bits on a CPU, one compilation on a GPU, and the hook of the dry run."""

from unittest import mock

import pytest
import torch
import torch._dynamo.testing

from ropewalk import fused as module
from ropewalk.fused import compiler_works, fused, fused_calls_run_by


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


@pytest.mark.parametrize(
    ("triton", "c", "works"), [(True, True, True), (False, True, False), (True, False, False)]
)
def test_a_compiler_needs_triton_and_c(triton, c, works):
    with (
        mock.patch.object(module.importlib.util, "find_spec", return_value=triton or None),
        mock.patch.object(module.shutil, "which", return_value="/usr/bin/cc" if c else None),
    ):
        assert compiler_works.__wrapped__() is works


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
