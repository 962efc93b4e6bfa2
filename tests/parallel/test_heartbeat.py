"""What heartbeats say of ranks that hold up the others; the end of a run that hangs is tested with whole runs."""

import json
import threading
import time
from dataclasses import asdict, replace

from ropewalk.parallel import World
from ropewalk.parallel.heartbeat import Beat, _Watch, diagnosis, heartbeat, read_beats
from tests.parallel.world_cases import timing_out

WAITING = "training/update/step.py:231 (all_reduce)"
READING = "data/rows/packed_rows.py:88 (read)"


def beats(places):
    return {
        rank: Beat(rank, f"host-{rank // 2}", 100 + rank, 13, place, 7) for rank, place in enumerate(places)
    }


def test_the_rank_that_is_not_where_most_are_is_named():
    assert diagnosis(beats([WAITING, WAITING, READING, WAITING]), []) == (
        f"rank 2 (process 102 on host-1) is in step 13 at {READING}; the other 3 ranks are in step 13 at {WAITING}"
    )
    behind = beats([WAITING] * 4)
    behind[1] = replace(behind[1], step=12)
    assert diagnosis(behind, []).startswith(
        f"rank 1 (process 101 on host-0) is in step 12 at {WAITING}; the other 3"
    )


def test_ranks_without_a_heartbeat_are_named_first():
    found = beats([WAITING, READING, WAITING])
    assert diagnosis(found, [2, 3]) == (
        f"no heartbeat from rank 2 (process 102 on host-1), last in step 13 at {WAITING} "
        "and rank 3, which never wrote one"
    )


def test_without_a_majority_all_places_are_given_and_in_one_place_none_is_blamed():
    said = diagnosis(beats([WAITING, READING]), [])
    assert f"rank 0 (process 100 on host-0) is in step 13 at {WAITING}" in said
    assert f"rank 1 (process 101 on host-0) is in step 13 at {READING}" in said
    assert diagnosis(beats([WAITING] * 3), []) == (
        f"all 3 ranks are in step 13 at {WAITING}, so the network or a GPU may have stopped"
    )


def test_a_rank_writes_where_it_is_and_deletes_it_at_the_end(tmp_path):
    folder = tmp_path / "heartbeats"
    with heartbeat(folder, World(1, 2), 0.4, "resume") as progress:
        progress.reached(5)
        deadline = time.monotonic() + 10
        while (found := read_beats(folder).get(1)) is None or found.number < 3 or found.step < 5:
            assert time.monotonic() < deadline
            progress.reached(5)
            time.sleep(0.01)
        assert found.process > 0
        # This thread is not in ropewalk's own code but in the test's.
        assert found.place
    assert not folder.exists()


def test_a_long_pause_ends_nothing(tmp_path):
    with heartbeat(tmp_path / "heartbeats", World(0, 2), 0.1, "resume") as progress:
        progress.reached(1)
        progress.pause()
        time.sleep(0.3)


def test_a_step_that_completes_while_ranks_are_compared_ends_nothing(tmp_path):
    ended = threading.Event()
    watch = _Watch(tmp_path, World(0, 2), 0.2, "resume", threading.get_ident(), ended)
    watch.reached(1)
    comparing = threading.Thread(target=watch.end_if_stuck)
    comparing.start()
    watch.pause()
    # Otherwise this process ends here.
    comparing.join(5)
    assert not comparing.is_alive()


def test_one_process_has_no_heartbeat(tmp_path):
    with heartbeat(tmp_path / "heartbeats", World(), 0.1, "resume") as progress:
        progress.reached(1)
        progress.pause()
    assert not (tmp_path / "heartbeats").exists()


def test_files_that_cannot_be_read_count_as_missing(tmp_path):
    (tmp_path / "rank-00000.json").write_text("{")
    (tmp_path / "rank-00001.json").write_text(json.dumps({"rank": 1}))
    there = beats([WAITING] * 3)[2]
    (tmp_path / "rank-00002.json").write_text(json.dumps(asdict(there)))
    assert read_beats(tmp_path) == {2: there}


def test_collectives_of_torch_get_the_timeout_that_is_set_after_their_group_was_made(two_ranks):
    """Notices when torch's private functions change."""
    seconds, control = two_ranks.run(timing_out, 20.0)[0]
    assert seconds == 2 * 20.0 + 60
    assert control > 24 * 3600
