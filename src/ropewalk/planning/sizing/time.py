"""Floating-point operations of a step, and the time and share of peak to expect on assumed machines.

Nothing here is measured. Counts of operations are exact for the model described; times follow from
:class:`Cluster`, whose figures are assumptions with a source each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.planning.sizing.model_shape import ModelShape, ShardedRun
from ropewalk.planning.sizing.traffic import Communication, ring_exchanges, step_communication


def _assumed(value: float, unit: str, meaning: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "meaning": meaning, "source": source})


@dataclass(frozen=True)
class Cluster:
    """Machines as assumed: bytes, FLOP/s, bytes/s each way, seconds, and shares; the defaults are nodes of eight NVIDIA
    H100 SXM. Each field's metadata has its unit, its meaning and where the default comes from.

    An overlap is possible for FSDP and offload, and never for Ulysses and the ring, which attention waits for.
    """

    ranks_per_node: int = _assumed(8, "", "GPUs that NVLink joins", "NVIDIA DGX H100 data sheet, 2022")
    bytes_per_rank: int = _assumed(
        80 * 10**9,
        "GB",
        "memory of a GPU, of which an estimate may fill 90 %",
        "NVIDIA H100 data sheet, 2023",
    )
    peak_flops: float = _assumed(
        989.4e12, "TFLOP/s", "dense bfloat16 products", "NVIDIA H100 data sheet, 2023"
    )
    matmul_efficiency: float = _assumed(
        0.55,
        "",
        "share of the peak in all but attention, norms and other small kernels included",
        "a guess; Llama 3 405B made 0.38 to 0.43 in all, with tensor, pipeline and context parallelism "
        "(arXiv:2407.21783, 2024)",
    )
    attention_efficiency: float = _assumed(
        0.35,
        "",
        "share of the peak in attention",
        "FlashAttention-2 on H100 according to arXiv:2407.08608, 2024, whose FlashAttention-3 makes up to 0.75",
    )
    nvlink: float = _assumed(
        450e9, "GB/s", "each way between GPUs of a node", "NVIDIA H100 data sheet, 2023: 900 both ways"
    )
    network: float = _assumed(
        50e9, "GB/s", "each way of a GPU's own port", "NVIDIA ConnectX-7 data sheet, 2022: 400 Gb/s"
    )
    host_link: float = _assumed(64e9, "GB/s", "each way to the CPU's memory", "PCI Express 5.0 x16, 2019")
    link_efficiency: float = _assumed(0.8, "", "share of those rates that messages reach", "a guess")
    overlap: float = _assumed(
        0.8, "", "share of a transfer that computation hides where both may run at once", "a guess"
    )
    nvlink_latency: float = _assumed(
        3.4e-6,
        "µs",
        "a step of a collective within a node",
        "NCCL's own table (tuning.cc, ring, Simple), 2022",
    )
    network_latency: float = _assumed(
        14e-6,
        "µs",
        "a step of a collective between nodes",
        "NCCL's own table (tuning.cc, ring, Simple), 2022",
    )


H100 = Cluster()


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of some rows over all ranks.

    Attributes:
        dense: products with parameters, forward and backward.
        attention: products of queries, keys and values over visible pairs, forward and backward.
        hardware_dense, hardware_attention: what is computed, recomputation included.
    """

    dense: int
    attention: int
    hardware_dense: int
    hardware_attention: int

    @property
    def model(self) -> int:
        """What the mathematics asks for: the share of peak is counted from it."""
        return self.dense + self.attention


def visible_pairs(row_length: int, document_length: int | None = None) -> int:
    """Pairs of a query and a key that it sees, in a row of causal attention.

    Args:
        row_length: tokens.
        document_length: the row is packed with documents of this length that do not see each other, the last one
            cut; documents of several lengths with this mean have more pairs. None for one document.
    """
    length = min(document_length or row_length, row_length)
    whole, rest = divmod(row_length, length)
    return whole * (length * (length + 1) // 2) + rest * (rest + 1) // 2


def flops(
    shape: ModelShape,
    row_length: int,
    rows: int = 1,
    checkpointing: bool = True,
    document_length: int | None = None,
) -> Flops:
    """Count the operations of forward and backward; a multiplication and an addition are two.

    Dense: 6 a token and matrix parameter, 8 where the forward is computed again (the head's always is, by the chunked
    loss). Attention: 4·H·D a pair and layer in the forward, twice that in the backward; flash attention computes
    scores again in the backward, which makes it 10·H·D of hardware, and checkpointing adds the forward once more.

    Args:
        shape: the model's.
        row_length: tokens of a row.
        rows: how many.
        checkpointing: whether layers are computed again in the backward.
        document_length: see :func:`visible_pairs`.
    """
    tokens = rows * row_length
    head, layers = shape.head_parameters, shape.layer_matrices
    # Heads times head_dim is what a pair costs in a layer, twice multiplied and added.
    pair = rows * visible_pairs(row_length, document_length) * shape.layers * shape.heads * shape.head_dim
    return Flops(
        dense=6 * tokens * (layers + head),
        attention=12 * pair,
        hardware_dense=tokens * ((8 if checkpointing else 6) * layers + 8 * head),
        hardware_attention=(18 if checkpointing else 14) * pair,
    )


@dataclass(frozen=True)
class Estimate:
    """What to expect of a step, were the assumptions true.

    Attributes:
        tokens: of the step.
        flops: of the step, over all ranks.
        sent: bytes that the busiest rank sends.
        compute_seconds: of the busiest rank, matrix products and attention.
        exchange_seconds: Ulysses and the ring, during which nothing is computed.
        exposed_seconds: what computation does not hide of other transfers.
        peak_flops: of all ranks together.
    """

    tokens: int
    flops: Flops
    sent: Communication
    compute_seconds: float
    exchange_seconds: float
    exposed_seconds: float
    peak_flops: float = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.exchange_seconds + self.exposed_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks together."""
        return self.tokens / self.seconds

    @property
    def model_flops_utilisation(self) -> float:
        """Share of the peak that the model's own operations make."""
        return self.flops.model / (self.seconds * self.peak_flops)


def estimate_step(
    run: ShardedRun, rows_per_step: int, cluster: Cluster = H100, document_length: int | None = None
) -> Estimate:
    """Expected time of an optimiser step; the update itself is left out.

    The work is taken as evenly spread, as the zigzag cut does for one document a row; padding is computed on.

    Args:
        run: model, mesh and rows of a pass.
        rows_per_step: a multiple of data degree times rows_per_batch.
        cluster: what is assumed of the machines.
        document_length: see :func:`visible_pairs`.

    Raises:
        RopewalkError: if rows_per_step is no such multiple.
    """
    mesh, shape = run.mesh, run.model
    passes, rest = divmod(rows_per_step, mesh.data_degree * run.rows_per_batch)
    if rest or passes < 1:
        raise RopewalkError(
            f"rows_per_step {rows_per_step} is not a multiple of {mesh.data_degree * run.rows_per_batch}, the rows of "
            "one pass of all ranks"
        )
    work = flops(shape, run.row_length, rows_per_step, run.checkpointing, document_length)
    padded = run.shard_length * mesh.sequence_degree / run.row_length
    rate = mesh.world_size * cluster.peak_flops
    attention = work.hardware_attention / (rate * cluster.attention_efficiency)
    dense = work.hardware_dense * padded / (rate * cluster.matmul_efficiency)
    sent = step_communication(run, passes, document_length)
    parameters, exchange, offload = _transfers(run, sent, passes, cluster)
    exposed = sum(_exposed(each, dense + attention, cluster) for each in (parameters, offload))
    return Estimate(
        tokens=rows_per_step * run.row_length,
        flops=work,
        sent=sent,
        compute_seconds=dense + attention,
        exchange_seconds=exchange,
        exposed_seconds=exposed,
        peak_flops=rate,
    )


def _transfers(
    run: ShardedRun, sent: Communication, passes: int, cluster: Cluster
) -> tuple[float, float, float]:
    """Seconds of FSDP, of the exchanges of Ulysses and the ring, and of offload, each by itself."""
    mesh, layers, units = run.mesh, passes * run.model.layers, passes * (run.model.layers + 1)
    times = 3 if run.checkpointing else 2
    # Two gathers of a layer and one of the root, one reduction of each; an all-reduce has twice the steps.
    shards = _time(sent.fsdp, 2 * layers + passes + units, 1, mesh.shard_degree, cluster, grouped=True)
    replicas = _time(sent.replicas, 2 * units, mesh.shard_degree, mesh.replicate, cluster, grouped=False)
    ulysses = _time(sent.ulysses, 2 * times * layers, 1, mesh.sequence, cluster, grouped=False)
    exchanges = times * layers * ring_exchanges(run)
    ring = _time(sent.ring, exchanges, mesh.sequence, mesh.ring, cluster, grouped=False)
    host = 2 * layers * run.places * run.model.hidden * run.compute_bytes if run.offload else 0
    return shards + replicas, ulysses + ring, host / (cluster.host_link * cluster.link_efficiency)


def _time(sent: int, messages: int, stride: int, ranks: int, cluster: Cluster, *, grouped: bool) -> float:
    """Seconds for bytes that each rank of a group sends, in so many collectives.

    Args:
        sent: bytes of all of them.
        messages: how many collectives, each of ``ranks`` - 1 steps.
        stride: distance of neighbours of the group in rank.
        ranks: of the group.
        cluster: the machines.
        grouped: a collective that passes data on from rank to rank, so that all ports of a node together carry what
            crosses its border; otherwise each rank sends through its own port.
    """
    if ranks == 1:
        return 0.0
    bandwidth, crossings = cluster.nvlink, 0
    if stride * ranks > cluster.ranks_per_node:
        ports = max(1, cluster.ranks_per_node // stride) if grouped else 1
        bandwidth = min(cluster.nvlink, ports * cluster.network)
        crossings = -(-stride * ranks // cluster.ranks_per_node) - 1 if grouped else ranks - 1
    crossings = min(crossings, ranks - 1)
    steps = crossings * cluster.network_latency + (ranks - 1 - crossings) * cluster.nvlink_latency
    return sent / (bandwidth * cluster.link_efficiency) + messages * steps


def _exposed(transfer: float, compute: float, cluster: Cluster) -> float:
    """What of a transfer adds to the time: what cannot overlap, or what computation is too short to hide."""
    return max(transfer * (1 - cluster.overlap), transfer - compute)
