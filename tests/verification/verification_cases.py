"""What ranks run in the tests of verify: its own checks, with a fault planted before them."""

import json

import pytest
import torch

import ropewalk.attention.segments as segments
import ropewalk.integrations.models as models
import ropewalk.training.sharded_checkpoint as sharded_checkpoint
import ropewalk.training.step as step
from ropewalk.attention import api
from ropewalk.packing import next_token_labels
from ropewalk.packing.row import IGNORED
from ropewalk.parallel import RowShards, ShardedLayouts
from ropewalk.rope import RotaryEmbedding
from ropewalk.training.step import Batch
from ropewalk.verification.running import run_planned


def run_with(fault, planned, case):
    """One check with a fault; no fault for None."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            FAULTS[fault](patch)
        # Plans of rows that were made before, by sound engines.
        api._plan.cache_clear()
        return run_planned(planned, case)


def _labels_shifted_after_sharding(patch):
    sound = Batch.of.__func__

    def of(cls, rows, mesh):
        batch = sound(cls, rows, mesh)
        if not isinstance(batch.layouts, ShardedLayouts):
            return batch
        labels = torch.full_like(batch.labels, IGNORED)
        labels[:, :-1] = batch.input_ids[:, 1:]
        return Batch(batch.input_ids, labels, batch.layouts, batch.padding)

    patch.setattr(Batch, "of", classmethod(of))


def _mean_of_means(patch):
    """Each micro-batch and rank counts as one, however many targets it has."""
    sound = step.summed_loss

    def mean(model, batch):
        count = int((batch.labels != IGNORED).sum())
        return sound(model, batch) / max(count, 1)

    patch.setattr(step, "summed_loss", mean)
    patch.setattr(Batch, "trained_tokens", property(lambda batch: 1))


def _positions_local_to_the_shard(patch):
    def position_ids(sharded):
        return torch.arange(sharded.shard_length).expand(len(sharded.rows), -1).contiguous()

    patch.setattr(ShardedLayouts, "position_ids", position_ids)


def _boundary_token_dropped(patch):
    """The last place of a shard has no target: its next token lies in the next one."""
    sound = RowShards.take

    def take(row, values, ring_rank, sequence_rank, padding):
        shard = sound(row, values, ring_rank, sequence_rank, padding)
        if padding == IGNORED and row.shard_length < row.total_length:
            shard[..., -1] = IGNORED
        return shard

    patch.setattr(RowShards, "take", take)


def _theta_default_on_reload(patch):
    """The config is written without its theta, and readers take their class's default."""
    sound = models.save_model

    def save(model, folder, *args, **kwargs):
        sound(model, folder, *args, **kwargs)
        config = json.loads((folder / "config.json").read_text())
        del config["rope_parameters"]
        (folder / "config.json").write_text(json.dumps(config))

    patch.setattr(sharded_checkpoint, "save_model", save)


def _bfloat16_inv_freq(patch):
    """As a cast of the whole model does it to a rotary module that holds its frequencies in a buffer."""
    sound = RotaryEmbedding._on_device

    def on_device(rotary, *args):
        inv_freq, factor = sound(rotary, *args)
        # From the load on, that is after the swap has compared both modules at the first positions.
        return (inv_freq.bfloat16().double() if rotary.__dict__.get("_loaded") else inv_freq), factor

    def cast(model, mode=True):
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module._loaded = True
        return torch.nn.Module.train(model, mode)

    from ropewalk.integrations.losses import LossModel

    patch.setattr(RotaryEmbedding, "_on_device", on_device)
    patch.setattr(LossModel, "train", cast)


def _mask_dropped(patch):
    """Documents see each other: each row is one run of attention."""
    patch.setattr(segments, "_cut", lambda layout: segments.Cut((layout.total_length,), 0))


def _optimizer_state_lost(patch):
    patch.setattr(sharded_checkpoint, "set_moments", lambda *args: None)


FAULTS = {
    "labels shifted after sharding": _labels_shifted_after_sharding,
    "mean of means": _mean_of_means,
    "positions local to the shard": _positions_local_to_the_shard,
    "boundary token dropped": _boundary_token_dropped,
    "theta default on reload": _theta_default_on_reload,
    "bfloat16 inv_freq": _bfloat16_inv_freq,
    "mask dropped": _mask_dropped,
    "optimiser state lost": _optimizer_state_lost,
}


def shifted_rows(rows):
    """Rows whose labels are the next token of the row, whatever its document: the fault of many packers."""
    from dataclasses import replace

    found = []
    for row in rows:
        labels = torch.roll(row.input_ids, -1)
        labels[-1] = IGNORED
        assert not torch.equal(labels, next_token_labels(row.input_ids, row.layout))
        found.append(replace(row, labels=labels))
    return tuple(found)
