"""What ranks run in the tests of checkpoints; spawned processes import it by name."""

import hashlib
import os
import resource
import signal
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.tensor import DTensor

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest
from ropewalk.models.compute.losses import LossModel, OutputHead
from ropewalk.models.load import load_model
from ropewalk.models.sharding import gathered_state, load_sharded
from ropewalk.parallel import MeshShape, World, joined, make_mesh
from ropewalk.parallel.context import RunContext
from ropewalk.training.checkpoint import sharded as sharded_checkpoint
from ropewalk.training.checkpoint.files import Position, check_checkpoint, latest_whole
from ropewalk.training.checkpoint.sharded import (
    ShardedCheckpoints,
    export_model,
    load_checkpoint,
    load_weights,
)
from ropewalk.training.recipe.recipe import Optimizer
from ropewalk.training.update.optimizer import MasterAdamW
from ropewalk.training.update.step import ForwardPass, micro_batches, train_step

ALONE = World()


class Trainee:
    """A model with its optimizer, in one process or sharded over a mesh, and steps over its share of the rows."""

    def __init__(self, folder, rows, precision="float32", mesh=None, world=ALONE, device="cpu"):
        self.mesh, self.world, self.precision = mesh, world, precision
        if mesh is None:
            whole = load_model(folder, dtype=torch.float32, device=device)
            self.model, self.rows = LossModel(whole, OutputHead.of(whole)), rows
        else:
            compute = torch.bfloat16 if precision == "bfloat16" else None
            self.model = load_sharded(folder, mesh, world, compute_dtype=compute)
            self.rows = rows[mesh.data_rank :: mesh.shape.data_degree]
        masters = None
        if mesh is None and precision == "bfloat16":
            masters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
            self.model.to(torch.bfloat16)
        self.optimizer = MasterAdamW(self.model.train().named_parameters(), Optimizer(), masters)

    def train(self, steps):
        """Loss and gradient norm of each step."""
        found = []
        for _ in range(steps):
            # One pass for all rows: what each pass sends takes longest, and is proven in test_sharded_step.
            batches = micro_batches(self.rows, 4, self.mesh)
            r = train_step(self.model, batches, self.optimizer, 1e-2, ForwardPass(self.precision), self.mesh)
            found.append((r.loss, r.grad_norm))
        return found

    def fingerprint(self):
        """Digest of every bit that this rank holds of masters and moments."""
        digest = hashlib.sha256()
        for tensors in (self.optimizer.masters, self.optimizer.state()):
            for _, tensor in sorted(tensors.items()):
                local = tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()
                digest.update(local.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()

    def masters(self):
        """Whole float32 masters by the model's own names, on rank 0."""
        if self.mesh is None:
            return {n.removeprefix("model."): m.detach().clone() for n, m in self.optimizer.masters.items()}
        return gathered_state(self.model.model, self.world)


def saved(shape, folder, rows, out, precision="float32"):
    """Two steps, two equal checkpoints (at once, and in the background while step three runs), two more steps."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(**shape), "cpu")
        one = Trainee(folder, rows, precision, mesh, world)
        torch.manual_seed(100 + world.rank)
        one.train(2)
        position = Position(0, 2, 999)
        masters = one.masters()
        with (
            nothing_read_back(),
            ShardedCheckpoints(
                out / "sync", one.model, one.optimizer, RunContext(world, mesh), keep=2
            ) as checkpoints,
        ):
            checkpoints.save(position)
        before = len(distributed_c10d._world.pg_map)
        with (
            held_back() as release,
            ShardedCheckpoints(
                out / "async", one.model, one.optimizer, RunContext(world, mesh), keep=2, asynchronous=True
            ) as checkpoints,
        ):
            path = checkpoints.save(position)
            drawn = torch.rand(3).tolist()
            losses = one.train(1)
            early = path.exists()
            release()
            checkpoints.wait()
            late = path.is_dir()
        left = len(distributed_c10d._world.pg_map) - before
        losses += one.train(1)
        return {
            "groups left": left,
            "losses": losses,
            "drawn": drawn,
            "fingerprint": one.fingerprint(),
            "masters": masters,
            "early": early,
            "late": late,
        }


@contextmanager
def nothing_read_back():
    """Fails for a digest of a file that lies on the disk already."""
    of = FileDigest.of
    FileDigest.of = None
    try:
        yield
    finally:
        FileDigest.of = of


class held_back:
    """Keeps checkpoints from being written until told."""

    def __enter__(self):
        self.save, event = sharded_checkpoint.state_dict_saver.save, threading.Event()

        def late(*args, **kwargs):
            assert event.wait(60)
            return self.save(*args, **kwargs)

        sharded_checkpoint.state_dict_saver.save = late
        return event.set

    def __exit__(self, *_):
        sharded_checkpoint.state_dict_saver.save = self.save


def resumed(shape, folder, rows, path, precision="float32"):
    """A checkpoint's next two steps."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(**shape), "cpu")
        return go_on(Trainee(folder, rows, precision, mesh, world), path)


def go_on(one, path):
    torch.manual_seed(200 + one.world.rank)
    position = load_checkpoint(path, one.model, one.optimizer, one.world, one.mesh)
    masters = one.masters()
    drawn = torch.rand(3).tolist()
    losses = one.train(2)
    return {
        "position": position,
        "masters": masters,
        "drawn": drawn,
        "losses": losses,
        "fingerprint": one.fingerprint(),
    }


def only_weights(shape, folder, path, out):
    """A checkpoint's weights in an untrained model, exported in two dtypes."""
    with joined("cpu") as world:
        one = Trainee(folder, [], "float32", make_mesh(MeshShape(**shape), "cpu"), world)
        load_weights(path, one.model, world, one.mesh)
        export_model(one.model, out / "float32", None, world, torch.float32)
        export_model(one.model, out / "bfloat16", None, world, torch.bfloat16)
        return one.masters()


def on_a_full_disk(shape, folder, rows, out, asynchronous):
    """A limit on the size of a file stands for the full disk of one rank: what each rank says, and what it left."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(**shape), "cpu")
        one = Trainee(folder, rows, "float32", mesh, world)
        said, left = [], []
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        with ShardedCheckpoints(
            out, one.model, one.optimizer, RunContext(world, mesh), 2, asynchronous
        ) as checkpoints:
            for step in range(1, 6):
                if step == 3 and world.rank == 2:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
                try:
                    checkpoints.save(Position(0, step, 0))
                    checkpoints.wait()
                except RopewalkError as error:
                    said.append((step, type(error).__name__, str(error)))
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
                world.barrier()
                left.append(sorted(path.name for path in out.iterdir()))
                world.barrier()
        return said, left


def refused_on_ranks(folder, cases, out):
    """The sentence of each kind of bad checkpoint or place, on every rank."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(shard=world.size), "cpu")
        one = Trainee(folder, [], "float32", mesh, world)
        calls = [
            lambda path=path: load_checkpoint(path, one.model, one.optimizer, world, mesh) for path in cases
        ]
        with ShardedCheckpoints(out, one.model, one.optimizer, RunContext(world, mesh), 2) as checkpoints:
            calls.append(lambda: checkpoints.save(Position(0, 1, 0)))
            calls.append(lambda: export_model(one.model, out / "model", None, world, torch.float32))
            return [sentence(call) for call in calls]


def on_disks_apart(folder, out):
    """Each rank writes to a folder of its own, as on machines that share none; nobody waits but the context's end."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(shard=world.size), "cpu")
        one = Trainee(folder, [], "float32", mesh, world)
        apart = out / str(world.rank)

        def in_the_background():
            with ShardedCheckpoints(
                apart, one.model, one.optimizer, RunContext(world, mesh), 2, True
            ) as checkpoints:
                checkpoints.save(Position(0, 1, 0))

        return sentence(in_the_background)


def sentence(call):
    try:
        call()
    except RopewalkError as error:
        return type(error).__name__, str(error)
    return None


def checked_on_ranks(folder):
    """What ranks find that share the hashing."""
    with joined("cpu") as world:
        return [check_checkpoint(path, world) for path in sorted(folder.iterdir())]


def latest_on_ranks(folder):
    with joined("cpu") as world:
        return sentence(lambda: latest_whole(folder, world))


def killed(folder, out, asynchronous):
    """Rank 1 dies when it has written its shards of the second checkpoint."""
    with joined("cpu") as world:
        mesh = make_mesh(MeshShape(shard=2), "cpu")
        one = Trainee(folder, [], "float32", mesh, world)
        checkpoints = ShardedCheckpoints(
            out, one.model, one.optimizer, RunContext(world, mesh), 1, asynchronous
        )
        checkpoints.save(Position(0, 1, 0))
        checkpoints.wait()
        write = FileSystemWriter.write_data

        def die(*args):
            done = write(*args)
            if world.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        FileSystemWriter.write_data = die
        checkpoints.save(Position(0, 2, 0))
        checkpoints.wait()


def files_of(path):
    return {each.name: each.read_bytes() for each in Path(path).iterdir()}
