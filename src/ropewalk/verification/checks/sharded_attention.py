"""Check attention over sharded rows against the float64 oracle, with the recipe's engine and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ropewalk.attention import check_engine
from ropewalk.attention.options import AttentionOptions
from ropewalk.attention.oracle import Values, cotangent_of
from ropewalk.errors import EngineError
from ropewalk.io.lengths import counted
from ropewalk.parallel import Mesh, ShardedLayouts, World, sharded_attend
from ropewalk.verification.case import Case
from ropewalk.verification.checks import Claim, meshes_that_cut_rows
from ropewalk.verification.checks.engines import (
    AttentionInputs,
    attention_inputs,
    exact_attention,
    values_in,
)
from ropewalk.verification.result import Outcome


def attention_on_ranks(case: Case, mesh: Mesh, world: World) -> Outcome:
    """Compare output and gradients in every layer and row, with the recipe's engine, dtype and autocast.

    Every rank attends to its shards of the inputs recorded in one process, and rank 0 joins the results. The error
    budget is the one for engines: a ring or a Ulysses exchange may not add rounding.
    """
    device, dtype = world.device_on(mesh), case.attention.dtype
    refusal = _refusal(case, mesh, device)
    if refusal is not None:
        return Outcome.not_run(f"not run here: {refusal}")
    layers = world.on_rank_0(lambda: len(attention_inputs(case)[0]))
    worst = (0.0, 0.0, 0.0, "")
    for layer in range(layers):
        # Inputs recorded once on rank 0: a forward on each rank would differ by rounding before attention even starts.
        whole = _from_rank_0(case, layer, device, world)
        shards = _shards_of(case, mesh, whole)
        held: list[Values] | None = [()] * world.size if world.is_rank_0 else None
        dist.gather_object(tuple(x.cpu() for x in shards), held, dst=0, group=world.control)
        if held is not None:
            for number, found in enumerate(_joined(case, mesh, held)):
                errors = exact_attention(case, number, layer).errors_of(found)
                worst = max(worst, (*errors.worst, f"layer {layer}, row {number}"))
    _, error, budget, where = worst
    what = str(dtype).removeprefix("torch.")
    return Outcome.within(
        error,
        budget,
        f"output and gradients of attention in {counted(layers, 'layer')} and {len(case.rows)} rows, engine "
        f"{case.setup.engine}, {what}",
        f"in {where} attention over {mesh.shape} is further from exact attention than plain attention of one process "
        f"in {what}: the exchange loses precision, or shards see wrong tokens; do not train on this mesh",
    )


def _refusal(case: Case, mesh: Mesh, device: torch.device) -> str | None:
    try:
        check_engine(case.setup.engine, replace(case.attention, device=device, ring=mesh.shape.ring > 1))
    except EngineError as refusal:
        return str(refusal)
    return None


def _from_rank_0(case: Case, layer: int, device: torch.device, world: World) -> AttentionInputs:
    """Broadcast the recorded attention inputs of one layer, for all rows, from rank 0 to every rank."""

    def described() -> tuple[list[torch.Size], AttentionOptions]:
        first = attention_inputs(case)[0][layer]
        shapes = [torch.Size((len(case.rows), *x.shape[1:])) for x in (first.query, first.key, first.value)]
        return shapes, first.options

    shapes, options = world.on_rank_0(described)
    tensors = [torch.empty(shape, dtype=case.attention.dtype, device=device) for shape in shapes]
    if world.is_rank_0:
        for name, into in zip(("query", "key", "value"), tensors, strict=True):
            into.copy_(torch.cat([getattr(row[layer], name) for row in attention_inputs(case)]))
    for tensor in tensors:
        dist.broadcast(tensor, src=0)
    query, key, value = tensors
    return AttentionInputs(query, key, value, options)


def _shards_of(case: Case, mesh: Mesh, whole: AttentionInputs) -> Values:
    """Output and gradients for this rank's tokens, ``[rows of its group, heads, tokens, width]``."""
    mine = slice(mesh.data_rank, None, mesh.shape.data_degree)
    sharded = ShardedLayouts.of([row.layout for row in case.rows[mine]], mesh.groups)
    # Every row has the cotangent that it has in one process, where rows are computed one at a time.
    cotangents = cotangent_of(whole.query[:1], whole.value[:1]).expand(len(sharded.rows), -1, -1, -1)
    *inputs, cotangent = (
        _take(sharded, x) for x in (whole.query[mine], whole.key[mine], whole.value[mine], cotangents)
    )
    run = partial(sharded_attend, sharded=sharded, engine=case.setup.engine, options=whole.options)
    return values_in(case.precision, run, tuple(inputs), cotangent)


def _take(sharded: ShardedLayouts, values: Tensor) -> Tensor:
    """This rank's tokens of ``[rows, heads, tokens, width]``, zeros in padding."""
    shards = sharded.take(list(values.transpose(2, 3)), 0)
    return shards.transpose(2, 3).contiguous()


def _joined(case: Case, mesh: Mesh, held: Sequence[Values]) -> list[Values]:
    """Join all ranks' shards to output and gradients of whole rows, ``[1, heads, tokens, width]`` each."""
    degree = mesh.shape.data_degree
    groups = [
        [rank for rank in range(len(held)) if mesh.shape.data_rank(rank) == data] for data in range(degree)
    ]
    cuts = [
        ShardedLayouts.of([row.layout for row in case.rows[data::degree]], mesh.groups).rows
        for data in range(degree)
    ]
    rows = []
    for number in range(len(case.rows)):
        within, data = divmod(number, degree)
        # Ranks of a group are ordered ring rank by ring rank, as join expects.
        parts = [[x[within].transpose(1, 2) for x in held[rank]] for rank in groups[data]]
        whole = (cuts[data][within].join(each) for each in zip(*parts, strict=True))
        rows.append(tuple(x.transpose(1, 2)[None] for x in whole))
    return rows


CLAIMS = (
    Claim(
        "attention",
        60,
        "attention on ranks, {mesh}",
        "attention on the model's own queries, keys and values with float64",
        attention_on_ranks,
        meshes_that_cut_rows,
    ),
)
