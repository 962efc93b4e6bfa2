"""The pool of processes itself: results in order, failures with their reason, and a fresh start after them."""

import os
import signal
import time

import pytest

from ranks_cases import dying, late, own_rank, refusing
from ropewalk.testing.ranks import RankFailure, Ranks


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
