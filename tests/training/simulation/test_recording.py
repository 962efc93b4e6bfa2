"""The recorder: allocations and frees, waits of the host, tensors of the wrong device, and logits of all tokens."""

import pytest

from ropewalk.errors import EngineError
from tests.dry_run.cases import model_folder, recipe_of
from tests.training.simulation import recording_cases as cases
from tests.training.simulation.tile_cases import both


def test_memory_is_counted_when_it_is_allocated_and_freed(aside):
    changes = [event.change for event in aside(cases.recorded, cases.allocates_and_frees).events]
    assert changes == [262144, 262144, -262144, 80, -80, -262144]


def test_storages_that_shrink_free_their_memory(aside):
    """As FSDP2 does with gathered parameters."""
    changes = [event.change for event in aside(cases.recorded, cases.resizes).events]
    assert changes == [4000, -4000, 400, -400]


def test_allocations_name_their_line(aside):
    place = aside(cases.recorded, cases.allocates_much).events[0].allocation.place
    assert place.split(":")[0].endswith("simulation/recording_cases.py")
    assert place.endswith("allocates_much")


def test_operations_of_the_host_stay_real(aside):
    events = aside(cases.recorded, cases.computes_on_the_host).events
    assert [event.change for event in events if not event.allocation.host] == [16, -16]


def test_reading_a_list_of_values_waits_once(aside):
    assert list(aside(cases.recorded, cases.reads_a_list).waits.values()) == [1]


def test_reading_tensors_one_after_another_waits_for_each(aside):
    assert list(aside(cases.recorded, cases.reads_one_after_another).waits.values()) == [cases.READS]


def test_a_planted_wait_is_found_and_named(aside, tmp_path):
    recipe = recipe_of(model_folder(tmp_path / "model"))
    clean = aside(cases.waits, recipe)
    assert {moment for _, moment in clean} == {"update"}
    ((place, moment),) = aside(cases.waits_with, recipe, cases.reads) - clean
    assert moment == "forward"
    assert "recording_cases.py:" in place
    assert place.endswith("reads")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (cases.adds_from_the_cpu, r"recording_cases\.py:\d+ adds_from_the_cpu mixes tensors of the CPU"),
        (
            cases.selects,
            r"cannot follow aten.index.Tensor at .*recording_cases\.py:\d+ selects: its result depends",
        ),
    ],
)
def test_what_would_fail_on_a_gpu_is_refused_with_its_line(aside, tmp_path, mistake, message):
    recipe = recipe_of(model_folder(tmp_path / "model"))
    with pytest.raises(EngineError, match=message):
        aside(cases.waits_with, recipe, mistake)


@pytest.mark.slow
def test_planted_logits_of_all_tokens_are_found_and_named(aside, tmp_path):
    recipe = recipe_of(model_folder(tmp_path / "model", vocab_size=70_000), context=4096)
    assert aside(cases.full_logits, recipe, False) == ()
    found = aside(cases.full_logits, recipe, True)
    assert found[0].shape[-1] == 70_000
    assert found[0].bytes >= 4096 * 70_000 * 2
    assert any("losses.py" in each.place or "recording_cases.py" in each.place for each in found)


@pytest.mark.slow
@pytest.mark.parametrize("context", [512, 500], ids=["equal tiles", "tiles of two sizes"])
@pytest.mark.parametrize("stage", [{"gradient_checkpointing": True}, {"offload_optimizer": True}], ids=str)
def test_tiles_that_repeat_others_are_counted_and_not_run(aside, tmp_path, stage, context):
    recipe = recipe_of(
        model_folder(tmp_path / "model"),
        parallel={"shard": 2},
        context=context,
        rows_per_step=2,
        tiled_mlp=48,
        **stage,
    )
    some, every = aside(both, recipe, 2, 16)
    assert some["events"] < every["events"] / 2
    for key in ("operators", "sent", "waits", "copies"):
        assert some[key] == every[key]
    # A pair of the larger tiles in a row need not be among those that run: two rows of one token of logits and sums.
    for name, total in every["moments"].items():
        assert some["moments"][name] == pytest.approx(total, rel=0 if context == 512 else 1e-2)
