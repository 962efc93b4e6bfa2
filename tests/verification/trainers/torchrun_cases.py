"""Trainers with planted faults, probed one after the other by the processes of one torchrun.

    python -m torch.distributed.run --standalone --nproc-per-node 2 tests/verification/trainers/torchrun_cases.py

Rank 0 prints the failed checks of each trainer as JSON.
"""

import json
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from ropewalk.parallel import joined
from ropewalk.parallel.context import RunContext
from ropewalk.verification.settings import TrainerProbeSettings
from ropewalk.verification.trainers.probe import probe_trainer
from tests.verification.trainers.trainer_cases import (
    FAULTS,
    bfloat16_inv_freq,
    faulty_trainer,
    llama,
    lost_theta,
    mean_of_ranks,
    mistral,
)

SETTINGS = TrainerProbeSettings(target="here", tokens=2)
ROW = 2
"""Documents of a row, which is a micro-batch."""
OF_RANKS = "mean of the means of ranks"
MODELS = {"lost theta": lost_theta, "bfloat16 inv_freq": bfloat16_inv_freq, "wrong window": mistral}
ON_RANK_1 = "leak on rank 1"
LOOPS = ("none", "leak", ON_RANK_1, "shifted labels", "mean of means", OF_RANKS, *MODELS)
"""Faults of the plain loop."""


def row_of(documents, fault):
    """Model inputs and labels of one packed row."""
    ids = torch.tensor([[token for each in documents for token in each]])
    owner = torch.tensor([number for number, each in enumerate(documents) for _ in each])
    positions = torch.cat([torch.arange(len(each)) for each in documents])[None]
    labels = ids.masked_fill(positions == 0, -100)
    # A mask of its own, which forgets the windows of the model.
    seen = owner[:, None] == owner
    if fault == "leak" or (fault == ON_RANK_1 and dist.get_rank() == 1):
        seen, positions = torch.ones_like(seen), torch.arange(ids.shape[1])[None]
    if fault == "shifted labels":
        labels = torch.cat([labels[:, 1:], torch.full((1, 1), -100)], 1)
    mask = torch.zeros(seen.shape).masked_fill(~seen.tril(), torch.finfo(torch.float32).min)[None, None]
    return {"input_ids": ids, "position_ids": positions, "attention_mask": mask}, labels


def loop(documents, fault):
    """A loop that people write themselves: packed rows, DistributedDataParallel, the mean over all target tokens.

    Args:
        documents: documents of the probe; each rank takes every second one.
        fault: one of :data:`LOOPS`.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(MODELS.get(fault, llama)())
    own = documents[rank::world]
    rows = [own[start : start + ROW] for start in range(0, len(own), ROW)]
    targets = torch.tensor([sum(len(each) - 1 for each in row) for row in rows])
    everywhere = targets.sum()
    dist.all_reduce(everywhere)

    def step():
        for row, count in zip(rows, targets, strict=True):
            inputs, labels = row_of(row, fault)
            logits = model(**inputs).logits[0, :-1]
            total = F.cross_entropy(logits, labels[0, 1:], reduction="sum")
            # Gradients are averaged over ranks, so that the sum of a rank counts once for each of them.
            scale = world / everywhere
            if fault == "mean of means":
                scale = 1 / (count * len(rows))
            elif fault == OF_RANKS:
                scale = 1 / targets.sum()
            (total * scale).backward()

    return model, step


def trainer(folder, fault):
    """The Trainer of one process, with half as many micro-batches on each of two."""
    made = faulty_trainer(folder, fault)
    made.args.gradient_accumulation_steps = 2
    return made


def main():
    found = {}
    with joined("cpu") as world, tempfile.TemporaryDirectory() as folder:
        functions = {f"Trainer, {fault}": lambda fault=fault: trainer(folder, fault) for fault in FAULTS}
        functions[f"Trainer, {OF_RANKS}"] = mean_of_ranks
        for fault in LOOPS:
            functions[f"loop, {fault}"] = lambda documents, fault=fault: loop(documents, fault)
        for name, function in functions.items():
            result = probe_trainer(SETTINGS, RunContext(world=world), function)
            notes = " ".join(each.note for each in result.checks if each.passed is False)
            found[name] = {"ranks": result.ranks, "failed": result.failed, "notes": notes}
        if world.is_rank_0:
            print(json.dumps(found))


if __name__ == "__main__":
    main()
