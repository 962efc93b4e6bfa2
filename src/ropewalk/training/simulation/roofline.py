"""Time of a step's computation by the roofline of each operator."""

from __future__ import annotations

from collections.abc import Mapping

from ropewalk.planning.sizing.recurrent import SHARES
from ropewalk.planning.sizing.time import Cluster
from ropewalk.training.simulation.recording import Operator


def operator_seconds(operator: Operator, cluster: Cluster) -> float:
    """Seconds of one call: what takes longer, its operations or its bytes.

    Products reach a share of the peak, attention that of its kernel, and kernels of recurrent layers another.
    Everything else is limited by the memory.
    """
    share = cluster.matmul_efficiency
    if operator.kind == "attention":
        share = cluster.attention_share(operator.name)
    elif operator.kind == "recurrent":
        share = SHARES[cluster.generation].share
    computing = operator.timed_flops / (cluster.peak_flops * share)
    return max(computing, operator.bytes / (cluster.memory_bandwidth * cluster.memory_efficiency))


def compute_seconds(operators: Mapping[Operator, int], cluster: Cluster) -> dict[str, float]:
    """Seconds of all calls, by kind of operator: ``matmul``, ``attention``, ``other``, and ``recurrent`` if any is."""
    found = dict.fromkeys(("matmul", "attention", "other"), 0.0)
    for each, number in operators.items():
        found[each.kind] = found.get(each.kind, 0.0) + number * operator_seconds(each, cluster)
    return found
