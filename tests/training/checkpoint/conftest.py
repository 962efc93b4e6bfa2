"""Checkpoints of one process and of ranks."""

import pytest
import torch

from ropewalk.training.checkpoint.single import save_checkpoint
from tests.training.checkpoint.checkpoint_cases import MESH, POSITION
from tests.training.checkpoint.rank_cases import Trainee, saved
from tests.training.sharded_cases import packed_rows, save_tied_llama


@pytest.fixture(scope="module")
def tied_llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tied") / "llama"
    save_tied_llama(folder)
    return folder


@pytest.fixture(scope="module")
def rows():
    return packed_rows(4)


@pytest.fixture(scope="module")
def by_ranks(four_ranks, tied_llama, rows, tmp_path_factory):
    """Four ranks' checkpoint after two steps, and what each rank did next."""
    out = tmp_path_factory.mktemp("sharded")
    return out, four_ranks.run(saved, MESH, tied_llama, rows, out)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def by_one(request, tied_llama, rows, tmp_path_factory):
    """One process's checkpoint after two steps, and what it did next."""
    one = Trainee(tied_llama, rows, request.param)
    one.train(2)
    out = tmp_path_factory.mktemp("whole")
    torch.manual_seed(7)
    path = save_checkpoint(out, one.model.model, None, one.optimizer, POSITION, 1)
    drawn = torch.rand(3).tolist()
    masters = one.masters()
    return request.param, path, masters, drawn, one.train(2), one.fingerprint()


@pytest.fixture(scope="module")
def whole(tied_llama, rows, tmp_path_factory):
    """One process's checkpoint after two steps, for what does not depend on its precision."""
    one = Trainee(tied_llama, rows)
    one.train(2)
    return save_checkpoint(
        tmp_path_factory.mktemp("whole"), one.model.model, None, one.optimizer, POSITION, 1
    )
