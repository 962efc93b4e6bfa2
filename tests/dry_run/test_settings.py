"""Settings of the planned hardware."""

from typing import get_args

import pytest
from pydantic import ValidationError

from ropewalk.dry_run.settings import Gpu, HardwareSettings
from ropewalk.planning.sizing.time import GPUS, H100


def test_data_sheets_are_changed_by_what_is_given():
    assert HardwareSettings().cluster == H100
    given = HardwareSettings(gpu="b200", memory_gb=100, gpus_per_node=4, attention_efficiency=0.6).cluster
    assert (given.bytes_per_rank, given.ranks_per_node, given.attention_efficiency) == (10**11, 4, 0.6)
    assert given.peak_flops == GPUS["b200"].peak_flops
    assert HardwareSettings(gpu="l40s", tflops=100).cluster.peak_flops == 1e14


def test_every_gpu_that_is_known_can_be_named():
    assert set(get_args(Gpu)) == GPUS.keys()


@pytest.mark.parametrize(
    "wrong", [{"gpus": 0}, {"gpu": "h300"}, {"memory_gb": 0}, {"matmul_efficiency": 1.1}]
)
def test_impossible_hardware_is_refused(wrong):
    with pytest.raises(ValidationError):
        HardwareSettings(**wrong)
