"""The step that a dry run plays, with real tensors on CPU processes; spawned processes import it by name."""

from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from ropewalk.models.attention.hooks import localities_of
from ropewalk.models.sharding import materialise, shard_model
from ropewalk.parallel import make_mesh
from ropewalk.parallel.context import RunContext
from ropewalk.parallel.traffic import counted_traffic
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.simulation.assumed_documents import documents_of
from ropewalk.training.simulation.step import _model
from ropewalk.training.stage import ready_to_train
from ropewalk.training.update.step import ForwardPass, micro_batches, prepare, train_step
from tests.dry_run.cases import resolved_for


def status(key: str) -> int:
    """A figure of this process's memory in bytes, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def real_step(recipe_text, ranks, document_length, count=True):
    """Bytes sent by kind, operations of dense layers, and the peak of memory above that before the model.

    The peak is that of a step without a counter; operations are counted in a second one if ``count`` is true.
    """
    recipe = parse_recipe(recipe_text, "recipe.yaml")
    resolved = resolved_for(recipe, ranks, "cpu")
    stage = resolved.stages[0]
    mesh = make_mesh(stage.mesh, "cpu") if ranks > 1 else None
    model = _model(resolved, 0, resolved.methods[0])
    # What torch allocates once in a process is no part of a step.
    warm = torch.randn(64, 64, requires_grad=True)
    (warm @ warm).sum().backward()
    torch.optim.AdamW([warm]).step()
    before = status("VmRSS")
    bfloat16 = stage.precision == "bfloat16"
    if mesh is not None:
        shard_model(model, mesh, torch.bfloat16 if bfloat16 else None)
    materialise(model, torch.device("cpu"))
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    optimizer = ready_to_train(model, stage, bfloat16 and mesh is None)
    state = optimizer.state()
    for tensor in state.values():
        # Memory that is never written is not counted by the kernel.
        (tensor.to_local() if hasattr(tensor, "to_local") else tensor).fill_(0)
    optimizer.load_state(state)
    del state
    here = stage.settings.stage
    packed = documents_of(recipe, 0, document_length, RunContext()).packed(here)
    rows = packed.rows(packed.most_documents())
    passes = here.rows_per_step // (here.rows_per_batch * stage.mesh.data_degree)
    batches = micro_batches(rows * passes, here.rows_per_batch, mesh)
    batches = prepare(batches, stage.engine, torch.device("cpu"), localities_of(model.model))
    Path("/proc/self/clear_refs").write_text("5")
    forward = ForwardPass(stage.precision, here.offload_activations)
    with counted_traffic() as traffic:
        train_step(model, batches, optimizer, 1e-5, forward, mesh)
    peak = status("VmHWM") - before
    if not count:
        return dict(traffic.bytes), 0, peak
    with FlopCounterMode(display=False) as counter:
        train_step(model, batches, optimizer, 1e-5, forward, mesh)
    dense = {
        str(operator): count
        for operator, count in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(operator)
    }
    return dict(traffic.bytes), sum(dense.values()), peak


def real_states(recipe_text):
    """Bytes that a model of one process and its optimizer hold after a step: parameters with masters, and moments."""
    recipe = parse_recipe(recipe_text, "recipe.yaml")
    resolved = resolved_for(recipe, 1, "cpu")
    stage = resolved.stages[0]
    model = _model(resolved, 0, resolved.methods[0])
    materialise(model, torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    optimizer = ready_to_train(model, stage, stage.precision == "bfloat16")
    packed = documents_of(recipe, 0, 100, RunContext()).packed(stage.settings.stage)
    rows = micro_batches(packed.rows(packed.most_documents()))
    batches = prepare(rows, stage.engine, torch.device("cpu"), localities_of(model.model))
    train_step(model, batches, optimizer, 1e-5, ForwardPass(stage.precision))
    held = [*model.parameters(), *model.buffers(), *optimizer.masters.values()]
    # A master of a float32 parameter is the parameter itself.
    weights = {each.data_ptr(): each.nbytes for each in held}
    moments = [each.nbytes for name, each in optimizer.state().items() if not name.startswith("step.")]
    return sum(weights.values()), sum(moments)
