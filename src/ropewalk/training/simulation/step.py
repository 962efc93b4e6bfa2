"""One optimizer step of a stage without data: the model, the mesh and the step of training, on one simulated rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ropewalk.attention.layout import Row
from ropewalk.attention.options import Locality
from ropewalk.errors import EngineError
from ropewalk.models.attention.hooks import localities_of
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.compute.offload import CURRENT
from ropewalk.models.load import ModelSetup, empty_model
from ropewalk.models.sharding import materialise, shard_model
from ropewalk.parallel import Mesh
from ropewalk.rope import RopeMethod
from ropewalk.training.checkpoint.writing import asynchronous
from ropewalk.training.resolved import ResolvedRecipe, ResolvedStage
from ropewalk.training.simulation.few_layers import Kinds, keep_layers, kinds_of, watch_layers
from ropewalk.training.simulation.recording import Allocation, Operator, Recorder, Recording
from ropewalk.training.simulation.simulated import simulated_rank
from ropewalk.training.stage import ready_to_train
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import Batch, ForwardPass, micro_batches, prepare, train_step

MOST_PASSES = 2
"""Forward and backward passes that a dry run executes; all further ones of a step repeat the first."""


@dataclass(eq=False)
class Pass:
    """Totals of a recording at the beginning of a forward pass: operators, and bytes sent."""

    operators: Counter[Operator]
    sent: dict[tuple[str, str], tuple[int, int]]


@dataclass(eq=False)
class DryStep:
    """What a step did on one rank.

    Attributes:
        rank: the rank that was played.
        recording: everything that happened.
        owners: what allocations belong to that outlive a pass: ``parameters``, ``gradients``, ``moments``; and those in
            CPU memory from a forward to its backward: ``inputs`` and ``attention``.
        groups: process groups by torch's name: ``shard``, ``replicate``, ``ring``, ``sequence``.
        passes: forward and backward passes of a rank in a step.
        started: totals at the beginning of each executed pass.
        vocabulary: size of the vocabulary.
        tokens: tokens of a rank in one pass.
        checkpoint_copy: bytes of CPU memory from which checkpoints are written while training goes on.
        layers: number of layers of each window or chunk, of the whole model.
        kinds: kind of each layer of the whole model.
        kept: numbers of the layers that were played.
    """

    rank: int
    recording: Recording
    owners: dict[Allocation, str]
    groups: dict[str, str]
    passes: int
    vocabulary: int
    tokens: int
    checkpoint_copy: int = 0
    layers: Counter[Locality] = field(default_factory=Counter)
    kinds: Kinds = ()
    kept: tuple[int, ...] = ()
    started: list[Pass] = field(default_factory=list)


def dry_step(
    resolved: ResolvedRecipe,
    number: int,
    rope: RopeMethod,
    rows: Sequence[Row],
    device: torch.device,
    rank: int = 0,
    choose: Callable[[Kinds], tuple[int, ...] | None] = lambda kinds: tuple(range(len(kinds))),
) -> DryStep | None:
    """Execute a step of a stage on one rank of the stage's mesh.

    Args:
        resolved: the recipe.
        number: index of the stage, from 0.
        rope: RoPE method of the stage.
        rows: one row for each row of a pass; every pass of every rank trains on these.
        device: the CPU, or the simulated device.
        rank: rank to play.
        choose: numbers of the layers to play, from the kind of each; all of them by default.

    Returns:
        What the step did; None if ``choose`` returns None.

    Raises:
        EngineError: if the model does something that has no result without data.
    """
    stage = resolved.stages[number]
    with simulated_rank(stage.mesh, rank, device.type) as mesh:
        model = _model(resolved, number, rope)
        layers = localities_of(model.model)
        kinds = kinds_of(model.model)
        kept = choose(kinds)
        if kept is None:
            return None
        if len(kept) < len(kinds):
            keep_layers(model.model, kept)
        recorder = Recorder(device)
        with recorder.recording_of() as recording:
            optimizer = _on_device(model, stage, mesh, device)
            recorder.phase = "setup"
            here = stage.settings.stage
            recorder.checkpointed = here.gradient_checkpointing
            recorder.missing = resolved.missing
            each = stage.mesh.data_degree * here.rows_per_batch
            passes = max(1, here.rows_per_step // each)
            given = [row for _ in range(min(passes, MOST_PASSES)) for row in rows]
            batches = micro_batches(given, here.rows_per_batch, mesh)
            prepared = prepare(batches, stage.engine, device, layers)
            sizes = _sizes(model, batches[0])
            copied = asynchronous(resolved.recipe.checkpoints, device, here.offload_optimizer)
            copy = bytes_of_checkpoint(optimizer) if copied else 0
            step = DryStep(rank, recording, {}, _groups(mesh), passes, *sizes, copy, layers, kinds, kept)
            _watch(recorder, step, model, optimizer)
            recorder.phase = "start"
            forward = ForwardPass(
                stage.precision, here.offload_activations, resolved.router_aux_losses[number]
            )
            train_step(model, prepared, optimizer, here.learning_rate, forward, mesh)
            recorder.phase = "end"
        return step


def _model(resolved: ResolvedRecipe, number: int, rope: RopeMethod) -> LossModel:
    """The stage's model without weights, as training loads it."""
    recipe, stage = resolved.recipe, resolved.stages[number]
    setup = ModelSetup(
        rope,
        stage.settings.stage.context,
        stage.engine,
        recipe.exact_rope,
        recipe.trust_remote_code,
        tuple(recipe.lift),
        resolved.other_ropes[number] or {},
    )
    model = empty_model(resolved.model, setup, torch.float32)
    if resolved.adapter is not None:
        if resolved.adapter.settings.quantize is not None:
            raise EngineError(
                f"a dry run cannot quantize weights, and adapter.quantize is {resolved.adapter.settings.quantize}; "
                "set it to none for the dry run, which then counts 2 bytes per frozen weight; a real run with it needs "
                "about 0.6"
            )
        compute = torch.bfloat16 if stage.precision == "bfloat16" else None
        resolved.adapter.add_to(model, torch.float32, compute)
    return LossModel(model, OutputHead.unchecked(model))


def _on_device(
    model: LossModel, stage: ResolvedStage, mesh: Mesh | None, device: torch.device
) -> MasterAdamW:
    """Shard the model as training does, give its parameters memory, and make the optimizer."""
    bfloat16, offload = stage.precision == "bfloat16", stage.settings.stage.offload_optimizer
    if mesh is not None:
        shard_model(model, mesh, torch.bfloat16 if bfloat16 else None, offload)
    materialise(model, device, offload and mesh is not None)
    optimizer = ready_to_train(model, stage, bfloat16 and mesh is None)
    # torch makes the moments in the first step; every later one has them from its start.
    optimizer.load_state(optimizer.state())
    return optimizer


def _watch(recorder: Recorder, step: DryStep, model: LossModel, optimizer: MasterAdamW) -> None:
    """Tell the recorder which part of the step runs, and note what allocations belong to while they exist."""
    _own(step, recorder, "parameters", dict(model.named_parameters()))
    _own(step, recorder, "parameters", optimizer.masters)
    _own(step, recorder, "parameters", dict(model.named_buffers()))
    _own(step, recorder, "moments", _moments(optimizer))

    def begin(*_: object) -> None:
        recorder.phase = "forward"
        recorder.enters(-1)
        step.started.append(Pass(recorder.recording.operators.copy(), dict(recorder.recording.sent)))

    def end(*_: object) -> None:
        # A CPU has no other memory to send them to.
        offload = None if model.device.type == "cpu" else CURRENT.get()
        for away, beside in () if offload is None else offload.sent():
            _own(step, recorder, "attention" if beside else "inputs", dict(enumerate(away.blocks)))

    def before_update(*_: object) -> None:
        gradients = {name: p.grad for name, p in optimizer.masters.items() if p.grad is not None}
        _own(step, recorder, "gradients", gradients)

    if len(step.kept) < len(step.kinds):
        watch_layers(model.model, step.kept, recorder.enters)
    # Before FSDP2's own hook, which gathers the parameters.
    model.register_forward_pre_hook(begin, prepend=True)
    model.register_forward_hook(end)
    optimizer.adamw.register_step_pre_hook(before_update)


def _own(step: DryStep, recorder: Recorder, part: str, tensors: Mapping[Any, Tensor]) -> None:
    for tensor in tensors.values():
        allocation = recorder.allocation_of(tensor)
        if allocation is not None:
            step.owners.setdefault(allocation, part)


def _moments(optimizer: MasterAdamW) -> dict[tuple[str, str], Tensor]:
    """AdamW's moments themselves: ``state`` makes another tensor of each, at the cost of an operator."""
    return {
        (name, kind): each
        for name, master in optimizer.masters.items()
        for kind, each in optimizer.adamw.state[master].items()
        if kind != "step"
    }


def bytes_of_checkpoint(optimizer: MasterAdamW) -> int:
    """Bytes of this rank's float32 weights and moments."""
    kept = (*optimizer.masters.values(), *_moments(optimizer).values())
    return sum((each.to_local() if isinstance(each, DTensor) else each).nbytes for each in kept)


def _groups(mesh: Mesh | None) -> dict[str, str]:
    if mesh is None:
        return {}
    groups = (
        # States of recurrent layers pass through the ring, even where Ulysses shares each of its parts.
        ("ring", mesh.groups.row_group),
        ("ring", mesh.groups.ring_group),
        ("sequence", mesh.groups.sequence_group),
        ("replicate", mesh.device_mesh.get_group("replicate")),
        ("shard", mesh.device_mesh.get_group("shard_all")),
    )
    # A dimension of all ranks may share its group with another of one rank; the later name stands for both.
    return {group.group_name: name for name, group in groups if group is not None}


def _sizes(model: LossModel, batch: Batch) -> tuple[int, int]:
    return model.head.linear.weight.shape[0], batch.input_ids.numel()
