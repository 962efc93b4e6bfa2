"""Engine flex in a dry run: its memory as a GPU measured it, its operations by the mask, and models that need it."""

import pytest

from ropewalk.attention.layout import PackedLayout
from ropewalk.attention.options import AttentionOptions
from ropewalk.training.simulation.memory import memory_of
from ropewalk.training.simulation.recording import RECOMPUTATION
from tests.dry_run.cases import model_folder, played, recipe_of, resolved_for
from tests.training.simulation.flex_cases import SEEN, flex_memory, flex_operations, model_of


@pytest.mark.parametrize(
    ("length", "measured"),
    [(8192, 0.15930414199829102), (32768, 0.6379437446594238), (131072, 2.5634922981262207)],
)
def test_memory_is_what_an_h200_measured(aside, length, measured):
    """GiB besides the inputs; 32 query and 8 key/value heads of 128, bfloat16, torch 2.11. All patterns are alike."""
    for lengths in ([length], [length // 4, length - length // 4]):
        assert aside(flex_memory, lengths) / 2**30 == pytest.approx(measured, rel=1e-4)


LAYOUTS = [
    PackedLayout.from_lengths([300, 1, 120], "anchor", 3),
    PackedLayout.from_segments([100, 50, 200, 71], [1, 0, 1, 2], "anchor", 3),
]


@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(),
        AttentionOptions(softcap=30.0),
        AttentionOptions(window=40),
        AttentionOptions(chunk=64),
    ],
    ids=["plain", "soft cap", "window", "chunk"],
)
def test_operations_are_those_of_the_mask(aside, options):
    pairs = sum(int(layout.dense_mask(options.locality).sum()) for layout in LAYOUTS)
    flops = aside(flex_operations, LAYOUTS, options)
    assert flops["attention", "start"] == pairs * 4 * 2 * (16 + 24)
    # Two products of the values' width, and three of the keys' width, of which one repeats the scores.
    assert flops["attention", RECOMPUTATION] == pairs * 4 * 2 * 16
    assert flops["attention", "backward"] == pairs * 4 * 2 * (2 * 16 + 2 * 24)


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEN)
def test_models_that_flash_attention_cannot_run(aside, tmp_path, name):
    """On one GPU, on two with their own rows, and on two that share heads."""
    model = model_of(tmp_path / "model", name)
    heads, width, value_width, windows = SEEN[name]
    layout = PackedLayout.from_lengths([100] * 5 + [11], "anchor", 1)
    pairs = sum(int(layout.dense_mask(AttentionOptions(window=each).locality).sum()) for each in windows)
    for mesh, ranks in ((None, 1), ({"shard": 2}, 2), ({"sequence": 2}, 2)):
        recipe = recipe_of(model, parallel=mesh, pattern="anchor", precision="bfloat16", rows_per_step=2)
        recipe = recipe.model_copy(update={"engine": "flex"})
        assert resolved_for(recipe, ranks).stages[0].engine == "flex"
        step = aside(played, recipe, ranks, document_length=100)
        rows, own = (1, heads) if mesh == {"shard": 2} else (2, heads // ranks)
        expected = rows * own * pairs * 2 * (width + value_width)
        assert step.recording.flops["attention", "forward"] == expected
        assert memory_of(step).parts["activations"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["full", "intra_document"])
def test_a_model_of_both_engines_takes_as_many_operations_and_about_the_memory(aside, tmp_path, pattern):
    """The peak lies in the loss. By then flex has its tables of 32 x 32 blocks and the documents of the tokens, and
    varlen the offsets of its runs."""
    model = model_folder(tmp_path / "model", head_dim=16)
    found = {}
    for engine in ("varlen", "flex"):
        recipe = recipe_of(model, context=4096, pattern=pattern, precision="bfloat16")
        recipe = recipe.model_copy(update={"engine": engine})
        found[engine] = aside(played, recipe, 1, "cuda", document_length=700)
    varlen, flex = found["varlen"], found["flex"]
    assert varlen.recording.flops == flex.recording.flops
    tables = 4 * 32 * 32 * 4 + 4 * 32 * 4 + 4096 * 8
    difference = memory_of(flex).peak - memory_of(varlen).peak
    assert difference == pytest.approx(tables, abs=512)
