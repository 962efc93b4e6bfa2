"""Assumed hardware, the operations of a step of the model, and the time that its transfers take.

Nothing here is measured. Operation counts are exact for the given model. Times follow from :class:`Cluster`, whose
values are assumptions, each with a source.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from ropewalk.attention.speeds import Generation, share_of_peak
from ropewalk.parallel.mesh import MeshShape
from ropewalk.planning.sizing.model_shape import ModelShape


def _assumed(value: float, unit: str, meaning: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "meaning": meaning, "source": source})


CAPABILITIES: dict[Generation, tuple[int, int]] = {
    "ampere": (8, 0),
    "ada": (8, 9),
    "hopper": (9, 0),
    "blackwell": (10, 0),
    "rtx_blackwell": (12, 0),
    "cdna3": (8, 0),
}


@dataclass(frozen=True)
class Cluster:
    """Assumed hardware, by default nodes of eight NVIDIA H100 SXM.

    Values are in bytes, FLOP/s, bytes/s per direction, seconds, and shares from 0 to 1. The metadata of each field
    gives the unit for display, the meaning and the source of the default. FSDP and offload transfers may overlap with
    computation; Ulysses and ring transfers never do, because attention waits for them.
    """

    ranks_per_node: int = _assumed(
        8, "", "GPUs of a node, connected by NVLink", "NVIDIA DGX H100 data sheet, 2022"
    )
    bytes_per_rank: int = _assumed(
        80 * 10**9,
        "GB",
        "memory of a GPU; a run may fill 90 % of it",
        "NVIDIA H100 data sheet, 2023",
    )
    host_bytes: int = _assumed(
        2 * 10**12,
        "GB",
        "memory of a machine's CPUs; a run may fill 90 % of it",
        "NVIDIA DGX H100 data sheet, 2022: 2 TB; those of DGX H200, A100 640GB and B200 have as much",
    )
    peak_flops: float = _assumed(
        989.4e12, "TFLOP/s", "peak speed of dense bfloat16 matrix products", "NVIDIA H100 data sheet, 2023"
    )
    memory_bandwidth: float = _assumed(
        3.35e12, "TB/s", "bandwidth of a GPU's memory", "NVIDIA H100 data sheet, 2023"
    )
    matmul_efficiency: float = _assumed(
        0.75,
        "",
        "share of the peak speed that matrix products reach",
        "measured on one H200: 0.74 to 0.81 for large products",
    )
    memory_efficiency: float = _assumed(
        0.7,
        "",
        "share of the memory bandwidth that operators limited by it reach",
        "fitted to steps of a 1B model measured on one H200",
    )
    generation: Generation = field(default="hopper", metadata={"meaning": "generation of the GPU"})
    attention_efficiency: float | None = field(
        default=None,
        metadata={
            "meaning": "share of the peak speed that attention reaches, instead of those of each kernel in "
            "ropewalk.attention.speeds"
        },
    )
    nvlink: float = _assumed(
        450e9,
        "GB/s",
        "bandwidth between GPUs of a node, per direction",
        "NVIDIA H100 data sheet, 2023: 900 GB/s for both directions together",
    )
    network: float = _assumed(
        50e9,
        "GB/s",
        "bandwidth of each GPU's network port, per direction",
        "NVIDIA ConnectX-7 data sheet, 2022: 400 Gb/s",
    )
    host_link: float = _assumed(
        64e9, "GB/s", "bandwidth between a GPU and CPU memory, per direction", "PCI Express 5.0 x16, 2019"
    )
    link_efficiency: float = _assumed(
        0.8, "", "share of these three bandwidths that transfers reach", "a guess"
    )
    overlap: float = _assumed(
        0.8, "", "share of a transfer that computation hides, if both can run at the same time", "a guess"
    )
    nvlink_latency: float = _assumed(
        3.4e-6,
        "µs",
        "latency of one step of a collective within a node",
        "NCCL's own table (tuning.cc, ring, Simple), 2022",
    )
    network_latency: float = _assumed(
        14e-6,
        "µs",
        "latency of one step of a collective between nodes",
        "NCCL's own table (tuning.cc, ring, Simple), 2022",
    )

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability of the GPU; for one of AMD that of an A100, whose engines are assumed."""
        return CAPABILITIES[self.generation]

    def attention_share(self, kernel: str) -> float:
        """Share of the peak speed that an attention kernel reaches."""
        given = self.attention_efficiency
        return share_of_peak(kernel, self.generation) if given is None else given


H100 = Cluster()
# Eight cards in a rented machine, without NVLink: PCI Express 4.0 x16, a network of 100 Gb/s, and 512 GB are guesses.
_CARDS = replace(
    H100,
    generation="ada",
    host_bytes=512 * 10**9,
    nvlink=32e9,
    host_link=32e9,
    network=12.5e9,
    nvlink_latency=1e-5,
)

GPUS = {
    "h100": H100,
    # NVIDIA H200 data sheet, 2024: an H100 with other memory.
    "h200": replace(H100, bytes_per_rank=141 * 10**9, memory_bandwidth=4.8e12),
    # NVIDIA A100 80GB SXM data sheet, 2021: memory 2,039 GB/s, NVLink 600 GB/s in both directions; DGX A100:
    # ConnectX-6 of 200 Gb/s, PCI Express 4.0.
    "a100": replace(
        H100,
        bytes_per_rank=80 * 10**9,
        peak_flops=312e12,
        memory_bandwidth=2.039e12,
        generation="ampere",
        nvlink=300e9,
        network=25e9,
        host_link=32e9,
    ),
    # NVIDIA DGX B200 data sheet, 2024, for 8 GPUs: 1,440 GB, 18 PFLOP/s of dense bfloat16 products (36 with sparsity),
    # 64 TB/s of memory; NVLink 1.8 TB/s in both directions.
    "b200": replace(
        H100,
        bytes_per_rank=180 * 10**9,
        peak_flops=2.25e15,
        memory_bandwidth=8e12,
        generation="blackwell",
        nvlink=900e9,
    ),
    # NVIDIA DGX B300 data sheet, 2025, for 8 GPUs: 2.3 TB; HGX B300: 36 PFLOP/s of bfloat16 products with sparsity.
    "b300": replace(
        H100,
        bytes_per_rank=288 * 10**9,
        peak_flops=2.25e15,
        memory_bandwidth=8e12,
        generation="blackwell",
        nvlink=900e9,
        network=100e9,
    ),
    # AMD Instinct MI300X data sheet, 2023: 1,307.4 TFLOP/s, 5.3 TB/s; seven links of 128 GB/s in both directions.
    "mi300x": replace(
        H100,
        bytes_per_rank=192 * 10**9,
        peak_flops=1307.4e12,
        memory_bandwidth=5.3e12,
        generation="cdna3",
        nvlink=448e9,
    ),
    # NVIDIA Ada GPU architecture whitepaper, 2022: 165.2 TFLOP/s with float32 sums, 1,008 GB/s.
    "4090": replace(_CARDS, bytes_per_rank=24 * 10**9, peak_flops=165.2e12, memory_bandwidth=1.008e12),
    # NVIDIA RTX Blackwell GPU architecture whitepaper, 2025: 209.5 TFLOP/s with float32 sums, 1,792 GB/s.
    "5090": replace(
        _CARDS,
        bytes_per_rank=32 * 10**9,
        peak_flops=209.5e12,
        memory_bandwidth=1.792e12,
        generation="rtx_blackwell",
        nvlink=64e9,
        host_link=64e9,
    ),
    # NVIDIA L40S data sheet, 2023: 362.05 TFLOP/s, 864 GB/s.
    "l40s": replace(_CARDS, bytes_per_rank=48 * 10**9, peak_flops=362.05e12, memory_bandwidth=864e9),
    # NVIDIA RTX A6000 data sheet, 2020, and GA102 whitepaper: 154.8 TFLOP/s, 768 GB/s. NVLink joins two cards alone.
    "a6000": replace(
        _CARDS,
        bytes_per_rank=48 * 10**9,
        peak_flops=154.8e12,
        memory_bandwidth=768e9,
        generation="ampere",
    ),
}
"""Assumed hardware by kind of GPU, in nodes of eight; efficiencies of products and memory are those of H100."""

OTHER_CARDS = ("laptop", "max-q", "4090 d", "5090 d")
"""Parts of the names of cards that are slower than the ones called as they are."""


def gpu_named(name: str) -> Cluster | None:
    """The GPU of :data:`GPUS` with a device name such as ``NVIDIA H100 80GB HBM3``; None if it is not there.

    Cards for PCI Express and the H100 NVL have another peak than the SXM modules, except for the A100.
    """
    words = name.lower()
    if "a100" not in words and ("pcie" in words or "nvl" in words):
        return None
    if any(other in words for other in OTHER_CARDS):
        return None
    return next((cluster for kind, cluster in GPUS.items() if kind in words), None)


def model_flops(shape: ModelShape, tokens: int, pairs: int) -> tuple[int, int]:
    """Operations of products with parameters, and of attention, in forward and backward without recomputation.

    Args:
        shape: dimensions of the model.
        tokens: number of tokens.
        pairs: query-key pairs that attention computes, summed over the layers.
    """
    dense = 6 * tokens * (shape.layer_matrices + shape.head_parameters)
    # A score and a value of each pair and head; the backward takes twice the forward.
    return dense, 3 * 2 * pairs * shape.heads * (shape.head_dim + shape.value_dim)


@dataclass(frozen=True)
class Transfers:
    """Transfers of one rank in a step: bytes and number of collectives of each kind.

    Attributes:
        shards: parameters and gradients over the ranks that share them.
        replicas: gradients over replicas.
        ulysses, ring: exchanges of attention.
        host: bytes of activations that are offloaded and fetched again.
    """

    shards: tuple[int, int]
    replicas: tuple[int, int]
    ulysses: tuple[int, int]
    ring: tuple[int, int]
    host: int

    def seconds(self, mesh: MeshShape, cluster: Cluster) -> tuple[float, float, float]:
        """Seconds of FSDP, of Ulysses and ring exchanges, and of offload, each without overlap."""
        shards = _time(*self.shards, 1, mesh.shard_degree, cluster, grouped=True)
        replicas = _time(*self.replicas, mesh.shard_degree, mesh.replicate, cluster, grouped=False)
        ulysses = _time(*self.ulysses, 1, mesh.sequence, cluster, grouped=False)
        ring = _time(*self.ring, mesh.sequence, mesh.ring, cluster, grouped=False)
        return shards + replicas, ulysses + ring, self.host / (cluster.host_link * cluster.link_efficiency)


def _time(sent: int, messages: int, stride: int, ranks: int, cluster: Cluster, *, grouped: bool) -> float:
    """Seconds that the collectives of a group of ranks take.

    Args:
        sent: bytes that each rank sends in all collectives together.
        messages: number of collectives, each of ``ranks`` - 1 steps.
        stride: difference in rank between neighbours of the group.
        ranks: size of the group.
        cluster: assumed hardware.
        grouped: whether data passes from rank to rank (a ring collective), so that all ports of a node share the
            traffic between nodes. Otherwise each rank sends through its own port.
    """
    if ranks == 1:
        return 0.0
    bandwidth, crossings = cluster.nvlink, 0
    if stride * ranks > cluster.ranks_per_node:
        # A group with a stride has fewer ranks in each node, hence fewer ports that can work for it.
        ports = max(1, cluster.ranks_per_node // stride) if grouped else 1
        bandwidth = min(cluster.nvlink, ports * cluster.network)
        # A ring crosses from node to node once for each node but one; in other collectives every step may cross.
        crossings = -(-stride * ranks // cluster.ranks_per_node) - 1 if grouped else ranks - 1
    crossings = min(crossings, ranks - 1)
    steps = crossings * cluster.network_latency + (ranks - 1 - crossings) * cluster.nvlink_latency
    return sent / (bandwidth * cluster.link_efficiency) + messages * steps


def waiting_seconds(
    transfers: Transfers, mesh: MeshShape, compute: float, cluster: Cluster
) -> tuple[float, float]:
    """Seconds that a step waits for exchanges of attention, and for FSDP and offload beyond what computation hides."""
    parameters, exchange, offload = transfers.seconds(mesh, cluster)
    # Each may overlap with all of the computation: they use different links, the network and the host's.
    return exchange, sum(_exposed(each, compute, cluster) for each in (parameters, offload))


def _exposed(transfer: float, compute: float, cluster: Cluster) -> float:
    """Seconds that a transfer adds to the step: the part that cannot overlap, or that outlasts the computation."""
    return max(transfer * (1 - cluster.overlap), transfer - compute)
