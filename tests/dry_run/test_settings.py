"""Settings of the planned hardware."""

from typing import get_args

import pytest
from pydantic import ValidationError

from ropewalk.dry_run.settings import GpuName, HardwareSettings, InitSettings
from ropewalk.planning.sizing.time import GPUS, H100


def test_data_sheets_are_changed_by_what_is_given():
    assert HardwareSettings().cluster == H100
    given = HardwareSettings(gpu="b200", memory_gb=100, gpus_per_node=4, attention_efficiency=0.6).cluster
    assert (given.bytes_per_rank, given.ranks_per_node, given.attention_efficiency) == (10**11, 4, 0.6)
    assert given.peak_flops == GPUS["b200"].peak_flops
    assert HardwareSettings(gpu="l40s", tflops=100).cluster.peak_flops == 1e14


def test_every_gpu_that_is_known_can_be_named():
    assert set(get_args(GpuName)) == GPUS.keys()


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H100", "h100"),
        ("h100-80gb", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("MI300X", "mi300x"),
        ("AMD Instinct MI300X", "mi300x"),
        ("RTX 4090", "4090"),
        ("rtx4090", "4090"),
        ("NVIDIA GeForce RTX 5090", "5090"),
        ("L40S", "l40s"),
        ("RTX A6000", "a6000"),
    ],
)
def test_usual_spellings_of_gpus_are_known(written, name):
    assert HardwareSettings(gpu=written).gpu == name
    assert InitSettings(model="m", target=1024, gpu=written).gpu == name


@pytest.mark.parametrize("known", GPUS)
def test_only_the_memory_of_the_data_sheet_is_part_of_a_name(known):
    size = GPUS[known].bytes_per_rank // 10**9
    assert HardwareSettings(gpu=f"{known}-{size}gb").gpu == known
    with pytest.raises(ValidationError, match=f"planned with {size} GB; give {known}, and memory_gb 40"):
        HardwareSettings(gpu=f"{known} 40GB")


@pytest.mark.parametrize("other", ["v100", "h100 pcie", "H100 NVL", "RTX 6000 Ada", "4090 D", "", "h"])
def test_other_gpus_are_refused_with_all_that_are_known(other):
    with pytest.raises(ValidationError, match=f"choose from {', '.join(GPUS)}"):
        HardwareSettings(gpu=other)


@pytest.mark.parametrize(
    "wrong", [{"gpus": 0}, {"gpu": "h300"}, {"memory_gb": 0}, {"matmul_efficiency": 1.1}]
)
def test_impossible_hardware_is_refused(wrong):
    with pytest.raises(ValidationError):
        HardwareSettings(**wrong)
