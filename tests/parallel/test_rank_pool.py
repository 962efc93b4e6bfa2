"""The pool of processes itself: results in order, failures with their reason, and a fresh start after them."""

import math
import os
import signal
import sys
import time
from itertools import product

import pytest
import torch

from ropewalk.parallel import MeshShape
from ropewalk.parallel.rank_pool import RankFailure, Ranks
from tests.parallel.ranks_cases import dying, late, own_rank, refusing, threads_after, threads_after_refusals


def test_a_pool_gives_results_in_order_and_outlives_its_failures():
    with Ranks(2) as ranks:
        pids = ranks.run(os.getpid)
        assert ranks.run(own_rank) == [(0, 2, "0"), (1, 2, "1")]
        assert ranks.run(os.getpid) == pids
        with pytest.raises(RankFailure, match=r"rank 1: [\s\S]*no luck on 1"):
            ranks.run(refusing, 1)
        # Others may still wait for the one that failed: the next call has new processes.
        assert set(ranks.run(os.getpid)).isdisjoint(pids)
        with pytest.raises(RankFailure, match="rank 0: the process died"):
            ranks.run(dying, 0, signal.SIGKILL)
        # One that ends between two calls is noticed too.
        os.kill(ranks.run(os.getpid)[1], signal.SIGKILL)
        time.sleep(0.5)
        assert ranks.run(own_rank) == [(0, 2, "0"), (1, 2, "1")]
        with pytest.raises(RankFailure, match=r"rank 1: no answer within 0\.2 seconds"):
            ranks.run(late, 1, seconds=0.2)


SHAPES = [MeshShape(*sizes) for sizes in product((1, 2, 4), repeat=4) if math.prod(sizes) == 4]
"""All meshes of four ranks."""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_meshes_and_runs_leave_no_threads_and_a_waiting_pool_uses_no_processor(four_ranks):
    """Each group of gloo has three threads, one of which looks for messages a hundred times a second."""
    first = four_ranks.run(threads_after, SHAPES)
    # The default group, the pairs and fours of each dimension, and what a device mesh makes for its two.
    assert max(first) < 64
    assert four_ranks.run(threads_after, SHAPES * 3) == first
    assert four_ranks.run(threads_after_refusals, 5) == first
    before = four_ranks.run(time.process_time)
    time.sleep(1.0)
    used = [after - start for start, after in zip(before, four_ranks.run(time.process_time), strict=True)]
    assert max(used) < 0.1


def test_a_rank_computes_on_one_thread(two_ranks):
    assert two_ranks.run(torch.get_num_threads) == [1, 1]
