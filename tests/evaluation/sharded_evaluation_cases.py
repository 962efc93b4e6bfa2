"""What ranks run in the tests of sharded evaluation; spawned processes import it by name."""

import contextlib
import io

import torch
from torch.distributed.tensor import DTensor

from ropewalk.cli.app import main
from ropewalk.data import load_tokenizer
from ropewalk.errors import Echo, RunFailure
from ropewalk.evaluation import ModelUnderTest, evaluate_model
from ropewalk.evaluation.backends.sharded import (
    row_losses_of,
    sharded_likeliest,
    sharded_losses,
    teacher_forced_row,
)
from ropewalk.evaluation.rope_probe import probe_model
from ropewalk.models.load import ModelSetup
from ropewalk.models.sharding import load_sharded
from ropewalk.parallel import MeshShape, RowShards, ShardedLayouts, joined, make_mesh


def local_positions(self):
    """Each rank counts from 0: what a model without the layout's positions would do."""
    return torch.arange(self.shard_length).expand(len(self.rows), -1).contiguous()


def joined_backwards(self, shards, right=RowShards.join):
    """The shards of the last rank first."""
    return right(self, list(shards)[::-1])


MUTATIONS = {
    "positions": (ShardedLayouts, "position_ids", local_positions),
    "order": (RowShards, "join", joined_backwards),
}


def on_mesh(shape, folder, function, rope=None):
    """``function(model, mesh, world)`` with a model over a mesh, and whether it was left as it was."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(**shape), "cpu")
        model = load_sharded(folder, mesh, world, ModelSetup(rope=rope))
        model.train()
        found = function(model, mesh, world)
        sharded = all(isinstance(parameter, DTensor) for parameter in model.parameters())
        return found, sharded and model.training and torch.is_grad_enabled()


def evaluated(shape, folder, settings, documents, with_world=True, mutation=None, rope=None):
    """Results as JSON values, and the calls of progress."""

    def run(model, mesh, world):
        calls = []
        tokenizer = load_tokenizer(str(folder))
        under_test = ModelUnderTest.over_mesh(model, tokenizer, mesh, world if with_world else None)
        results = evaluate_model(under_test, settings, documents, progress=lambda *call: calls.append(call))
        return [result.to_json() for result in results], calls

    if mutation is None:
        return on_mesh(shape, folder, run, rope)
    owner, name, other = MUTATIONS[mutation]
    right = getattr(owner, name)
    setattr(owner, name, other)
    try:
        return on_mesh(shape, folder, run, rope)
    finally:
        setattr(owner, name, right)


def likeliest(shape, folder, prompts):
    """The likeliest token before each token of the answers of (ids, start) pairs."""

    def run(model, mesh, world):
        rows = [teacher_forced_row(torch.tensor(ids), start) for ids, start in prompts]
        found = sharded_likeliest(model, rows, mesh)
        return [tokens[start - 1 : -1].tolist() for tokens, (_, start) in zip(found, prompts, strict=True)]

    return on_mesh(shape, folder, run)


def losses(shape, folder, rows):
    """The losses of rows of any lengths."""
    return on_mesh(shape, folder, lambda model, mesh, world: list(sharded_losses(model, rows, mesh)))


def probed(shape, folder, candidates, rows, trained_length):
    """Results of a probe, and the calls of progress."""

    def run(model, mesh, world):
        calls = []
        losses_of = row_losses_of(model, mesh)
        found = probe_model(
            model.model, candidates, rows, trained_length, lambda *call: calls.append(call), losses_of
        )
        return found, calls

    return on_mesh(shape, folder, run)


def damaged(shape, folder, ids):
    """What each rank raises where the weights of one are no numbers."""

    def run(model, mesh, world):
        if mesh.rank == 1:
            model.model.base_model.norm.weight.to_local().data.fill_(float("nan"))
        try:
            list(sharded_likeliest(model, [teacher_forced_row(torch.tensor(ids), 3)], mesh))
        except (RunFailure, Echo) as error:
            return type(error).__name__, str(error)

    return on_mesh(shape, folder, run)[0]


def without_memory(shape, folder, ids):
    """What each rank raises where there is no memory for a forward pass."""

    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def run(model, mesh, world):
        handle = model.model.base_model.register_forward_pre_hook(full)
        try:
            list(sharded_losses(model, [teacher_forced_row(torch.tensor(ids), 3)], mesh))
        except RunFailure as error:
            return str(error)
        finally:
            handle.remove()

    return on_mesh(shape, folder, run)[0]


def command(arguments):
    """Exit status, stdout and stderr of the program."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()
