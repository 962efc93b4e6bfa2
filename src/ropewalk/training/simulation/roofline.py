"""Time of a step's computation by the roofline of each operator."""

from __future__ import annotations

from collections.abc import Mapping

from ropewalk.planning.sizing.time import Cluster
from ropewalk.training.simulation.recording import Operator


def operator_seconds(operator: Operator, cluster: Cluster) -> float:
    """Seconds of one call: what takes longer, its operations or its bytes.

    Products reach a share of the peak, and attention that of its kernel; everything else is limited by the memory.
    """
    share = (
        cluster.attention_share(operator.name) if operator.kind == "attention" else cluster.matmul_efficiency
    )
    computing = operator.timed_flops / (cluster.peak_flops * share)
    return max(computing, operator.bytes / (cluster.memory_bandwidth * cluster.memory_efficiency))


def compute_seconds(operators: Mapping[Operator, int], cluster: Cluster) -> dict[str, float]:
    """Seconds of all calls, by kind of operator: ``matmul``, ``attention`` and ``other``."""
    found = dict.fromkeys(("matmul", "attention", "other"), 0.0)
    for each, number in operators.items():
        found[each.kind] += number * operator_seconds(each, cluster)
    return found
