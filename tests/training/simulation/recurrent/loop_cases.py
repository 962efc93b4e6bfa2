"""Loops over chunks, recorded whole and by a few of their chunks, on the simulated device."""

import torch
from torch import nn
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from ropewalk.training.simulation.recording import Recorder
from ropewalk.training.simulation.recurrent.few_chunks import few_chunks
from ropewalk.training.simulation.simulated import register_device
from tests.training.simulation.recurrent.kernel_cases import described, heights

CHUNK = 64


def weighted(x, size, scale):
    """A loop that keeps the sum of chunks before, and multiplies it with a module's parameter."""
    state, outputs = x.new_zeros(x.shape[0], 1, x.shape[2]), []
    for chunk in x.split(size, 1):
        outputs.append((chunk + state) @ scale)
        state = state + chunk.sum(1, keepdim=True)
    return torch.cat(outputs, 1), state


def _delta(make, tokens):
    q, k, v = (make(1, tokens, 2, 16, dtype=torch.bfloat16) for _ in range(3))
    g, beta = make(1, tokens, 2), make(1, tokens, 2, dtype=torch.bfloat16)
    return (q, k, v), {"g": g, "beta": beta, "output_final_state": True}, [q, k, v, g, beta]


def both(tokens, rule, checkpointed=False):
    """What a loop takes if a dry run plays it whole, and by a few chunks.

    Args:
        tokens: tokens of the row.
        rule: ``delta`` for that of transformers, or ``weighted``.
        checkpointed: whether the forward is one whose intermediate values are dropped.
    """
    return [_recorded(tokens, rule, checkpointed, few) for few in (False, True)]


def _recorded(tokens, rule, checkpointed, few):
    recorder = Recorder(register_device((9, 0)))
    recorder.checkpointed = checkpointed
    with recorder.recording_of() as recording:
        recorder.phase = "forward"

        def make(*shape, dtype=torch.float32):
            return torch.empty(*shape, dtype=dtype, device=recorder.device, requires_grad=True)

        module = None
        if rule == "delta":
            function = torch_chunk_gated_delta_rule.__wrapped__
            args, options, wanted = _delta(make, tokens)
        else:
            module = nn.Linear(32, 32, bias=False, device=recorder.device)
            x = make(1, tokens, 32)
            function, args, options = (lambda x: weighted(x, CHUNK, module.weight)), (x,), {}
            wanted = [x, module.weight]
        if few:
            function = few_chunks(recorder, rule, function, CHUNK, module)
        start = len(recording.events)
        with torch.set_grad_enabled(not checkpointed):
            outputs = function(*args, **options)
        end = len(recording.events)
        results = described(outputs)
        found = []
        if not checkpointed:
            gradients = [torch.empty_like(each) for each in outputs]
            again = len(recording.events)
            found = torch.autograd.grad(outputs, wanted, gradients)
        del outputs
        return {
            "results": results,
            "gradients": described(found),
            "forward": heights(recording.events[start:end]),
            "backward": () if checkpointed else heights(recording.events[again:]),
            "flops": recording.flops,
            "moved": sum(each.bytes * number for each, number in recording.operators.items()),
        }
