"""Which checkpoints are written: one process writes whole models, and keeps as many as it was told to."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from ropewalk.parallel.context import RunContext
from ropewalk.training.checkpoint import background
from ropewalk.training.checkpoint.files import Position, checkpoints_in, read_position
from ropewalk.training.checkpoint.writing import checkpointing
from ropewalk.training.recipe.recipe import Checkpoints
from tests.training.checkpoint.checkpoint_cases import held_back
from tests.training.checkpoint.rank_cases import Trainee


def test_one_process_writes_whole_models_that_plain_transformers_loads(tied_llama, rows, tmp_path):
    one = Trainee(tied_llama, rows)
    with checkpointing(
        tmp_path, one.model, one.optimizer, None, Checkpoints(every=1, keep=2), RunContext()
    ) as writing:
        paths = [writing.save(Position(0, step, 0)) for step in (1, 2, 3)]
    # The oldest has gone.
    assert [path.is_dir() for path in paths] == [False, True, True]
    assert sorted(path.name for path in checkpoints_in(tmp_path)) == [path.name for path in paths[1:]]
    assert read_position(paths[-1]).step == 3
    loaded = transformers.AutoModelForCausalLM.from_pretrained(paths[-1])
    own = one.model.model.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, own[name].to(tensor.dtype)), name


def test_on_a_cpu_auto_writes_at_once(tied_llama, rows, tmp_path):
    one = Trainee(tied_llama, rows)
    for asynchronous, there in (("auto", True), (False, True), (True, False)):
        settings = Checkpoints(every=1, keep=1, asynchronous=asynchronous)
        folder = tmp_path / str(asynchronous)
        with (
            pytest.MonkeyPatch.context() as patch,
            checkpointing(folder, one.model, one.optimizer, None, settings, RunContext()) as writing,
        ):
            release = held_back(patch) if asynchronous is True else None
            assert writing.save(Position(0, 1, 0)).is_dir() == there
            if release is not None:
                release.set()
        assert len(checkpoints_in(folder)) == 1


def test_on_a_gpu_auto_writes_from_pinned_memory_unless_the_optimizer_fills_it(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(background, "DefaultStager", lambda options: made.append(options))
    whole = SimpleNamespace(device=torch.device("cuda"))
    model = SimpleNamespace(device=whole.device, model=whole)
    settings, context = Checkpoints(), RunContext()
    checkpointing(tmp_path, model, None, None, settings, context)
    assert [(each.use_pinned_memory, each.use_non_blocking_copy) for each in made] == [(True, True)]
    # Staged at once, and in this process: the thread writes what there was when it was told to.
    assert not made[0].use_async_staging
    assert not made[0].use_shared_memory
    checkpointing(tmp_path, model, None, None, settings, context, offloaded=True)
    assert len(made) == 1
    asked = Checkpoints(asynchronous=True)
    checkpointing(tmp_path, model, None, None, asked, context, offloaded=True)
    assert len(made) == 2
