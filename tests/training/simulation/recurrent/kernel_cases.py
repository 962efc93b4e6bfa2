"""Calls of kernels of recurrent layers: on the simulated device, and in torch on the CPU."""

import importlib
import inspect
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ropewalk.planning.sizing.time import GPUS
from ropewalk.training.simulation.recording import Recorder
from ropewalk.training.simulation.recurrent.stand_ins import KERNELS
from ropewalk.training.simulation.roofline import operator_seconds
from ropewalk.training.simulation.simulated import register_device
from tests.models.attention import standin_kernels

FLOAT32, INT32 = torch.float32, torch.int32


@dataclass(frozen=True)
class Call:
    """A call of a kernel by keyword.

    Attributes:
        function: the function of transformers that it replaces.
        family: one that has this function.
        tensors: shapes, of bfloat16 unless the name is in ``dtypes``.
        dtypes: other dtypes.
        options: other arguments.
    """

    function: str
    family: str
    tensors: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def with_(self, options=None, **tensors):
        return replace(self, tensors=self.tensors | tensors, options=self.options | (options or {}))

    def in_torch(self):
        """The kernel with its signature, computed in torch."""
        module = importlib.import_module(f"transformers.models.{self.family}.modeling_{self.family}")
        return standin_kernels.in_torch(self.function, module)


T, K, V = 1000, 128, 128
GATED = Call(
    "torch_chunk_gated_delta_rule",
    "qwen3_next",
    {"q": (1, T, 2, K), "k": (1, T, 2, K), "v": (1, T, 4, V), "g": (1, T, 4), "beta": (1, T, 4)},
    {"g": FLOAT32, "initial_state": FLOAT32},
    {"use_qk_l2norm_in_kernel": True},
)
"""Two heads of keys, four of values."""
KIMI = Call(
    "chunk_kimi_delta_attention",
    "kimi_linear",
    {"q": (1, T, 2, K), "k": (1, T, 2, K), "v": (1, T, 2, V), "g": (1, T, 2, K), "beta": (1, T, 2)},
    {"g": FLOAT32, "initial_state": FLOAT32},
    {"use_qk_l2norm_in_kernel": True},
)
B, L, H, P, N = 2, 600, 8, 64, 32
SCAN = Call(
    "mamba2_chunk_scan",
    "bamba",
    {"x": (B, L, H, P), "dt": (B, L, H), "A": (H,), "B": (B, L, 2, N), "C": (B, L, 2, N), "D": (H,)}
    | {"dt_bias": (H,)},
    {"A": FLOAT32, "D": FLOAT32, "dt_bias": FLOAT32, "seq_idx": INT32},
    {"chunk_size": 256, "dt_softplus": True},
)
MIXER = Call(
    "mamba2_split_conv1d_scan_combined",
    "bamba",
    {"zxbcdt": (B, L, 2 * H * P + 4 * N + H), "conv1d_weight": (H * P + 4 * N, 4)}
    | {"conv1d_bias": (H * P + 4 * N,), "dt_bias": (H,), "A": (H,), "D": (H,), "outproj_weight": (96, H * P)},
    {"A": FLOAT32, "D": FLOAT32, "dt_bias": FLOAT32},
    {"chunk_size": 256, "headdim": P, "ngroups": 2, "norm_before_gate": False},
)
CONVOLUTION = Call(
    "causal_conv1d_fn",
    "qwen3_next",
    {"x": (B, 48, L), "weight": (48, 4), "bias": (48,)},
    options={"activation": "silu"},
)
SMALL = 0.015
"""Share of the bytes of partial sums that a backward makes for a moment, and that dry runs may leave out."""
PASSES_ON = {"output_final_state": True}


def _long(tokens):
    """16 heads of keys and 32 of values, normalized before, with a state before and behind the row."""
    keys, values = (1, tokens, 16, K), (1, tokens, 32, V)
    shapes = {"q": keys, "k": keys, "v": values, "g": values[:3], "beta": values[:3]}
    return GATED.with_({**PASSES_ON, "use_qk_l2norm_in_kernel": False}, **shapes, initial_state=(1, 32, K, V))


CALLS = {
    "gated": GATED,
    "gated, state": GATED.with_(PASSES_ON, initial_state=(1, 4, K, V)),
    "gated, 8k": _long(8192),
    "gated, 32k": _long(32768),
    "kimi": KIMI,
    "kimi, state": KIMI.with_(PASSES_ON, initial_state=(1, 2, K, V)),
    "scan": SCAN,
    "scan, state": SCAN.with_({"return_final_states": True}, initial_states=(B, H, P, N)),
    "mixer": MIXER,
    "mixer, norm": MIXER.with_(rmsnorm_weight=(H * P,)),
    "convolution": CONVOLUTION,
}


def play(name, kernel=None):
    """Run a call and its backward on the simulated device.

    Args:
        name: key of ``CALLS``.
        kernel: what is called; None for what a dry run calls.
    """
    call = CALLS[name]
    recorder = Recorder(register_device((9, 0)))
    with recorder.recording_of() as recording:
        recorder.phase = "start"
        made = _tensors(call, lambda shape, dtype: torch.empty(shape, dtype=dtype, device=recorder.device))
        start = len(recording.events)
        outputs = _all((kernel or KERNELS[call.function])(**made, **call.options))
        end, forward = len(recording.events), recording.operators.copy()
        gradients = [torch.empty_like(each) for each in outputs]
        again = len(recording.events)
        wanted = [each for each in made.values() if each.requires_grad]
        found = torch.autograd.grad(outputs, wanted, gradients)
        operators = {"forward": forward, "backward": recording.operators - forward}
        return {
            "results": described(outputs),
            "gradients": described(found),
            "made": tuple(_made(some) for some in (recording.events[start:end], recording.events[again:])),
            "bytes": (*heights(recording.events[start:end]), *heights(recording.events[again:])),
            "names": {
                key: {each.name for each in of if each.kind == "recurrent"} for key, of in operators.items()
            },
            "kernels": {
                key: {each: number for each, number in of.items() if each.kind == "recurrent"}
                for key, of in operators.items()
            },
            "flops": {key: _flops(of) for key, of in operators.items()},
        }


def seconds(name, gpu):
    """Planned time of a call's kernels on a kind of GPU."""
    played = play(name)["kernels"]
    return {
        moment: sum(operator_seconds(each, GPUS[gpu]) * number for each, number in kernels.items())
        for moment, kernels in played.items()
    }


def in_torch(name):
    """Results and gradients of a call, with real tensors."""
    call = CALLS[name]
    made = _tensors(call, lambda shape, dtype: torch.rand(shape).to(dtype))
    kernel = call.in_torch()
    options = {
        key: value for key, value in call.options.items() if key in inspect.signature(kernel).parameters
    }
    outputs = _all(kernel(**made, **options))
    wanted = [each for each in made.values() if each.requires_grad]
    found = torch.autograd.grad([each.float().sum() for each in outputs], wanted)
    return {"results": described(outputs), "gradients": described(found)}


def _tensors(call, make):
    made = {name: make(shape, call.dtypes.get(name, torch.bfloat16)) for name, shape in call.tensors.items()}
    return {name: each.requires_grad_(each.is_floating_point()) for name, each in made.items()}


def _all(outputs):
    return [each for each in (outputs if isinstance(outputs, tuple) else (outputs,)) if each is not None]


def described(tensors):
    return [(tuple(each.shape), each.dtype) for each in tensors]


def heights(events):
    """Bytes beside those at the start: at the end, and most at any time."""
    now = most = 0
    for event in events:
        now += 0 if event.allocation.host else event.change
        most = max(most, now)
    return now, most


def _made(events):
    """Bytes of all tensors that are made, however long they live."""
    return sum(max(0, event.change) for event in events if not event.allocation.host)


def _flops(operators):
    """Operations of kernels that are work of the model, and all of them."""
    kernels = [(each, number) for each, number in operators.items() if each.kind == "recurrent"]
    return (
        sum((each.flops - each.repeated) * number for each, number in kernels),
        sum(each.flops * number for each, number in kernels),
    )
