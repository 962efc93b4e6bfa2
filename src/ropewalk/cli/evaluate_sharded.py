"""One evaluation over all processes that torchrun started: the model and its rows are cut over them."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    import torch

    from ropewalk.cli.evaluate_run import Output
    from ropewalk.evaluation.settings import Loading, Settings
    from ropewalk.parallel import MeshShape, World
    from ropewalk.search.fitted_table import FittedTable


def torchrun_line(processes: int, parallel: str) -> str:
    """The command that starts so many processes."""
    return f"torchrun --nproc-per-node {processes} -m ropewalk eval MODEL --parallel {parallel}"


def check_processes(
    processes: int, parallel: str | None, average: bool, server: str | None, device: str
) -> None:
    """Raise for options that do not go with so many processes.

    Args:
        processes: that torchrun started; 1 without it.
        parallel, average, server, device: the options.
    """
    shape = None if parallel is None else degrees_in(parallel)
    if processes == 1:
        if shape is not None and parallel is not None:
            raise RopewalkError(
                f"--parallel {parallel} needs several processes; start them with "
                f"{torchrun_line(shape.world_size, parallel)}"
            )
        return
    from ropewalk.models.load import choose_device

    for option, given in (("--average", average), ("--server", server is not None)):
        if given:
            raise RopewalkError(
                f"{option} is for one process, and torchrun started {processes}; leave torchrun out"
            )
    if choose_device(device).index is not None:
        raise RopewalkError(f"--device {device} names one device for {processes} processes; say cuda")


def degrees_in(text: str) -> MeshShape:
    """The mesh of an option such as ``shard=2,sequence=4``; a degree that is not named is 1.

    Raises:
        RopewalkError: naming the part that is no KEY=DEGREE.
    """
    from ropewalk.parallel import MeshShape
    from ropewalk.parallel.mesh import DIMENSIONS

    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, degree = (each.strip() for each in part.partition("="))
        number = degree.isascii() and degree.isdigit() and int(degree) >= 1
        if name not in DIMENSIONS or name in degrees or not number:
            raise RopewalkError(
                f"--parallel {text!r} holds {part.strip()!r}; write KEY=DEGREE once each, with commas between, of "
                f"{', '.join(DIMENSIONS)} and degrees from 1: sequence=4"
            )
        degrees[name] = int(degree)
    return MeshShape(**degrees)


def shape_for(parallel: str | None, processes: int, num_heads: int) -> MeshShape:
    """The mesh that was asked for, or all processes as ``sequence``.

    Args:
        parallel: as :func:`degrees_in` reads it; None for none.
        processes: that torchrun started.
        num_heads: query heads of the model.

    Raises:
        RopewalkError: if there are more or fewer processes than degrees, or the heads cannot be divided.
    """
    from ropewalk.parallel import MeshShape

    shape = MeshShape(sequence=processes) if parallel is None else degrees_in(parallel)
    if shape.world_size != processes:
        raise RopewalkError(
            f"--parallel {parallel} makes {shape.world_size} processes and torchrun started {processes}; say "
            f"{torchrun_line(shape.world_size, parallel or '')}"
        )
    if num_heads % shape.sequence:
        sequence = math.gcd(num_heads, shape.sequence)
        rest = shape.world_size // sequence
        raise RopewalkError(
            f"the model's {num_heads} attention heads cannot be divided over sequence={shape.sequence}; say --parallel "
            f"ring={rest},sequence={sequence} or --parallel shard={rest},sequence={sequence}"
        )
    return shape


@dataclass(frozen=True)
class Prepared:
    """What is known before the model loads.

    Attributes:
        path: of the checkpoint.
        shape: of the mesh.
        settings: with lengths.
        documents: int ``[tokens]`` each; None where nothing reads them.
        dtype: of the shards.
        engine: that computes attention.
        table: factor table that the model runs with, if any.
    """

    path: str
    shape: MeshShape
    settings: Settings
    documents: list[Any] | None
    dtype: torch.dtype
    engine: str
    table: FittedTable | None


def measure_sharded(
    model: str,
    settings: Settings,
    text: str,
    loading: Loading,
    parallel: str | None,
    output: Output,
    world: World,
) -> None:
    """What ``measure`` does in one process, for one model, by all of them; the first reads, writes and prints."""
    from ropewalk.cli.evaluate_run import finish, rope_facts
    from ropewalk.data import load_tokenizer
    from ropewalk.evaluation.sharded import ShardedBackend, evaluate_sharded
    from ropewalk.models.sharding import load_sharded
    from ropewalk.parallel import make_mesh

    with ExitStack() as stack:
        if not world.leads:
            log = logging.getLogger("ropewalk")
            stack.callback(log.setLevel, log.level)
            log.setLevel(logging.ERROR)
        ready = world.lead(lambda: _prepared(model, settings, text, loading, parallel, world.size))
        tokenizer, device = load_tokenizer(ready.path), _device(loading.device, world)
        mesh = make_mesh(ready.shape, device.type)
        loaded = load_sharded(
            ready.path,
            mesh,
            world,
            device,
            engine=loading.engine,
            dtype=ready.dtype,
            exact_rope=loading.exact_rope,
            rope=ready.table.method if ready.table else None,
            max_position_embeddings=ready.table.context if ready.table else None,
        )
        facts = {
            "backend": ShardedBackend.of(loaded, mesh).description,
            "engine": ready.engine,
            "dtype": str(ready.dtype).removeprefix("torch."),
            "device": device.type,
            "exact_rope": loading.exact_rope,
            "parallel": str(mesh.shape),
            **rope_facts(ready.table),
        }
        stores, identity = _stores(ready, tokenizer, text, facts, output, stack, world)
        with ExitStack() as drawn:
            progress = _bar(drawn) if world.leads else None
            results = evaluate_sharded(
                loaded, tokenizer, ready.settings, ready.documents, mesh, progress, world, stores
            )
        known = [{**identity, **facts}]
        world.lead(lambda: finish(model, ready.settings, text, known, results, [], output))


def _prepared(
    model: str, settings: Settings, text: str, loading: Loading, parallel: str | None, processes: int
) -> Prepared:
    """All that can be refused without the model is refused here."""
    from ropewalk.cli.evaluate_run import reads_text, table_of, with_lengths
    from ropewalk.data import load_tokenizer
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.evaluation.sharded import check_sharded, chosen_suites
    from ropewalk.evaluation.text import documents_of
    from ropewalk.models.load import choose_device, read_config
    from ropewalk.planning.inspection import read_checkpoint as read_values

    # Before any text is read, which may take long.
    chosen_suites(settings)
    path = resolve_model(model)
    read_values(path)
    config = read_config(path).get_text_config()
    shape = shape_for(parallel, processes, config.num_attention_heads)
    dtype = _dtype(path, config, loading.dtype)
    engine = _engine(loading.engine, choose_device(loading.device), dtype, config, shape)
    table = table_of(loading, path)
    settings = with_lengths(settings, path, table)
    tokenizer = load_tokenizer(path)
    documents = None
    if reads_text(settings):
        longest = max(settings.lengths_of("perplexity"))
        documents = documents_of(text, tokenizer, longest, settings.rows)
    stated = table.context if table else getattr(config, "max_position_embeddings", None)
    check_sharded(tokenizer, settings, documents, stated)
    return Prepared(path, shape, settings, documents, dtype, engine, table)


def _bar(stack: ExitStack) -> Any:
    from ropewalk.cli.output import notes
    from ropewalk.cli.progress import ConsoleReporter

    advance = stack.enter_context(ConsoleReporter(notes).bar("evaluation", None))
    return lambda what, done, total: advance(done, f"{what} {done}/{total}")


def _device(name: str, world: World) -> torch.device:
    import torch

    from ropewalk.models.load import choose_device

    device = choose_device(name)
    return torch.device("cuda", world.local_rank) if device.type == "cuda" else device


def _dtype(path: str, config: Any, name: str) -> torch.dtype:
    """The dtype of the shards: as named, else the checkpoint's own."""
    import torch

    stated = config.dtype if name == "auto" else getattr(torch, name)
    if not isinstance(stated, torch.dtype):
        raise RopewalkError(f"the config of {path} states no dtype; give --dtype float32 or bfloat16")
    return stated


def _engine(engine: str, device: torch.device, dtype: torch.dtype, config: Any, shape: MeshShape) -> str:
    """The attention engine that ``engine`` comes to on this mesh."""
    from ropewalk.attention import check_engine
    from ropewalk.models.load import attention_spec

    spec = attention_spec(config, device, dtype, backward=False, ring=shape.ring > 1)
    return check_engine(engine, spec)


def _stores(
    ready: Prepared,
    tokenizer: Any,
    text: str,
    facts: dict[str, Any],
    output: Output,
    stack: ExitStack,
    world: World,
) -> tuple[Any, dict[str, Any]]:
    """The folder of the first process; the others know what it knows, and keep what is new in memory."""
    from ropewalk.cli.evaluate_run import stores_of
    from ropewalk.evaluation import Stores

    kept: list[Stores] = []

    def opened() -> tuple[dict[str, Any], dict[Any, Any]]:
        stores, identity = stores_of(ready.path, tokenizer, ready.settings, text, facts, output, stack)
        kept.append(stores)
        return identity, stores.finished.known

    identity, known = world.lead(opened)
    if kept:
        return kept[0], identity
    stores = Stores.in_memory()
    stores.finished.known.update(known)
    return stores, identity
