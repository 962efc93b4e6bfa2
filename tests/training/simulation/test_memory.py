"""Memory by part and moment from a list of allocations, and from a dry step."""

import pytest
import torch
import yaml

from ropewalk.training.simulation.memory import MOMENTS, PARTS, memory_of
from ropewalk.training.simulation.recording import Allocation, Event, Recording
from ropewalk.training.simulation.step import DryStep
from tests.dry_run.cases import model_folder, played, recipe_of
from tests.training.simulation.real_cases import real_states


def allocation(size, phase, shape=(1,), host=False, sharding=""):
    return Allocation(size, host, phase, "aten.empty", shape, torch.float32, "file.py:1 f", sharding)


def test_replay_finds_the_peak_its_moment_and_its_parts():
    weight, kept, passing = (allocation(10**9, "model"), allocation(5, "forward"), allocation(7, "forward"))
    gathered, reduced = (
        allocation(20, "forward", sharding="all_gather"),
        allocation(40, "backward", sharding="reduce"),
    )
    copied = allocation(1000, "forward", host=True)
    events = [
        Event(weight, 10**9, "model"),
        Event(weight, 0, "start"),
        Event(gathered, 20, "forward"),
        Event(kept, 5, "forward"),
        Event(copied, 1000, "forward"),
        Event(passing, 7, "forward"),
        Event(passing, -7, "forward"),
        Event(gathered, -20, "forward"),
        Event(reduced, 40, "backward"),
        Event(kept, -5, "backward"),
        Event(reduced, -40, "backward"),
        Event(copied, -1000, "backward"),
    ]
    found = memory_of(DryStep(0, Recording(events), {weight: "parameters"}, {}, 1, 100, 10))
    assert (found.peak, found.moment, found.host) == (10**9 + 45, "backward", {"other": 1000})
    assert {part: size for part, size in found.parts.items() if size} == {
        "parameters": 10**9,
        "activations": 5,
        "reduction": 40,
    }
    assert found.moments["forward"]["total"] == 10**9 + 32
    assert found.moments["forward"]["working"] == 7
    assert [each.bytes for each in found.largest] == [10**9, 40, 5]
    assert max(sum(each.values()) for each in found.course) == found.peak


def test_states_of_a_step_are_its_parameters(aside, tmp_path):
    recipe = recipe_of(model_folder(tmp_path / "model"), parallel={"shard": 4}, rows_per_step=4)
    found = memory_of(aside(played, recipe, 4))
    head, layers = 2 * 512 * 64, 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    norms = 5 * 64
    elements = (head + layers + norms) // 4
    update = found.moments["update"]
    assert set(found.moments) == set(MOMENTS)
    assert list(found.parts) == list(PARTS)
    # float32 parameters with the frequencies of RoPE, their gradients and two moments.
    assert elements * 4 <= update["parameters"] <= elements * 4 + 1000
    assert update["gradients"] == elements * 4
    assert update["moments"] == elements * 8
    assert update["gathered"] == update["activations"] == 0


@pytest.mark.slow
def test_checkpointing_keeps_less_and_offload_keeps_it_on_the_host(aside, tmp_path):
    model = model_folder(tmp_path / "model")
    plain, checkpointed, offloaded = (
        memory_of(aside(played, recipe_of(model, parallel={"sequence": 2}, **changes), 2))
        for changes in (
            {},
            {"gradient_checkpointing": True},
            {"gradient_checkpointing": True, "offload_activations": True},
        )
    )
    kept = [each.moments["forward"]["activations"] for each in (plain, checkpointed, offloaded)]
    assert kept[0] > 3 * kept[1] > 3 * kept[2]
    assert plain.host.keys() == checkpointed.host.keys() == {"checkpoint"}
    # Of each of the two layers its input: 256 tokens of 64 bfloat16.
    assert offloaded.host["inputs"] >= 2 * 256 * 64 * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_offloaded_optimizer_leaves_the_compute_dtype_on_the_gpu_and_12_bytes_on_the_host(
    aside, tmp_path, ranks
):
    recipe = recipe_of(
        model_folder(tmp_path / "model"),
        parallel={"sequence": ranks},
        precision="bfloat16",
        offload_optimizer=True,
    )
    found = memory_of(aside(played, recipe, ranks))
    matrices = 2 * 512 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    elements = (matrices + 5 * 64) // ranks
    update = found.moments["update"]
    # A single process computes with whole parameters, and with the buffer of RoPE's frequencies.
    assert update["parameters"] == pytest.approx(2 * elements if ranks == 1 else 0, abs=1000)
    assert update["gradients"] == update["moments"] == 0
    assert found.host["moments"] == 8 * elements
    # The state is in CPU memory once, and checkpoints are written from there.
    assert "checkpoint" not in found.host
    # Pinned shards are rounded up to powers of two, of which the widths of the MLP are none.
    for part in ("parameters", "gradients"):
        assert 4 * elements <= found.host[part] < (8 if ranks > 1 else 4.01) * elements
        assert (found.host[part] > 4 * elements) == (ranks > 1)


@pytest.mark.slow
def test_a_gradient_at_a_time_is_on_the_gpu_if_the_optimizer_is_on_the_host(aside, tmp_path):
    """Kept to the end of the backward, gradients in bfloat16 would be 2 bytes a parameter."""
    model = model_folder(tmp_path / "model", num_hidden_layers=12, max_position_embeddings=8)
    here, away = (
        memory_of(
            aside(played, recipe_of(model, precision="bfloat16", context=16, offload_optimizer=offload))
        ).moments["backward"]["total"]
        for offload in (False, True)
    )
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160
    # 12 bytes of master and moments, and all but two layers' gradients.
    assert here - away > 12 * 12 * layer + 2 * 10 * layer


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_parameters_and_moments_are_those_that_a_real_step_leaves(aside, tmp_path, precision):
    recipe = recipe_of(model_folder(tmp_path / "model"), precision=precision)
    text = yaml.safe_dump(recipe.model_dump(mode="json", exclude_defaults=True))
    forward = memory_of(aside(played, recipe, 1, "cpu", 0, 100)).moments["forward"]
    assert (forward["parameters"], forward["moments"]) == real_states(text)


def test_a_bfloat16_run_of_one_gpu_takes_18_bytes_a_parameter_in_the_update(aside, tmp_path):
    """Without the temporaries of an AdamW in several kernels, 4 bytes a parameter, which a GPU was measured with."""
    recipe = recipe_of(model_folder(tmp_path / "model"), precision="bfloat16")
    step = aside(played, recipe)
    update = memory_of(step).moments["update"]
    matrices = 2 * 512 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160)
    elements = matrices + 5 * 64
    # The bfloat16 parameters and their float32 masters, besides the frequencies of RoPE.
    assert 6 * elements <= update["parameters"] <= 6 * elements + 1000
    assert update["gradients"] == 4 * elements
    assert update["moments"] == 8 * elements
    # While gradients are widened, the largest is still there in bfloat16; AdamW is one kernel without temporaries.
    assert update["working"] <= 2 * 512 * 64 + 20_000
