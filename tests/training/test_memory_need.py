"""What a step needs: never less than its bound, played once, and read from the cache until something changes."""

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ropewalk.attention.engines.capabilities import LEAST_CAPABILITY
from ropewalk.attention.kept import Keeping
from ropewalk.models.config.parameters import count_parameters
from ropewalk.models.config.read import read_config
from ropewalk.planning.sizing.time import H100, Transfers
from ropewalk.training.memory_need import _ELSEWHERE, Bounds, Need, bounds, most_kept, played_need
from ropewalk.training.recipe.recipe import Stage
from ropewalk.training.simulation.rank_costs import RankCosts, play, played_by
from tests.dry_run.cases import model_folder, recipe_of, resolved_for

COSTS = RankCosts(
    0,
    SimpleNamespace(peak=10**9, host_bytes=7),
    Counter(),
    Transfers((1, 2), (3, 4), (5, 6), (7, 8), 9),
    (),
    (),
)
NEED = Need(10**9, 7, 0.0, COSTS.transfers)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ropewalk" / "dry-runs"


def counting(costs=COSTS):
    times = []

    def player(*arguments):
        times.append(arguments)
        return costs

    return times, played_by(player)


def test_a_dry_run_is_played_once(tmp_path, cache):
    recipe = recipe_of(model_folder(tmp_path / "model"))
    times, here = counting()
    with here:
        resolved = resolved_for(recipe)
        assert played_need(resolved, 0) == played_need(resolved, 0) == NEED
        assert len(times) == 1
        # A GPU that is not stated is played as the least.
        played_need(replace(resolved, capability=LEAST_CAPABILITY), 0)
        assert len(times) == 1
        # Another folder with the same model, and settings that change no tensor's size.
        played_need(resolved_for(recipe_of(model_folder(tmp_path / "same"))), 0)
        played_need(resolved_for(recipe_of(recipe.model, "other", learning_rate=1e-4, steps=20, seed=1)), 0)
        assert len(times) == 1
        other = resolved_for(recipe_of(recipe.model, rows_per_batch=2, rows_per_step=2))
        assert played_need(other, 0) == NEED
        assert len(times) == 2
        # The same folder with another model.
        model_folder(tmp_path / "model", intermediate_size=96)
        played_need(resolved, 0)
        assert len(times) == len(list(cache.iterdir())) == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"context": 1024},
        {"pattern": "full"},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "offload_activations": True},
        {"offload_optimizer": True},
        {"tiled_mlp": 64},
        {"compile": False},
        {"precision": "bfloat16"},
        {"engine": "sdpa"},
        {"rope": {"method": "yarn"}},
        {"optimizer": {"weight_decay": 0.0}},
    ],
    ids=str,
)
def test_what_a_step_depends_on_is_played_again(tmp_path, cache, changes):
    model = model_folder(tmp_path / "model")
    times, here = counting()
    with here:
        for recipe in (recipe_of(model), recipe_of(model, **changes)):
            played_need(resolved_for(recipe), 0)
    assert len(times) == len(list(cache.iterdir())) == 2


def test_what_is_no_entry_of_the_key_is_a_setting_of_a_stage():
    assert set(_ELSEWHERE) <= Stage.model_fields.keys()


@pytest.mark.parametrize("damaged", ["", "{", json.dumps({"device": 1})])
def test_a_damaged_entry_is_played_again(tmp_path, cache, damaged):
    resolved = resolved_for(recipe_of(model_folder(tmp_path / "model")))
    times, here = counting()
    with here:
        played_need(resolved, 0)
        (entry,) = cache.iterdir()
        entry.write_text(damaged)
        assert played_need(resolved, 0) == played_need(resolved, 0) == NEED
    assert len(times) == 2


def test_a_cache_that_cannot_be_written_costs_time_alone(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    times, here = counting()
    with here:
        resolved = resolved_for(recipe_of(model_folder(tmp_path / "model")))
        assert played_need(resolved, 0) == played_need(resolved, 0) == NEED
    assert len(times) == 2


def test_a_bound_decides_what_is_far_from_the_limit():
    known = Bounds(9 * 10**8, 9 * 10**10, 0)
    assert known.decides(10**9 - 1) is False
    assert known.decides(10**9) is None
    assert known.decides(10**11) is True
    assert replace(known, most=None).decides(10**12) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "offload_activations": True, "offload_optimizer": True},
    ],
    ids=str,
)
@pytest.mark.usefixtures("cache")
def test_no_step_takes_less_than_its_bound(aside, tmp_path, changes):
    recipe = recipe_of(
        model_folder(tmp_path / "model"),
        context=4096,
        parallel={"shard": 2},
        **{"rows_per_step": 2, **changes},
    )
    resolved = resolved_for(recipe, 2)
    here = resolved.stages[0]
    config = read_config(recipe.model)
    known = bounds(
        config, count_parameters(config), here.settings.stage, here.mesh, here.precision, None, True
    )
    with played_by(lambda *arguments: aside(play, *arguments)):
        need = played_need(resolved, 0)
    assert known.least < need.device < known.most
    assert known.host <= need.host
    # With everything that is counted on the host, a device may need next to nothing.
    assert known.least + known.host > 0
    assert need.seconds(here.mesh, H100) > need.compute > 0


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [None, {"sequence": 2}, {"ring": 2}], ids=str)
@pytest.mark.usefixtures("cache")
def test_kept_attention_adds_no_more_than_its_bound(aside, tmp_path, parallel):
    model = model_folder(tmp_path / "model", hidden_size=512, num_hidden_layers=6)
    # An odd number of tokens is cut into parts with padding.
    recipe = recipe_of(
        model, context=4097, parallel=parallel, gradient_checkpointing=True, keep_attention="auto"
    )
    resolved = resolved_for(recipe, 1 if parallel is None else 2)
    here, config = resolved.stages[0], read_config(recipe.model)
    with played_by(lambda *arguments: aside(play, *arguments)):
        plain, kept = (
            played_need(resolved.keeps([keeping]), 0).device for keeping in (None, Keeping(0, on_device=True))
        )
    most = most_kept(config, here.settings.stage, here.mesh, here.precision)
    # One or two layers have their own results in either case, while their backward runs.
    assert most / 2 < kept - plain <= most
