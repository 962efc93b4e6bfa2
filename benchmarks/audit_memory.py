"""Peak memory of the precision audit, whose attention is computed block by block.

    python -m benchmarks.audit_memory [--small-length 8192] [--length 4096]

Measured: a pass of a small model over a long row in float64, bfloat16 and float32, beside what the attention weights
of all its layers would take; and passes in float64, the heaviest, of models with the shape of Llama 2 7B and Llama 3
8B but only one to three of their layers. Each model runs in a process of its own.

Projected, not measured: all layers of those two on a GPU of 24 GiB, as weights + peak of two layers + growth a layer
+ hidden states of other passes. The peak is what PyTorch's allocator holds at once above the weights; on a GPU, CUDA's
own memory comes on top.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers

from benchmarks.common import in_own_process, parsed, parser_of, write
from benchmarks.gpu_sizes import TINY as TINIEST
from ropewalk.audit.arithmetic import DTYPES, stock_arithmetic
from ropewalk.audit.audited_model import AuditedModel
from ropewalk.audit.first_token import first_token_effects
from ropewalk.audit.layer_attention import BLOCK_BYTES
from ropewalk.audit.passes import LOGITS_BYTES, Runner, shifted
from ropewalk.io.lengths import parse_length
from ropewalk.versions import software_versions
from tests.audit.peak_bytes import peak_bytes

GIB = 2**30
GPU_BYTES = 24 * GIB

SMALL = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
TINY = {**TINIEST, "vocab_size": SMALL["vocab_size"]}
"""The row of the first-token experiment is the longer, the fewer logits a token has."""
SEVEN = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": 128,
}
SHAPES = {
    "Llama 2 7B": {**SEVEN, "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": 32},
    "Llama 3 8B": {**SEVEN, "vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
}

HELD_PASSES = 11
"""Most passes of a row whose hidden states are held at once: by the mitigations. All count as float64, as eight are."""

SHIFT = 16


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--small-length", type=parse_length, default=8192)
    parser.add_argument("--length", type=parse_length, default=4096)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parsed(parser, {"small_length": 64, "length": 64}, arguments)
    if options.one is not None:
        print(json.dumps(measured(**json.loads(options.one))))
        return
    long, length = options.small_length, options.length
    alone = partial(measured_alone, options.small)
    small = [
        alone("small", shape=TINY if options.small else SMALL, passes=[[name, long]])
        for name in ("float64", "bfloat16", "float32")
    ]
    few_layers, projections = [], []
    for name, shape in ({"tiny": TINY} if options.small else SHAPES).items():
        found = []
        for layers, lengths in ((1, (length // 4, length)), (2, (length // 4, length)), (3, (length // 4,))):
            found.append(
                alone(
                    name,
                    shape={**shape, "num_hidden_layers": layers},
                    passes=[["float64", n] for n in lengths],
                    logits=layers == 1,
                )
            )
        few_layers += found
        projections.append(projected(name, shape, length, *found))
        print(json.dumps(projections[-1], indent=2), flush=True)
    write(
        "audit_memory",
        {
            "software": software_versions(),
            "settings": {
                "small_length": long,
                "length": length,
                "block_bytes": BLOCK_BYTES,
                "logits_bytes": LOGITS_BYTES,
            },
            "measured": {"small": small, "few_layers": few_layers},
            "projected": projections,
        },
        options,
    )


def measured_alone(small: bool, name: str, **measurement: Any) -> dict[str, Any]:
    """``measured`` in a fresh process, so that its resident memory is its own."""
    found: dict[str, Any] = {"model": name}
    found |= in_own_process("benchmarks.audit_memory", ["--one", json.dumps(measurement)], small)
    for one in found["passes"]:
        print(
            f"{name}, {found['shape']['num_hidden_layers']} layers, {one['length']} tokens, {one['dtype']}: "
            f"peak {one['peak_bytes'] / GIB:.2f} GiB beyond the weights, {one['seconds']:.1f} s; dense attention "
            f"{one['dense_attention_bytes'] / GIB:.2f} GiB",
            flush=True,
        )
    return found


def measured(shape: dict[str, int], passes: list[tuple[str, int]], logits: bool = False) -> dict[str, Any]:
    """Peak and time of passes over random tokens of a model with random bfloat16 weights.

    Args:
        shape: for the config.
        passes: dtype and row length in tokens of each, lengths increasing.
        logits: whether to measure the first-token experiment as well, on a row of two chunks of logits.
    """
    longest = max(length for _, length in passes)
    config = transformers.LlamaConfig(max_position_embeddings=longest, **shape)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    audited_model = AuditedModel.of(model)
    result: dict[str, Any] = {
        "shape": shape,
        "weights_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "passes": [],
    }
    for name, length in passes:
        arithmetic = stock_arithmetic(DTYPES[name])
        # On a CPU blocks are smaller; what is projected is what a GPU needs.
        runner = Runner(audited_model, length, BLOCK_BYTES)
        ids = torch.randint(0, config.vocab_size, (length,))
        before, began = resident(), time.perf_counter()
        peak = peak_bytes(partial(runner.run, ids, arithmetic, shifted(length, 0)))
        result["passes"].append(
            {
                "dtype": name,
                "length": length,
                "seconds": time.perf_counter() - began,
                "peak_bytes": peak,
                "resident_bytes_before": before,
                "resident_peak_bytes_with_profiler": resident(),
                "dense_attention_bytes": dense_attention(shape, length, arithmetic.wide),
            }
        )
    if logits:
        tokens = 2 * (LOGITS_BYTES // (8 * config.vocab_size))
        runner = Runner(audited_model, tokens + SHIFT, block_bytes=BLOCK_BYTES)
        ids = torch.randint(0, config.vocab_size, (tokens,))
        arithmetic = stock_arithmetic(torch.bfloat16)
        began = time.perf_counter()
        peak = peak_bytes(lambda: first_token_effects(runner, [ids], arithmetic, 0, SHIFT))
        result["first_token"] = {
            "length": tokens,
            "chunks_of_logits": 2,
            "seconds": time.perf_counter() - began,
            "peak_bytes": peak,
        }
    return result


def dense_attention(shape: dict[str, int], length: int, dtype: torch.dtype) -> int:
    """Bytes of the attention weights of all layers."""
    return shape["num_hidden_layers"] * shape["num_attention_heads"] * length**2 * dtype.itemsize


def resident() -> int:
    """Peak resident memory of this process so far, bytes; the profiler that finds the peak itself takes up to 1 GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def projected(name: str, shape: dict[str, int], length: int, *found: dict[str, Any]) -> dict[str, Any]:
    """What all layers would take on a GPU: bounds added up, though not all are reached at the same time.

    From the second layer on the model's input is held beside the hidden states, so the growth a layer is that of the
    third, measured on a quarter of the row and scaled with it. It is counted in full, though what it consists of (what
    each token received) lies on the CPU when the model does not.

    Args:
        name: of the model.
        shape: all of its layers.
        length: of the row, tokens.
        found: measurements of one, two and three layers.
    """
    layers = shape["num_hidden_layers"]
    one, two, three = found
    weights = one["weights_bytes"] + (layers - 1) * (two["weights_bytes"] - one["weights_bytes"])
    of_quarter = three["passes"][0]["peak_bytes"] - two["passes"][0]["peak_bytes"]
    growth = max(0, of_quarter) * length // three["passes"][0]["length"]
    run = two["passes"][-1]["peak_bytes"] + growth * (layers - 2)
    logits = one["first_token"]["peak_bytes"]
    held = HELD_PASSES * length * shape["hidden_size"] * torch.float64.itemsize
    total = weights + max(run, logits) + held
    return {
        "model": name,
        "layers": layers,
        "length": length,
        "weights_bytes": weights,
        "two_layers_peak_bytes": two["passes"][-1]["peak_bytes"],
        "growth_per_layer_bytes": growth,
        "growth_bytes": growth * (layers - 2),
        "first_token_peak_bytes": logits,
        "held_hidden_states": HELD_PASSES,
        "held_hidden_states_bytes": held,
        "total_bytes": total,
        "total_gib": total / GIB,
        "gpu_gib": GPU_BYTES / GIB,
        "left_gib": (GPU_BYTES - total) / GIB,
        "fits": total < GPU_BYTES,
        "dense_attention_gib": dense_attention(shape, length, torch.float64) / GIB,
    }


if __name__ == "__main__":
    main()
