"""Two ranks train windows, chunks, sinks, latent attention and experts as one process does, in float64."""

import json

import pytest

from ropewalk.models.compute.routing import MOST_RECORDED_SINCE
from ropewalk.versions import older_transformers
from tests.marks import compiles, slow_after
from tests.training.family_cases import (
    BALANCING,
    rows_with_anchor,
    rows_with_padding,
    save_family,
    two_steps,
    two_steps_on_ranks,
    two_steps_wrongly,
)

FAMILIES = ("gpt_oss", "deepseek_v3", "llama4", "gemma4 with shared keys", "gemma4 with experts")
MESHES = [{"shard": 2}, {"sequence": 2}, {"ring": 2}]
LOSS = 1e-13
"""Relative: sums of 61 tokens' terms in other orders, 2**-52 each, through a few layers."""
WEIGHT = 1e-12
"""Absolute: such an error of gradients whose norm is clipped to 1, times the learning rate over AdamW's epsilon, 10."""


EXPERTS = {"balancing": BALANCING}
UNRECORDED = ("deepseek_v3", "llama4")
"""Families whose routers older versions of transformers do not record: trained without the loss there."""


@pytest.fixture(scope="module", params=slow_after(2, FAMILIES))
def alone(request, tmp_path_factory):
    """A family's checkpoint, how it is trained, and what one process makes of it."""
    folder = tmp_path_factory.mktemp(request.param)
    save_family(folder, request.param)
    dense = request.param == "gemma4 with shared keys"
    unrecorded = request.param in UNRECORDED and older_transformers(MOST_RECORDED_SINCE) is not None
    options = {} if dense or unrecorded else EXPERTS
    return folder, options, two_steps(folder, rows_with_padding(), **options)


def assert_same(found, expected, loss=LOSS, norm=10 * LOSS):
    for (loss_n, norm_n, routing_n), (loss_1, norm_1, routing_1) in zip(found, expected, strict=True):
        assert loss_n == pytest.approx(loss_1, rel=loss)
        assert norm_n == pytest.approx(norm_1, rel=norm)
        assert (routing_n is None) == (routing_1 is None)
        if routing_1 is not None:
            assert routing_n.counts == routing_1.counts
            assert routing_n.aux_loss == pytest.approx(routing_1.aux_loss, rel=loss)


@pytest.mark.parametrize("shape", slow_after(1, MESHES), ids=str)
def test_two_steps_on_two_ranks_are_those_of_one_process(two_ranks, alone, shape):
    folder, options, (steps, weights) = alone
    (found, gathered), _ = two_ranks.run(two_steps_on_ranks, shape, folder, rows_with_padding(), options)
    assert_same(found, steps)
    assert gathered.keys() == weights.keys()
    worst = max((float((gathered[name] - value).abs().max()), name) for name, value in weights.items())
    assert worst[0] <= WEIGHT, worst


COMPILED = {"wide": False, "backend": "aot_eager", "checkpointing": True}
SINGLE = 2.0**-17
"""Relative: float32's rounding, 2**-24, through a few layers and two steps, in sums in other orders."""


# What is compiled is inside a layer, and the mesh around it.
@compiles
@pytest.mark.slow
@pytest.mark.parametrize(("family", "shape"), [("gpt_oss", {"sequence": 2})], ids=str)
def test_ranks_with_compiled_pieces_train_as_one_process_without(two_ranks, tmp_path, family, shape):
    """FSDP2 gathers the parameters of compiled pieces, and checkpointing runs them again."""
    save_family(tmp_path, family)
    balancing = BALANCING if family == "gpt_oss" else 0.0
    steps, _ = two_steps(tmp_path, rows_with_padding(), wide=False, balancing=balancing)
    options = {**COMPILED, "balancing": balancing}
    (found, _), _ = two_ranks.run(two_steps_on_ranks, shape, tmp_path, rows_with_padding(), options)
    assert_same(found, steps, SINGLE, SINGLE)


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    save_family(folder, "gpt_oss")
    return folder, two_steps(folder, rows_with_padding(), **EXPERTS)[0]


@pytest.mark.parametrize("shape", slow_after(1, [{"sequence": 2}, {"ring": 2}]), ids=str)
@pytest.mark.parametrize("fault", ["each rank's own shares", "padding counts"])
def test_a_fault_in_what_is_balanced_shows(two_ranks, experts, shape, fault):
    folder, steps = experts
    (found, _), _ = two_ranks.run(two_steps_wrongly, fault, shape, folder, rows_with_padding(), EXPERTS)
    with pytest.raises(AssertionError):
        assert_same(found, steps)
    # By far more than rounding, in the gradient too.
    assert abs(found[0][1] - steps[0][1]) > 1e6 * LOSS * steps[0][1]


def test_rows_are_balanced_alike_in_any_micro_batch(experts):
    """Two rows of one forward pass have shares of their own."""
    from tests.training import family_cases

    folder, steps = experts
    with pytest.MonkeyPatch.context() as patch:
        sound = family_cases.micro_batches
        patch.setattr(family_cases, "micro_batches", lambda rows, size, mesh: sound(rows, 2, mesh))
        assert_same(two_steps(folder, rows_with_padding(), **EXPERTS)[0], steps)


@pytest.mark.parametrize("shape", slow_after(1, MESHES), ids=str)
def test_balancing_layers_that_are_computed_again_on_ranks(two_ranks, experts, shape):
    """Sharded layers are gathered when the backward comes to them, and their routers' sums are part of it."""
    folder, steps = experts
    options = {**EXPERTS, "wide": False, "checkpointing": True}
    (found, _), _ = two_ranks.run(two_steps_on_ranks, shape, folder, rows_with_padding(), options)
    # Float32 against float64: sums of some hundred terms, 2**-24 each, through three layers.
    assert_same(found[:1], steps[:1], loss=1e-5, norm=1e-4)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("gpt_oss", "sliding_window"),
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
    for (loss, *_), (loss_there, *_) in zip(sound, other, strict=True):
        assert abs(loss - loss_there) > 1e9 * LOSS * loss


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, {"sequence": 2}, {"ring": 2}], ids=str)
def test_layers_that_share_keys_are_computed_again(two_ranks, tmp_path, shape):
    """A recomputed layer reads the keys of an earlier one, which is recomputed after it.

    Parameters are sharded over the ranks of a sequence and a ring too.
    """
    save_family(tmp_path, "gemma4 with shared keys")
    rows = rows_with_padding()
    kept, _ = two_steps(tmp_path, rows, wide=False)
    options = {"wide": False, "checkpointing": True}
    if shape is None:
        found, _ = two_steps(tmp_path, rows, **options)
    else:
        (found, _), _ = two_ranks.run(two_steps_on_ranks, shape, tmp_path, rows, options)
    # Float32: sums of some hundred terms, 2**-24 each, through four layers.
    assert_same(found[:1], kept[:1], loss=1e-5, norm=1e-4)
