"""Two ranks train windows, chunks, sinks, latent attention and experts as one process does, in float64."""

import json

import pytest

from tests.marks import slow_after
from tests.training.family_cases import rows_with_anchor, save_family, two_steps, two_steps_on_ranks

FAMILIES = ("gpt_oss", "deepseek_v3", "gemma3", "llama4")
MESHES = [{"shard": 2}, {"sequence": 2}, {"ring": 2}]
LOSS = 1e-13
"""Relative: sums of 61 tokens' terms in other orders, 2**-52 each, through a few layers."""
WEIGHT = 1e-12
"""Absolute: such an error of gradients whose norm is clipped to 1, times the learning rate over AdamW's epsilon, 10."""


@pytest.fixture(scope="module", params=slow_after(2, FAMILIES))
def alone(request, tmp_path_factory):
    """A family's checkpoint, and what one process makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    save_family(folder, request.param)
    return folder, two_steps(folder, rows_with_anchor())


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_two_steps_on_two_ranks_are_those_of_one_process(two_ranks, alone, shape):
    folder, (steps, weights) = alone
    (found, gathered), _ = two_ranks.run(two_steps_on_ranks, shape, folder, rows_with_anchor())
    for (loss_n, norm_n), (loss_1, norm_1) in zip(found, steps, strict=True):
        assert loss_n == pytest.approx(loss_1, rel=LOSS)
        assert norm_n == pytest.approx(norm_1, rel=10 * LOSS)
    assert gathered.keys() == weights.keys()
    worst = max((float((gathered[name] - value).abs().max()), name) for name, value in weights.items())
    assert worst[0] <= WEIGHT, worst


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gpt_oss", "sliding_window"),
        pytest.param("gemma3", "sliding_window", marks=pytest.mark.slow),
        pytest.param("llama4", "attention_chunk_size", marks=pytest.mark.slow),
    ],
)
def test_a_window_of_one_token_more_trains_otherwise(two_ranks, tmp_path, family, key):
    """The ranks' windows are those of the config, and matter by much more than what the test above allows."""
    save_family(tmp_path, family)
    rows = rows_with_anchor()
    (sound, _), _ = two_ranks.run(two_steps_on_ranks, {"ring": 2}, tmp_path, rows)
    config = json.loads((tmp_path / "config.json").read_text())
    config[key] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    (other, _), _ = two_ranks.run(two_steps_on_ranks, {"ring": 2}, tmp_path, rows)
    for (loss, _), (loss_there, _) in zip(sound, other, strict=True):
        assert abs(loss - loss_there) > 1e9 * LOSS * loss
