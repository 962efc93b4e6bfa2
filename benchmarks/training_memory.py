"""Peak resident memory of one training step at a long row and a large vocabulary, with a tiny model.

    python -m benchmarks.training_memory [--length 32768] [--vocabulary 131072]

The full float32 logits would take length x vocabulary x 4 bytes; the loss is computed in chunks instead.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence

import torch
import transformers

from benchmarks.attention_cpu import document_lengths
from benchmarks.common import parsed, parser_of, settings_of, write
from ropewalk import PackedLayout, Row
from ropewalk.attention.choices import PATTERNS
from ropewalk.attention.layout import next_token_labels
from ropewalk.models.compute.losses import LOGITS_BYTES, LossModel, OutputHead
from ropewalk.models.load import attach
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import micro_batches, train_step

GIB = 2**30


def peak() -> float:
    """Peak resident memory of this process so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--vocabulary", type=int, default=131072)
    parser.add_argument("--pattern", default="anchor", choices=PATTERNS)
    options = parsed(parser, {"length": 256, "vocabulary": 97}, arguments)
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=options.length,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    attach(model)
    lengths = document_lengths(options.length - 1, 342)
    layout = PackedLayout.from_lengths(lengths, options.pattern, 1)
    ids = torch.randint(0, options.vocabulary, (options.length,))
    row = Row(ids, next_token_labels(ids, layout), layout)
    optimizer = MasterAdamW(model.named_parameters(), Optimizer())
    trained = LossModel(model, OutputHead.of(model))
    before = peak()
    began = time.perf_counter()
    result = train_step(trained.train(), micro_batches([row]), optimizer, 1e-3)
    seconds = time.perf_counter() - began
    logits = options.length * options.vocabulary * 4 / GIB
    print(f"peak {peak():.2f} GiB, {before:.2f} before the step; full logits alone would be {logits:.1f} GiB")
    print(f"loss {result.loss:.3f}, {seconds:.1f} s")
    write(
        "training_memory",
        {
            "settings": settings_of(options),
            "parameters": sum(p.numel() for p in model.parameters()),
            "peak_gib": peak(),
            "before_step_gib": before,
            "full_logits_gib": logits,
            "chunk_logits_gib": LOGITS_BYTES / GIB,
            "loss": result.loss,
            "seconds": seconds,
        },
        options,
    )


if __name__ == "__main__":
    main()
