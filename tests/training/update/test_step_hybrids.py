"""Four ranks that share rows train models with recurrent layers as one process does."""

import pytest

from ropewalk.models.adapter import NewAdapter
from ropewalk.models.adapter_settings import AdapterSettings
from tests.marks import slow_after
from tests.training.family_cases import rows_with_padding, save_family, two_steps, two_steps_on_ranks

LORA = NewAdapter(AdapterSettings(rank=2, targets=["all-linear"]), 0, "tiny", 0, 0)
CASES = [
    ("lfm2", {"ring": 4}, {"adapter": LORA}),
    ("qwen3_5", {"ring": 2, "sequence": 2}, {}),
    ("granitemoehybrid", {"ring": 2, "shard": 2}, {}),
    ("minimax", {"sequence": 4}, {}),
    ("bamba", {"ring": 4}, {"adapter": LORA}),
]
EXACT = 2.0**-36
"""Relative, of losses and norms, and absolute, of weights near 1: float64's rounding, 2**-53, grows by no more than
2**17 in two steps; whatever one side rounds to float32, or computes otherwise, is off by 2**-24 at least."""
SINGLE = 2.0**-20
"""Relative: float32's rounding, 2**-24, in a sum of a few dozen losses."""


@pytest.mark.parametrize(
    ("family", "shape", "options"), slow_after(1, CASES), ids=[case[0] for case in CASES]
)
def test_two_steps_in_float64_are_those_of_one_process(four_ranks, tmp_path, family, shape, options):
    """Losses, norms, and the weights that FSDP2 shards over the ranks."""
    save_family(tmp_path, family)
    steps, weights = two_steps(tmp_path, rows_with_padding(), **options)
    arguments = (shape, tmp_path, rows_with_padding(), options)
    (found, gathered), *_ = four_ranks.run(two_steps_on_ranks, *arguments)
    for mine, alone in zip(found, steps, strict=True):
        assert mine[:2] == pytest.approx(alone[:2], rel=EXACT)
    assert gathered.keys() == weights.keys()
    worst = max((float((gathered[name] - value).abs().max()), name) for name, value in weights.items())
    assert worst[0] <= EXACT, worst


@pytest.mark.slow
def test_float32_on_ranks_is_as_exact_as_in_one_process(four_ranks, tmp_path):
    """Checkpointed layers. The error against float64 shows how far the model amplifies rounding, at most twice here.

    Weights are not compared: AdamW's first steps have the length of the learning rate in the direction of a gradient,
    however small, so that rounding decides the sign of those that nearly vanish.
    """
    save_family(tmp_path, "qwen3_5")
    exact, _ = two_steps(tmp_path, rows_with_padding())
    alone, _ = two_steps(tmp_path, rows_with_padding(), wide=False)
    options = {"wide": False, "checkpointing": True}
    arguments = ({"ring": 4}, tmp_path, rows_with_padding(), options)
    (found, _), *_ = four_ranks.run(two_steps_on_ranks, *arguments)
    for mine, one, true in zip(found, alone, exact, strict=True):
        for ours, theirs, expected in zip(mine[:2], one[:2], true[:2], strict=True):
            assert abs(ours - expected) <= 2 * abs(theirs - expected) + SINGLE * expected
