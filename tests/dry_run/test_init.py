"""A proposal is made of the model, the documents and the machine, and of a dry run; nothing is written in vain."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ropewalk.dry_run.facts import DocumentFacts, MachineFacts, named_machine
from ropewalk.dry_run.init import Training, choices_of, propose, training_on
from ropewalk.dry_run.run import Change, PlannedRun, PlannedStage
from ropewalk.dry_run.settings import InitSettings
from ropewalk.errors import RopewalkError
from ropewalk.planning import PlanSettings, plan
from ropewalk.planning.sizing.time import GPUS
from ropewalk.training import extend, mesh_choice, preflight
from ropewalk.training.memory_need import Need
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.resolved import ResolvedRecipe
from tests.checkpoint_cases import CONFIGS, path_of
from tests.dry_run.cases import model_folder, planned_run
from tests.dry_run.proposal_cases import LAPTOP, LONG, PLANS, asked, recipe_of, records
from tests.models import every_family


def test_an_adapter_is_proposed_where_the_gpus_are_too_small_for_all_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh_choice, "played_need", lambda resolved, number: Need(10**9, 0))
    stated = json.loads(path_of("llama-2-7b").read_text())
    whole = {**stated, "intermediate_size": 11008, "vocab_size": 32000, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    planned = plan(PlanSettings(model=str(tmp_path), target=2**15))
    monkeypatch.setattr(mesh_choice, "played_need", lambda resolved, number: Need(10**11, 0))
    reason = training_on(MachineFacts(16, 1, 24 * 2**30, 2**36), planned).adapter
    assert reason is not None
    assert "or more" not in reason
    monkeypatch.setattr(mesh_choice, "played_need", lambda resolved, number: Need(10**9, 0))
    documents = DocumentFacts(9, True, 10**8, 10**5)
    recipe = recipe_of(asked(planned), planned, documents, LAPTOP, reason)
    assert f"# An adapter: {reason}" in recipe
    assert parse_recipe(recipe, "x").adapter is not None
    assert training_on(MachineFacts(192, 64, 80 * 2**30, 2**36), planned) == Training()
    assert training_on(LAPTOP, planned) == Training()
    # A config that lacks a size is proposed as it is.
    assert training_on(MachineFacts(16, 1, 24 * 2**30, 2**36), PLANS["llama-2-7b"]) == Training()


def test_all_weights_are_trained_if_a_setting_that_a_plan_would_try_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3 8B at 128K on one GPU of 192 GB, with the peaks that dry runs of it have."""
    published = json.loads((CONFIGS / "planned" / "qwen3-8b.json").read_text())["config"]
    (tmp_path / "config.json").write_text(json.dumps(published))
    planned = plan(PlanSettings(model=str(tmp_path), target=2**17))

    def need(resolved: ResolvedRecipe, number: int) -> Need:
        stage = resolved.stages[number].settings.stage
        assert stage.offload_activations
        kept = resolved.stages[number].keeping
        on_device = kept is not None and kept.on_device
        peak = 158_700_000_000 if stage.tiled_mlp else 178_100_000_000
        return Need(peak + 40 * 10**9 * on_device, 80 * 10**9)

    for module in (mesh_choice, preflight):
        monkeypatch.setattr(module, "played_need", need)
    settings = asked(planned, gpus=1, gpu="mi300x")
    machine = named_machine(settings.hardware)
    found = training_on(machine, planned)
    assert found.adapter is None
    assert found.settings == {
        "gradient_checkpointing": True,
        "offload_activations": True,
        "tiled_mlp": mesh_choice.TILE,
    }
    text = recipe_of(settings, planned, None, machine, None, savings=found.settings)
    (stage,) = parse_recipe(text, "x").stages
    assert {name: getattr(stage, name) for name in found.settings} == found.settings
    # What goes to the CPU's memory has to fit there.
    small = training_on(replace(machine, memory_bytes=80 * 10**9), planned)
    assert small.adapter is not None
    assert "80.0 GB of CPU memory, of which 72.0 GB are usable" in small.adapter


def test_an_adapter_is_proposed_where_the_states_of_a_hybrid_alone_are_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every_family.tiny_config("falcon_h1").save_pretrained(tmp_path)
    planned = plan(PlanSettings(model=str(tmp_path), target=2**17))
    # Parameters, gradients and two moments in float32, whatever its mixers save.
    states = 16 * 53_072
    monkeypatch.setattr(mesh_choice, "played_need", lambda resolved, number: Need(states, 0))
    reason = training_on(MachineFacts(16, 2, states // 2, 2**36), planned).adapter
    assert reason is not None
    assert "even with parallel: {sequence: 2}, a rank needs" in reason
    assert training_on(MachineFacts(16, 2, 2**36, 2**36), planned) == Training()


def test_the_embedded_model_and_documents(tmp_path: Path) -> None:
    settings = InitSettings(
        model="embedded", documents=("embedded:validation",), target=1024, out=tmp_path / "a.yaml"
    )
    found = propose(settings)
    assert settings.out.read_text() == found.text
    assert found.documents.complete
    for sentence in ("base 313,145 from the rule critical-dimension", f"{found.documents.tokens:,} tokens"):
        assert sentence in found.text
    with pytest.raises(RopewalkError, match="already exists"):
        propose(settings)


def test_the_machine_that_trains_can_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mesh_choice, preflight):
        monkeypatch.setattr(module, "played_need", lambda resolved, number: Need(30 * 10**9, 0))
    stated = json.loads(path_of("llama-3.1-8b").read_text())
    whole = {**stated, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    planned = plan(PlanSettings(model=str(tmp_path), target=2**18))
    documents = DocumentFacts(9, True, 10**8, 10**6)
    found = {}
    for gpus, gpu in ((8, "h100"), (1, "4090")):
        settings = asked(planned, gpus=gpus, gpu=gpu, out=Path("r.yaml"))
        machine = named_machine(settings.hardware)
        assert (machine.gpus, machine.gpu_bytes) == (gpus, GPUS[gpu].bytes_per_rank)
        found[gpu] = recipe_of(settings, planned, documents, machine, training_on(machine, planned).adapter)
    assert parse_recipe(found["h100"], "x").adapter is None
    assert "torchrun --nproc-per-node 8 -m ropewalk extend r.yaml" in found["h100"]
    assert "# For 8 GPUs (h100) of 80 GB." in found["h100"]
    assert parse_recipe(found["4090"], "x").adapter is not None
    assert "does not fit on 1 GPU (4090)" in found["4090"]
    assert "ropewalk plan r.yaml --gpus 1 --gpu 4090, then ropewalk extend r.yaml" in found["4090"]
    # Nothing is said of the one that the recipe is written on.
    assert "This machine" not in found["h100"]


def test_nothing_is_written_for_what_cannot_be_extended(tmp_path: Path) -> None:
    out = tmp_path / "a.yaml"
    (tmp_path / "short.txt").write_text("too short")
    good = InitSettings(model="embedded", documents=("embedded",), target=1024, out=out)
    for changes, words in (
        ({"documents": (str(tmp_path / "short.txt"),)}, "too few for a row of 1,024"),
        ({"documents": (str(tmp_path / "nowhere"),)}, "no file or folder"),
        ({"target": 128}, "must be above the trained length"),
        ({"rule": "magic"}, "magic"),
        ({"text_field": "text", "model": str(tmp_path)}, "config.json"),
    ):
        with pytest.raises(RopewalkError, match=words):
            propose(good.model_copy(update=changes))
        assert not out.exists()


@pytest.mark.slow
def test_a_proposed_recipe_trains_from_start_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe as it is written, but for the slowest part of its evaluation."""
    monkeypatch.chdir(tmp_path)
    source = records(
        tmp_path / "a.jsonl", *({"content": f"# {number}\n{LONG[:2000]}"} for number in range(10))
    )
    found = propose(InitSettings(model="embedded", documents=(source,), target=512, out=Path("recipe.yaml")))
    recipe = parse_recipe(found.text, "recipe.yaml")
    recipe = recipe.model_copy(
        update={"evaluation": recipe.evaluation.model_copy(update={"suites": ["perplexity"]})}
    )
    result = extend(recipe)
    assert [each.context for each in recipe.stages] == [512]
    assert (result.model / "model.safetensors").is_file()
    assert json.loads((result.model / "config.json").read_text())["max_position_embeddings"] == 512


@pytest.mark.slow
def test_a_config_alone_gives_a_recipe_that_says_what_is_missing(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", num_hidden_layers=3)
    out = tmp_path / "recipe.yaml"
    found = propose(InitSettings(model=str(model), target=8192, gpus=2, gpu="h100", out=out))
    assert found.documents is None
    assert [each.split()[0] for each in found.missing] == ["weights", "a", "documents:"]
    recipe = parse_recipe(out.read_text(), str(out))
    assert [source.path for source in recipe.data.sources] == ["documents"]
    assert out.read_text().count("# Missing: ") == 3
    # So small a model needs no checkpoints, which stand in a recipe that nothing was tried for.
    assert [stage.gradient_checkpointing for stage in recipe.stages] == [False] * len(recipe.stages)
    assert len(found.stages) == len(recipe.stages)
    assert "A dry run on 2 GPUs with the mesh 2 s" in found.stages[0]
    assert all(f"# {words}." in found.text for words in found.stages)
    guessed = propose(
        InitSettings(model=str(model), target=8192, gpus=2, out=tmp_path / "other.yaml", dry_run=False)
    )
    assert guessed.stages == ()
    assert parse_recipe(guessed.text, "x").stages[-1].gradient_checkpointing


def planned_with(stage: PlannedStage) -> PlannedRun:
    return PlannedRun("m", 1, "h100", 80 * 10**9, (stage,), ())


def test_what_fits_with_least_cost_of_time_is_chosen() -> None:
    fitting, other = planned_run().stages[0], planned_run(fits=False).stages[0]
    off = Change("a", 10**9, True, settings={"offload_activations": False})
    too_much = Change(
        "b", 10**11, False, settings={"offload_activations": False, "gradient_checkpointing": False}
    )
    on = Change("c", 10**11, False, settings={"gradient_checkpointing": True})
    both = Change("d", 10**9, True, settings={"gradient_checkpointing": True, "tiled_mlp": 16384})
    gpus = Change("16 GPUs", 10**9, True)
    for stage, settings, fits in (
        (fitting, {}, True),
        (replace(fitting, spare=(off, too_much)), off.settings, True),
        (replace(fitting, spare=(off, replace(too_much, fits=True))), too_much.settings, True),
        (replace(other, changes=(on, both)), both.settings, True),
        # More GPUs are not the recipe's to choose.
        (replace(other, changes=(on, gpus)), {}, False),
    ):
        (choice,) = choices_of(planned_with(stage))
        assert (choice.settings, choice.fits) == (settings, fits)
        assert ("only 72 GB; 16 GPUs would do" in choice.words) == (not fits)


def test_the_time_of_a_proposal_is_that_of_the_settings_that_it_has() -> None:
    """A hundred steps: of 10 seconds as they are, and of 6 or 12 with a change."""
    fitting, other = planned_run().stages[0], planned_run(fits=False).stages[0]
    quicker = Change("a", 10**9, True, settings={"offload_activations": False}, seconds=6.0)
    slower = Change("b", 10**9, True, settings={"gradient_checkpointing": True}, seconds=12.0)
    for stage, time in (
        (fitting, "17 minutes"),
        (replace(fitting, spare=(quicker,)), "10 minutes"),
        (replace(other, changes=(slower,)), "20 minutes"),
    ):
        (choice,) = choices_of(planned_with(stage))
        assert f", about {time} of training" in choice.words
