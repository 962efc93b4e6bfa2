"""What ranks run in the tests of verify: its own checks, with a fault planted before them."""

import functools
import inspect
import json
import uuid
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import distributed_c10d

import ropewalk.parallel.ring as ring
import ropewalk.parallel.ring.attention as ring_attention
import ropewalk.training.checkpoint.sharded as sharded_checkpoint
import ropewalk.training.update.step as step
import ropewalk.verification.checks.effective_rope as effective_rope
import ropewalk.verification.computing as computing
import ropewalk.verification.run as running
from ropewalk.attention import api, packed
from ropewalk.attention.engines.reference import plain_attention
from ropewalk.attention.layout import IGNORED, Row, next_token_labels
from ropewalk.attention.options import PLAIN
from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.compute.offload import Offload
from ropewalk.parallel import MeshShape, RowShards, ShardedLayouts, World, joined
from ropewalk.rope import RotaryEmbedding
from ropewalk.training.update.step import Batch
from ropewalk.verification import Outcome, Planned, run_in
from ropewalk.verification.checks import Claim, every_mesh
from ropewalk.verification.computing import once, once_together
from ropewalk.verification.run import run_planned


def run_with(fault, planned, case):
    """One check with a fault; no fault for None."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            (FAULTS | RING_FAULTS | OTHER_FAULTS)[fault](patch)
        # Plans of rows that were made before, by sound engines.
        api._plan.forget()
        return run_planned(planned, case)


def reached_by(planned, case):
    """Checks of sound code, and for each the faults that replace something which any rank calls in it.

    What several checks compare with is computed once, and its faults are told of each of them.
    """
    found = []
    with pytest.MonkeyPatch.context() as patch:
        kept = _Telling()
        patch.setattr(computing, "_kept", lambda key: kept)
        for fault, plant in FAULTS.items():
            plant(_Watch(patch, lambda fault=fault: kept.open[-1].add(fault)))
        for each in planned:
            kept.open = [set()]
            check = run_with(None, each, case)
            (reached,) = kept.open
            gathered = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(gathered, reached)
            found.append((each, check, set().union(*gathered)))
    return found


class _Telling(dict):
    """What is computed once a case, with the faults that were told while it was: whoever reads it is told of them.

    Attributes:
        open: faults told of the check that runs, and of each value that is being computed, one within another.
    """

    def __init__(self):
        self.open = [set()]
        self._reached = {}

    def __contains__(self, name):
        # Asked for by who computes it if it is not there, and else reads it.
        there = super().__contains__(name)
        if not there:
            self.open.append(set())
        return there

    def __setitem__(self, name, value):
        self._reached[name] = self.open.pop()
        super().__setitem__(name, value)

    def __getitem__(self, name):
        self.open[-1] |= self._reached[name]
        return super().__getitem__(name)


class _Watch:
    """Stands for a MonkeyPatch: what a fault would replace stays as it is, and tells when it is called or read."""

    def __init__(self, patch, tell):
        self._patch, self._tell = patch, tell

    def setattr(self, owner, name, _):
        sound = inspect.getattr_static(owner, name)
        self._patch.setattr(owner, name, self._telling(sound))

    def _telling(self, sound):
        if isinstance(sound, property):
            return property(self._telling(sound.fget))
        if isinstance(sound, classmethod):
            return classmethod(self._telling(sound.__func__))
        assert inspect.isfunction(sound), f"no call tells that {sound!r} is used"

        @functools.wraps(sound)
        def told(*args, **kwargs):
            self._tell()
            return sound(*args, **kwargs)

        return told


def _labels_shifted_after_sharding(patch):
    sound = Batch.of.__func__

    def of(cls, rows, mesh):
        batch = sound(cls, rows, mesh)
        if not isinstance(batch.layouts, ShardedLayouts):
            return batch
        labels = torch.full_like(batch.labels, IGNORED)
        labels[:, :-1] = batch.input_ids[:, 1:]
        return replace(batch, labels=labels)

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


def _labels_rolled_but_in_the_first_row(patch):
    """Of a micro-batch the first row is right, and the others have their labels by one place too early."""
    sound = ShardedLayouts.take

    def take(sharded, values, padding):
        if padding == IGNORED:
            values = [values[0], *(torch.roll(each, -1) for each in values[1:])]
        return sound(sharded, values, padding)

    patch.setattr(ShardedLayouts, "take", take)


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
    sound = save_model

    def save(model, folder, *args, **kwargs):
        sound(model, folder, *args, **kwargs)
        config = json.loads((folder / "config.json").read_text())
        for key in ("rope_parameters", "rope_scaling", "rope_theta"):
            config.pop(key, None)
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

    from ropewalk.models.compute.losses import LossModel

    patch.setattr(RotaryEmbedding, "_on_device", on_device)
    patch.setattr(LossModel, "train", cast)


def _mask_dropped(patch):
    """Documents see each other: each row is one run of attention."""
    sound = packed.plan

    def plan(layouts, device, locality):
        return sound([replace(layout, pattern="full") for layout in layouts], device, locality)

    patch.setattr(packed, "plan", plan)


def _optimizer_state_lost(patch):
    patch.setattr(sharded_checkpoint, "set_moments", lambda *args: None)


def _ring_scores_in_bfloat16(patch):
    """Scores are rounded to 16 bits, as autocast would do it to products that are written out."""

    sound = ring_attention.attend_runs

    def forward(q, k, v, runs, options):
        outputs, sums = [], []
        for run in zip(q.split(runs.queries), k.split(runs.keys), v.split(runs.keys), strict=True):
            a, b, c = (x.transpose(0, 1)[None].bfloat16() for x in run)
            visible = torch.ones(a.shape[2], b.shape[2], dtype=torch.bool).tril(b.shape[2] - a.shape[2])
            outputs.append(plain_attention(a, b, c, visible, replace(options, sinks=None))[0].transpose(0, 1))
            keys = b.repeat_interleave(a.shape[1] // b.shape[1], dim=1)
            scores = (a @ keys.mT * options.scale_of(a.shape[3])).masked_fill(~visible, -torch.inf)
            sums.append(scores[0].to(torch.promote_types(q.dtype, torch.float32)).logsumexp(-1))
        return torch.cat(outputs).to(q.dtype), torch.cat(sums, dim=1)

    def attend_runs(kernel, *arguments):
        return sound(SimpleNamespace(forward=forward, backward=kernel.backward), *arguments)

    patch.setattr(ring_attention, "attend_runs", attend_runs)


def _scale_of_the_head_dim(patch):
    """The model's own scale is lost on the way to a ring."""
    sound = ring.ring_attend

    def attend(query, key, value, sharded, engine="auto", options=PLAIN):
        return sound(query, key, value, sharded, engine, replace(options, scale=None))

    patch.setattr(ring, "ring_attend", attend)


def _whole_model_cast(patch):
    """``model.to(bfloat16)`` rounds the frequencies that transformers' own module holds in a buffer."""
    patch.setattr(effective_rope, "cast_parameters", lambda model, dtype: model.to(dtype))


def _offloaded_tensors_lost(patch):
    fetch = Offload.fetch
    patch.setattr(Offload, "fetch", lambda self, away: fetch(self, away) * 0)


FAULTS = {
    "labels shifted after sharding": _labels_shifted_after_sharding,
    "mean of means": _mean_of_means,
    "positions local to the shard": _positions_local_to_the_shard,
    "labels rolled but in the first row": _labels_rolled_but_in_the_first_row,
    "boundary token dropped": _boundary_token_dropped,
    "theta default on reload": _theta_default_on_reload,
    "bfloat16 inv_freq": _bfloat16_inv_freq,
    "mask dropped": _mask_dropped,
    "optimizer state lost": _optimizer_state_lost,
}


RING_FAULTS = {
    "ring scores in bfloat16": _ring_scores_in_bfloat16,
    "scale lost in the ring": _scale_of_the_head_dim,
}
OTHER_FAULTS = {
    "whole model cast": _whole_model_cast,
    "offloaded tensors lost": _offloaded_tensors_lost,
}


def groups_after(planned, case):
    """How many process groups there are after a check."""
    run_planned(planned, case)
    return len(distributed_c10d._world.pg_map)


def failing_alone(case):
    """How a check ends under torchrun where rank 1 alone fails, and the others wait for it in a collective."""

    def check(case, mesh, world):
        if world.rank == 1:
            raise MemoryError("none left on this rank")
        # Rank 0 goes on with something else: it must not wait for a rank that has gone.
        return Outcome.not_run("")

    return _ended(check, case)


def failing_on_all(case):
    """The same where rank 0 fails in what it does for all, and then where all find the same."""

    def refused():
        raise RopewalkError("no such model")

    def led(case, mesh, world):
        return world.on_rank_0(refused)

    def found(case, mesh, world):
        raise world.known_to_all(RopewalkError("the disk is full"))

    return _ended(led, case), _ended(found, case)


def failing_unheard(case):
    """The same where a rank raises a refusal of its own, which the others do not know of."""

    def check(case, mesh, world):
        if world.is_rank_0:
            raise RopewalkError("rank 0 alone has no such engine")
        return Outcome.not_run("")

    return _ended(check, case)


def _ended(check, case):
    """The note of rank 0's check, or what left run_in; a barrier that nobody joins is told and not waited for."""
    waited = []
    with pytest.MonkeyPatch.context() as patch, joined("cpu") as world:
        patch.setattr(running, "claims", lambda: {"ranks": Claim("ranks", 0, "", "", check, every_mesh)})
        patch.setattr(World, "barrier", lambda world: waited.append(world.rank))
        try:
            outcome = run_in(Planned("ranks", "", "", MeshShape(shard=world.size)), case, world, "cpu")
        except Exception as error:
            return f"left with {type(error).__name__}: {error}", waited
        return outcome.note, waited


def once_on_some(case):
    """How often each rank computes what they compute together, where rank 0 alone has a result of before."""
    counts = []

    def compute():
        counts.append(0)
        return len(counts)

    with joined("cpu") as world:
        if world.is_rank_0:
            once(case, "together", lambda: 7)
        return [once_together(case, world, "together", compute) for _ in range(2)]


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


def with_layouts(case, layouts):
    rows = [
        Row(r.input_ids, next_token_labels(r.input_ids, at), at)
        for r, at in zip(case.rows, layouts, strict=True)
    ]
    return replace(case, rows=tuple(rows), key=uuid.uuid4().hex)


def in_precision(case, precision):
    """The case as a recipe of another precision gives it."""
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    return replace(case, precision=precision, attention=replace(case.attention, dtype=dtype))
