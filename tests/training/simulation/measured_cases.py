"""Training steps that were measured on one H200 on 2026-11-27, as plans of the same steps."""

import json
import random
from pathlib import Path
from unittest import mock

import torch
import yaml

from ropewalk.parallel import World
from ropewalk.planning.sizing.time import GPUS
from ropewalk.training import stage as stage_module
from ropewalk.training.preflight import Machine, resolve
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.simulation.assumed_documents import Documents
from ropewalk.training.simulation.rank_costs import play
from ropewalk.training.simulation.roofline import compute_seconds
from tests.dry_run.cases import TINY

BILLION = TINY | {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
"""The 1B Llama of the measurements."""

GIB = 2**30
# Of each: what the plan is of, seconds of a step, and peak in bytes as torch.cuda.max_memory_allocated gives it.
MEASURED = {
    "full, 32K": (("full", 2**15, 2048), 1.918, 25.384 * GIB),
    "anchor, 32K": (("anchor", 2**15, 2048), 0.9835, 25.385 * GIB),
    "intra_document, 32K": (("intra_document", 2**15, 2048), 0.9666, 25.384 * GIB),
    "anchor, 128K": (("anchor", 2**17, 2048), 4.0236, 43.784 * GIB),
    "extend, 2 x 32K": (("anchor", 2**15, 334, "extend"), 1.0519, 92.366e9),
    "extend, 128K": (("anchor", 2**17, 334, "extend"), 2.6883, 51.755e9),
    "LoRA, 2 x 32K": (("anchor", 2**15, 334, "lora"), 0.868, 55.564e9),
}


def log_normal(room, mean):
    """Lengths of documents as the measurements drew them."""
    drawn = random.Random(0)
    lengths = []
    while room > 0:
        lengths.append(max(1, min(room, int(drawn.lognormvariate(0, 1.0) * mean / 1.6487))))
        room -= lengths[-1]
    return tuple(lengths)


def planned(folder, pattern, context, mean, run="step"):
    """Seconds of a step and peak memory in bytes, by a dry run.

    Args:
        folder: folder for the model's config.
        pattern: attention pattern.
        context: tokens of a row.
        mean: mean length of documents, tokens.
        run: ``step`` for training steps of a script, in bfloat16 with checkpointing; ``extend`` or ``lora`` for runs of
            ``ropewalk extend`` on the embedded corpus, which checkpoint rows of 128K and take two of 32K.
    """
    # The embedded tokenizer has few tokens.
    vocabulary = 128256 if run == "step" else 512
    (Path(folder) / "config.json").write_text(json.dumps(BILLION | {"vocab_size": vocabulary}))
    one = run == "step" or context > 2**15
    stage = {
        "context": context,
        "steps": 1,
        "rows_per_step": 1 if one else 2,
        "learning_rate": 1e-5,
        "gradient_checkpointing": one,
        "keep_attention": False,
        "rope": {"method": "ntk"},
        "pattern": pattern,
        # The steps were measured operator by operator.
        "compile": False,
    }
    recipe = {
        "model": str(folder),
        "output": "run",
        "data": {"sources": [{"path": "embedded"}]},
        "stages": [stage],
        "engine": "varlen",
        "precision": "bfloat16-autocast" if run == "extend" else "bfloat16",
    }
    if run == "lora":
        recipe["adapter"] = {"method": "lora"}
    lengths = () if pattern == "full" else log_normal(context - 1, mean)
    machine = Machine(torch.device("cuda", 0), GPUS["h200"].bytes_per_rank)
    resolved = resolve(
        parse_recipe(yaml.safe_dump(recipe), "recipe.yaml"), World(0, 1, 0, 1), machine=machine
    )
    adamw = torch.optim.AdamW
    # The steps were measured with an AdamW in several kernels, and with norms that kept all that they computed.
    with (
        mock.patch.object(torch.optim, "AdamW", lambda *args, fused, **named: adamw(*args, **named)),
        mock.patch.object(stage_module, "fuse_pieces", return_value=[]),
    ):
        played = play(resolved, 0, Documents("", lengths, "sequential"), 0)
    return sum(compute_seconds(played.operators, GPUS["h200"]).values()), played.memory.peak
