"""The table of attention kernels' speeds, and what short documents and narrow heads cost."""

from ropewalk.attention.speeds import NARROW, OVERHEAD_KEYS, SPEEDS, share_of_peak, timed_flops
from ropewalk.planning.sizing.time import GPUS


def test_short_documents_and_narrow_heads_take_longer_than_their_operations():
    # As many keys as the overhead double the time.
    assert timed_flops(10**6, 100 * OVERHEAD_KEYS, 100, 128) == 2 * 10**6
    assert timed_flops(10**6, 10**12, 1, 64) == round(10**6 / NARROW)
    assert timed_flops(0, 0, 100, 128) == 0


def test_every_generation_of_the_gpus_has_the_kernels_of_torch():
    for cluster in GPUS.values():
        # cuDNN is NVIDIA's.
        for kernel in ("flash2", "flex", "efficient", *["cudnn"] * (cluster.generation != "cdna3")):
            assert 0 < SPEEDS[kernel][cluster.generation].share < 1
    # cuDNN wins on Hopper alone.
    assert share_of_peak("cudnn", "hopper") > share_of_peak("flash2", "hopper")
    assert share_of_peak("cudnn", "ampere") < share_of_peak("flash2", "ampere")
