"""Peak resident memory of one training step: all weights against an adapter, each in a process of its own.

    python -m benchmarks.adapter_memory [--hidden 1024] [--layers 8] [--length 512]

The states are counted exactly: weights, their float32 masters, gradients, and AdamW's moments.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.common import in_own_process, parsed, parser_of, write
from benchmarks.training_memory import peak
from ropewalk import PackedLayout, Row
from ropewalk.attention.layout import next_token_labels
from ropewalk.models.adapter import NewAdapter
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import cast_parameters, checkpoint_activations, load_model
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import ForwardPass, micro_batches, train_step

KINDS: dict[str, dict[str, Any] | None] = {
    "all weights": None,
    "LoRA, embeddings and norms": {},
    "LoRA alone": {"also_train": []},
}


def save(folder: Path, options: argparse.Namespace) -> None:
    """A random Llama in bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=options.length,
        dtype=torch.bfloat16,
    )
    transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)


def measure(folder: str, kind: str, length: int) -> dict[str, Any]:
    """Memory of one step in bfloat16 with float32 masters, layers computed again in the backward."""
    whole = load_model(folder)
    settings = KINDS[kind]
    if settings is None:
        masters = {f"model.{name}": p.detach().float() for name, p in whole.named_parameters()}
    else:
        NewAdapter(AdapterSettings(**settings), 0, folder, 0, 0).add_to(whole, torch.float32, torch.bfloat16)
        trained = ((name, p) for name, p in whole.named_parameters() if p.requires_grad)
        masters = {f"model.{name}": p.detach().clone() for name, p in trained}
    cast_parameters(whole, torch.bfloat16)
    model = LossModel(whole, OutputHead.of(whole)).train()
    checkpoint_activations(whole)
    optimizer = MasterAdamW(model.named_parameters(), Optimizer(), masters)
    del masters
    layout = PackedLayout.from_lengths([length // 4] * 4, "anchor")
    ids = torch.randint(0, 32000, (layout.total_length,), generator=torch.Generator().manual_seed(0))
    rows = [Row(ids, next_token_labels(ids, layout), layout)]
    before = peak()
    result = train_step(model, micro_batches(rows), optimizer, 1e-5, ForwardPass("bfloat16"))
    trained_parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    parameters = sum(p.numel() for p in model.parameters())
    return {
        "kind": kind,
        "parameters": parameters,
        "trained": trained_parameters,
        # 2 bytes of each weight; masters, gradients and two moments of those that are trained, in float32.
        "states_gib": (2 * parameters + 16 * trained_parameters) / 2**30,
        "before_step_gib": before,
        "peak_gib": peak(),
        "loss": result.loss,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--model")
    options = parsed(parser, {"hidden": 64, "layers": 1, "length": 64}, arguments)
    if options.kind:
        print(json.dumps(measure(options.model, options.kind, options.length)))
        return
    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), options)
        found = []
        for kind in KINDS:
            each = ["--model", folder, "--length", str(options.length), "--kind", kind]
            found.append(in_own_process("benchmarks.adapter_memory", each, options.small))
            print(
                f"{kind:28} trained {found[-1]['trained']:>12,} of {found[-1]['parameters']:,}  states "
                f"{found[-1]['states_gib']:.2f} GiB  peak {found[-1]['peak_gib']:.2f} GiB"
            )
    given = {key: getattr(options, key) for key in ("hidden", "layers", "length")}
    write("adapter_memory", {"settings": given, "kinds": found}, options)


if __name__ == "__main__":
    main()
