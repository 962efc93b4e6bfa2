"""Ranks are played in a process of their own, which leaves nothing behind in this one."""

import multiprocessing

import pytest
import torch

from ropewalk.dry_run.documents import Documents
from ropewalk.dry_run.played import in_own_process
from tests.dry_run.cases import model_folder, recipe_of, resolved_for


@pytest.mark.slow
def test_the_process_ends_and_this_one_has_no_new_device(tmp_path):
    resolved = resolved_for(recipe_of(model_folder(tmp_path / "model"), parallel={"ring": 2}), 2)
    others = set(multiprocessing.active_children())
    with in_own_process() as player:
        first, second = (player(resolved, 0, Documents("one per row"), rank) for rank in (0, 1))
    assert (first.rank, second.rank) == (0, 1)
    assert first.flops["dense"] == second.flops["dense"]
    assert first.transfers.ring[0] > 0
    assert set(multiprocessing.active_children()) <= others
    with pytest.raises(RuntimeError, match="simulated"):
        torch.device("simulated")
