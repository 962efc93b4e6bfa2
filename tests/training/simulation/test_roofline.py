"""Time of operators by hand, and what the recorder says of them."""

import pytest

from ropewalk.attention.speeds import share_of_peak
from ropewalk.planning.sizing.recurrent import SHARES
from ropewalk.planning.sizing.time import Cluster
from ropewalk.training.simulation.recording import Operator
from ropewalk.training.simulation.roofline import compute_seconds, operator_seconds

CLUSTER = Cluster(
    peak_flops=1e12, memory_bandwidth=1e9, matmul_efficiency=0.5, memory_efficiency=0.25, generation="hopper"
)


def test_an_operator_takes_the_time_of_its_operations_or_of_its_bytes():
    by_flops = Operator("aten.mm", "matmul", "forward", 10**6, 10**10, 0, 10**10)
    by_bytes = Operator("aten.mm", "matmul", "forward", 10**8, 10**10, 0, 10**10)
    attention = Operator("flash2", "attention", "forward", 10**6, 10**10, 0, 2 * 10**10)
    other = Operator("aten.mul", "other", "forward", 10**6)
    assert operator_seconds(by_flops, CLUSTER) == pytest.approx(10**10 / 0.5e12)
    assert operator_seconds(by_bytes, CLUSTER) == pytest.approx(10**8 / 0.25e9)
    assert operator_seconds(attention, CLUSTER) == pytest.approx(
        2 * 10**10 / (share_of_peak("flash2", "hopper") * 1e12)
    )
    kernel = Operator("chunk_fwd_o", "recurrent", "forward", 10**6, 10**10, 0, 10**10)
    assert operator_seconds(kernel, CLUSTER) == pytest.approx(10**10 / (SHARES["hopper"].share * 1e12))
    found = compute_seconds({by_flops: 3, by_bytes: 1, attention: 2, other: 5}, CLUSTER)
    assert found == pytest.approx(
        {
            "matmul": 3 * operator_seconds(by_flops, CLUSTER) + operator_seconds(by_bytes, CLUSTER),
            "attention": 2 * operator_seconds(attention, CLUSTER),
            "other": 5 * 10**6 / 0.25e9,
        }
    )
    assert compute_seconds({kernel: 2}, CLUSTER)["recurrent"] == 2 * operator_seconds(kernel, CLUSTER)
