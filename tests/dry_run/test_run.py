"""Plans of whole recipes: fit, time, changes that fit, and what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from ropewalk.dry_run import plan
from ropewalk.dry_run import run as planning
from ropewalk.dry_run.run import Change, plan_here
from ropewalk.dry_run.settings import HardwareSettings
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.io.progress import Silent
from ropewalk.models.adapter_settings import AdapterSettings
from ropewalk.models.config.layers import INDEXERS_SINCE
from ropewalk.models.config.model import ModelConfig
from ropewalk.parallel import World
from ropewalk.parallel.context import RunContext
from ropewalk.planning.sizing.recurrent import recurrent_shapes
from ropewalk.training.simulation.rank_costs import play, played_by
from tests.dry_run.cases import model_folder, planned_run, recipe_of
from tests.models.families import tiny_model
from tests.training.simulation.formula_cases import LAYERS_OF_8B
from tests.training.simulation.hybrid_cases import hybrid_recipe
from tests.training.tiny import INDEXED
from tests.versions import needs_transformers


@pytest.fixture(autouse=True)
def one_process(aside):
    """The plans of all tests share a process, which each would take seconds to start."""

    with played_by(lambda *arguments: aside(play, *arguments)):
        yield


@pytest.mark.slow
def test_a_plan_adds_up(tmp_path):
    recipe = recipe_of(model_folder(tmp_path / "model"), rows_per_step=4, parallel={"shard": 2, "ring": 2})
    result = plan(recipe, HardwareSettings(price=3, document_length=512))
    (stage,) = result.stages
    assert (result.ranks, result.device, result.device_bytes) == (4, "h100", 80 * 10**9)
    assert (stage.mesh, stage.fits, stage.changes) == ("2 shard x 2 ring", True, ())
    time = stage.time
    assert time.seconds == time.compute_seconds + time.exchange_seconds + time.exposed_seconds
    assert time.tokens_per_second == pytest.approx(4 * 512 / time.seconds)
    assert time.days_per_billion_tokens == pytest.approx(1e9 / time.tokens_per_second / 86400)
    assert time.cost == pytest.approx(time.hours * 4 * 3)
    assert stage.sent["ring"] > 0
    assert stage.sent["ulysses"] == 0
    # 6 operations per token and parameter, of which the embedding has none.
    matrices = 512 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    pairs = 4 * 512 * 513 // 2
    attention = 2 * 8 * pairs * 2 * 2 * 8 * 3
    assert stage.model_flops == pytest.approx(6 * matrices * 4 * 512 + attention, rel=0.02)
    assert {wait.moment for wait in stage.waits} == {"start", "update"}
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.slow
def test_a_plan_of_a_hybrid_counts_its_recurrent_layers_and_splits_its_rows(tmp_path):
    """One row for two GPUs is split, with states in what they send; on one, the model's work is the formulas'."""
    recipe = hybrid_recipe(tmp_path / "model", "qwen3_5", pattern="full")
    (whole,) = plan(recipe, HardwareSettings(gpus=1, document_length=512)).stages
    result = plan(
        recipe.model_copy(update={"parallel": "auto"}), HardwareSettings(gpus=2, document_length=512)
    )
    (split,) = result.stages
    assert split.mesh == "2 sequence"
    for stage in (whole, split):
        assert stage.time.kinds["recurrent"] > 0
        assert stage.flops["recurrent"] > 0
    model = tiny_model("qwen3_5", sharp=True, shallow=True)
    matrices = sum(each.weight.numel() for each in model.modules() if isinstance(each, torch.nn.Linear))
    shapes = recurrent_shapes(model, ModelConfig.of(model.config))
    attention = 2 * 4 * (512 * 513 // 2) * 2 * 2 * 16 * 3
    recurrent = 3 * sum(each.flops(512) for each in shapes)
    assert whole.model_flops == pytest.approx(6 * matrices * 512 + attention + recurrent, rel=0.01)
    assert (
        split.recurrent == "the kernels of causal-conv1d and flash-linear-attention, which must be installed"
    )
    assert f"recurrent layers are computed by {split.recurrent}" in result.assumptions
    json.dumps(result.to_json(), allow_nan=False)


@pytest.mark.slow
def test_chunks_of_an_indexer_are_in_a_plans_memory_and_not_in_its_time(tmp_path):
    """Autocast makes scores in 2 bytes: 16 MiB for 512 queries and 32 heads, twice while they are scaled."""
    needs_transformers(INDEXERS_SINCE, "a model with indexers")
    recipe = recipe_of(model_folder(tmp_path / "model", **INDEXED))
    result = plan(recipe, HardwareSettings(gpus=1, document_length=512))
    (stage,) = result.stages
    assert stage.memory.peak > 2 * 512 * 512 * 32 * 2
    assert (stage.kernels, stage.time) == ((), None)
    assert any("so no time is given" in assumption for assumption in result.assumptions)


@pytest.mark.slow
def test_what_does_not_fit_gets_the_smallest_change_that_does(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "MOST_CHANGES", 3)
    recipe = recipe_of(model_folder(tmp_path / "model", num_hidden_layers=3), context=4096)
    plain, checkpointed = (
        plan(
            recipe_of(recipe.model, context=4096, gradient_checkpointing=checkpointing),
            HardwareSettings(gpus=1, document_length=4096),
        )
        .stages[0]
        .memory.peak
        for checkpointing in (False, True)
    )
    assert checkpointed < plain
    between = (plain + checkpointed) / 2 / planning.USABLE / 1e9
    (stage,) = plan(recipe, HardwareSettings(gpus=1, memory_gb=between, document_length=4096)).stages
    assert not stage.fits
    (change,) = stage.changes
    assert change.change == "stages.0.gradient_checkpointing: true"
    assert change.fits
    assert change.peak == checkpointed


@pytest.mark.slow
def test_what_saves_memory_that_is_free_is_turned_off_costliest_first(tmp_path):
    model = model_folder(tmp_path / "model", num_hidden_layers=3)
    saving = {"gradient_checkpointing": True, "offload_activations": True}
    of = {
        name: plan(recipe_of(model, context=4096, **settings), HardwareSettings(gpus=1, document_length=4096))
        for name, settings in {
            "all": saving,
            "checkpointed": {"gradient_checkpointing": True},
            "plain": {},
        }.items()
    }
    peaks = {name: planned.stages[0].memory.peak for name, planned in of.items()}
    (stage,) = of["all"].stages
    assert [change.change for change in stage.spare] == [
        "stages.0.offload_activations: false",
        "stages.0.gradient_checkpointing: false",
    ]
    assert [change.peak for change in stage.spare] == [peaks["checkpointed"], peaks["plain"]]
    assert all(change.fits for change in stage.spare)
    assert stage.spare[-1].settings == {"offload_activations": False, "gradient_checkpointing": False}
    assert stage.spare[-1].seconds == of["plain"].stages[0].time.seconds < stage.time.seconds
    assert of["plain"].stages[0].spare == ()
    # What is known to be kept without checkpoints is less than what is.
    assert peaks["plain"] - peaks["checkpointed"] > 3 * 2 * 4096 * 64 * 2

    between = (peaks["plain"] + peaks["checkpointed"]) / 2 / planning.USABLE / 1e9
    smaller = HardwareSettings(gpus=1, memory_gb=between, document_length=4096)
    (stage,) = plan(recipe_of(model, context=4096, **saving), smaller).stages
    assert [change.fits for change in stage.spare] == [True, False]
    # Where three tensors a layer would not fit, nothing more is played.
    tight = HardwareSettings(
        gpus=1, memory_gb=1.01 * peaks["checkpointed"] / planning.USABLE / 1e9, document_length=4096
    )
    (stage,) = plan(recipe_of(model, context=4096, gradient_checkpointing=True), tight).stages
    assert (stage.fits, stage.spare) == (True, ())


class Notes(Silent):
    """A reporter that keeps its notes."""

    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.slow
def test_a_finer_mesh_that_has_room_to_keep_attention_is_planned_too(tmp_path):
    """The results of three layers and 4,096 tokens, of 8 heads of 64, take 12.6 MB and their log-sum-exp more."""
    model = model_folder(tmp_path / "model", num_hidden_layers=3, head_dim=64)
    stage = {"context": 4096, "rows_per_step": 2, "gradient_checkpointing": True, "pattern": "full"}

    def planned(memory_gb=None, parallel="auto", keep="auto", reporter=None):
        recipe = recipe_of(model, parallel=parallel, keep_attention=keep, **stage)
        hardware = HardwareSettings(gpus=2, memory_gb=memory_gb, document_length=4096)
        context = RunContext(reporter=reporter or Notes())
        return plan(recipe, hardware, context).stages[0]

    again, kept = (planned(parallel={"shard": 2}, keep=keep) for keep in (False, True))
    assert kept.memory.peak - again.memory.peak > 7.5e6
    room = (again.memory.peak + 7.5e6) / planning.USABLE / 1e9
    reporter = Notes()
    found = planned(room, reporter=reporter)
    assert (found.mesh, found.attention) == ("2 shard", again.attention)
    assert "computed again in the backward" in again.attention
    assert found.finer.change == "parallel: {sequence: 2}"
    assert found.finer.fits
    there = planned(room, parallel={"sequence": 2})
    assert there.attention == "results of attention are kept on the GPU"
    assert (found.finer.peak, found.finer.seconds) == (there.memory.peak, there.time.seconds)
    # Each dry run is announced before it begins, with the mesh that it is of.
    assert [note.split(":")[0] for note in reporter.notes] == [
        f"dry run {number}" for number in range(1, len(reporter.notes) + 1)
    ]
    assert "stage 1 of 1, mesh 2 shard, rank 0, with gradient_checkpointing" in reporter.notes[0]
    assert any("mesh 2 sequence, rank 0" in note for note in reporter.notes)
    # Where results are kept anyway, or auto chose nothing, no other mesh is tried.
    assert planned().finer is None
    assert planned(room, parallel={"shard": 2}).finer is None


@pytest.mark.slow
def test_more_gpus_are_tried_last(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "MOST_CHANGES", 6)
    monkeypatch.setattr(planning, "TILE", 128)
    # A mesh that the recipe itself asks for does not keep larger ones from being tried.
    recipe = recipe_of(model_folder(tmp_path / "model"), parallel={"sequence": 2})
    (stage,) = plan(recipe, HardwareSettings(gpus=2, memory_gb=1e-6, document_length=512)).stages
    assert [change.change for change in stage.changes] == [
        "stages.0.gradient_checkpointing: true",
        "stages.0.offload_activations: true",
        "stages.0.tiled_mlp: 128",
        "stages.0.offload_optimizer: true",
        "4 GPUs (2 ring x 2 sequence) with the settings above",
        "8 GPUs (4 ring x 2 sequence) with the settings above",
    ]
    assert not any(change.fits for change in stage.changes)
    peaks = [change.peak for change in stage.changes]
    assert peaks == sorted(peaks, reverse=True)
    assert all(change.host > 0 for change in stage.changes[1:])


@pytest.mark.slow
def test_a_host_that_is_too_small_does_not_fit(tmp_path):
    recipe = recipe_of(
        model_folder(tmp_path / "model"), gradient_checkpointing=True, offload_activations=True
    )
    (stage,) = plan(recipe, HardwareSettings(gpus=1, document_length=512)).stages
    assert stage.fits
    assert stage.host == stage.memory.host_bytes > 0
    too_small = HardwareSettings(gpus=1, host_memory_gb=stage.host / 1e9, document_length=512)
    (stage,) = plan(recipe, too_small).stages
    assert not stage.fits
    assert stage.memory.peak <= stage.usable


@pytest.mark.slow
def test_attention_is_run_again_where_only_the_host_is_too_small(tmp_path):
    recipe = recipe_of(
        model_folder(tmp_path / "model"),
        gradient_checkpointing=True,
        offload_activations=True,
        keep_attention=True,
    )
    (stage,) = plan(recipe, HardwareSettings(gpus=1, document_length=512)).stages
    between = (stage.host - stage.memory.host["attention"] / 2) / planning.USABLE / 1e9
    (stage,) = plan(recipe, HardwareSettings(gpus=1, host_memory_gb=between, document_length=512)).stages
    assert not stage.fits
    (change,) = stage.changes
    assert (change.change, change.fits) == ("stages.0.keep_attention: false", True)
    assert change.host == stage.host - stage.memory.host["attention"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_llama_8b_trains_on_rows_of_500k_tokens_on_one_gpu_of_80_gb(tmp_path):
    """With everything that saves memory; the host holds 34 inputs of 4.1 GB: of layers, norm and head."""
    model = model_folder(tmp_path / "model", **LAYERS_OF_8B | {"num_hidden_layers": 32, "vocab_size": 128256})
    recipe = recipe_of(
        model,
        context=500_000,
        pattern="full",
        precision="bfloat16",
        gradient_checkpointing=True,
        offload_activations=True,
        keep_attention=False,
        tiled_mlp=2**14,
        offload_optimizer=True,
    )
    (stage,) = plan(recipe, HardwareSettings(gpus=1, document_length=2**30)).stages
    assert stage.fits
    assert stage.memory.peak < 72e9
    assert stage.memory.host["inputs"] == pytest.approx(34 * 500_000 * 4096 * 2, rel=0.01)


@pytest.mark.slow
def test_this_machine_is_planned_without_a_guess_of_its_speed(tmp_path):
    recipe = recipe_of(model_folder(tmp_path / "model"))
    result = plan_here(recipe)
    if result.device == "cpu":
        assert result.stages[0].time is None
        assert "its speed is not known" in result.assumptions[0]
    two = plan_here(recipe_of(recipe.model, parallel={"sequence": 2}), World(0, 2, 0, 2))
    assert two.stages[0].mesh == "2 sequence"


@pytest.mark.parametrize(("gpus", "mesh"), [(8, (1, 8)), (12, (3, 4)), (7, (7, 1))])
def test_the_finest_mesh_takes_ulysses_within_a_node(gpus, mesh):
    found = planning.finest(recipe_of("embedded"), 0, gpus).stages[0].parallel
    assert (found.ring, found.sequence, found.shard, found.replicate) == (*mesh, 1, 1)


def test_a_mesh_that_does_not_suit_the_gpus_is_refused(tmp_path):
    recipe = recipe_of(model_folder(tmp_path / "model"), parallel={"sequence": 2})
    with pytest.raises(RopewalkError, match="needs 2 ranks, but 8 were started"):
        plan(recipe, HardwareSettings(gpus=8))


def test_what_a_dry_run_cannot_follow_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr("ropewalk.training.preflight.find_spec", lambda name: name)
    adapter = AdapterSettings(quantize="nf4")
    recipe = recipe_of(model_folder(tmp_path / "model"), precision="bfloat16")
    with pytest.raises(EngineError, match=r"cannot quantize weights, and adapter.quantize is nf4"):
        plan(recipe.model_copy(update={"adapter": adapter}), HardwareSettings(gpus=1, document_length=512))


def test_a_recipe_without_training_has_no_stages(tmp_path):
    recipe = recipe_of(model_folder(tmp_path / "model")).model_copy(update={"stages": ()})
    assert plan(recipe, HardwareSettings(gpus=8)).stages == ()


def test_a_printed_plan_says_whether_it_fits_and_what_it_costs():
    planned = planned_run()
    (row,) = planned.overview()
    (stage,) = planned.stages
    assert (row["fits"], row["hours"], row["peak_gb"]) == (True, stage.time.hours, stage.memory.peak / 1e9)
    text = repr(planned)
    assert f"{planned.ranks} x h100" in text
    assert ": fits" in text
    assert "peak_gb" in text
    changes = (Change("more", 2, False), Change("8 GPUs", 1, True))
    full = replace(planned, stages=(replace(stage, fits=False, changes=changes, time=None),))
    assert "does not fit" in repr(full)
    assert "stage 1: with 8 GPUs it fits" in repr(full)
    assert full.overview()[0]["cost"] is None
