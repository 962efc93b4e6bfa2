"""Compare a dry run with the real step: peak memory of processes, operations, and bytes between ranks, on a CPU.

    python -m benchmarks.dry_run

Each configuration runs in processes of its own. Their peak is what the kernel counts as resident memory above that
before the model was made, so it includes what no tensor is: buffers of gloo, and what the allocator keeps.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import parsed, parser_of, program_says, write
from benchmarks.gpu_sizes import TINY
from ropewalk.parallel.rank_pool import process_context
from tests.dry_run.cases import model_folder, played, recipe_of
from tests.training.simulation.test_step import text_of

MODEL = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "float32": (1, {}),
    "checkpointing": (1, {"gradient_checkpointing": True}),
    "bfloat16 with float32 masters": (1, {"precision": "bfloat16"}),
    "bfloat16 autocast": (1, {"precision": "bfloat16-autocast"}),
    "LoRA": (1, {"adapter": {"rank": 16}}),
    "2 ranks, FSDP": (2, {"parallel": {"shard": 2}, "rows_per_step": 2}),
    "2 ranks, Ulysses, checkpointing": (2, {"parallel": {"sequence": 2}, "gradient_checkpointing": True}),
    "2 ranks, ring, checkpointing": (2, {"parallel": {"ring": 2}, "gradient_checkpointing": True}),
}
"""Number of ranks and changes of the recipe. Offload to CPU memory cannot be told from the device on a CPU."""

REAL = """
import json, sys
from ropewalk.parallel.rank_pool import Ranks
from tests.training.simulation.real_cases import real_step
text, ranks = open(sys.argv[1]).read(), int(sys.argv[2])
if ranks == 1:
    print(json.dumps([real_step(text, 1, 1000)]))
else:
    with Ranks(ranks) as pool:
        print(json.dumps(pool.run(real_step, text, ranks, 1000)))
"""


def measured(recipe: Any, ranks: int, folder: Path, small: bool) -> list[Any]:
    """Bytes by kind, dense operations and peak of each rank's process."""
    import json

    path = folder / "recipe.yaml"
    path.write_text(text_of(recipe))
    # The allocator then returns what is freed, as the dry run counts it.
    environment = {
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "0",
        "OMP_NUM_THREADS": "1",
    }
    said = program_says(REAL, (path, ranks), small, **environment)
    found: list[Any] = json.loads(said.splitlines()[-1])
    return found


def planned(recipe: Any, ranks: int, rank: int) -> dict[str, Any]:
    """The same from a dry run, in a process that runs nothing else."""
    from ropewalk.training.simulation.memory import memory_of

    step = played(recipe, ranks, "cpu", rank, document_length=1000)
    sent: dict[str, int] = {}
    for (_, kind), (size, _) in step.recording.sent.items():
        sent[kind] = sent.get(kind, 0) + size
    dense = sum(count for (kind, _), count in step.recording.flops.items() if kind == "dense")
    return {"peak": memory_of(step).peak, "dense": dense, "sent": sent}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    options = parsed(parser, {"context": 512, "cases": ["float32"]}, arguments)
    shape = {**TINY, "max_position_embeddings": 128} if options.small else MODEL
    results = []
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, process_context()) as process:
        model = model_folder(Path(folder) / "model", **shape)
        for name in options.cases:
            ranks, changes = CASES[name][0], dict(CASES[name][1])
            top = {key: changes.pop(key) for key in ("precision", "adapter") if key in changes}
            recipe = recipe_of(model, context=options.context, **changes)
            if top:
                recipe = type(recipe).model_validate(recipe.model_dump() | top)
            real = measured(recipe, ranks, Path(folder), options.small)
            for rank, (sent, dense, peak) in enumerate(real):
                ours = process.submit(planned, recipe, ranks, rank).result()
                result = {
                    "configuration": name,
                    "rank": rank,
                    "measured_peak": peak,
                    "planned_peak": ours["peak"],
                    "ratio": ours["peak"] / peak,
                    "operations_equal": dense == ours["dense"],
                    "bytes_equal": sent == ours["sent"],
                }
                results.append(result)
                print(
                    f"{name:34} rank {rank}: measured {peak / 1e6:8,.1f} MB, planned {ours['peak'] / 1e6:8,.1f} MB "
                    f"({result['ratio'] - 1:+.1%}); operations {'equal' if result['operations_equal'] else 'differ'}, "
                    f"bytes {'equal' if result['bytes_equal'] else 'differ'}",
                    flush=True,
                )
    write("dry_run", {"model": shape, "context": options.context, "results": results}, options)


if __name__ == "__main__":
    main()
