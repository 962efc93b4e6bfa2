"""Rows of hybrid models on four ranks: logits and gradients are those of whole rows, for every recurrence and cut."""

import inspect

import pytest
import torch

from ropewalk import PackedLayout
from ropewalk.errors import EngineError
from ropewalk.models.attention import kernels, passed_states
from ropewalk.models.attention.kernels import FUNCTIONS
from ropewalk.models.config.layers import SHORT_CONVOLUTION
from ropewalk.parallel import SequenceGroups, ShardedLayouts
from tests.marks import slow_after
from tests.models.attention import standin_kernels
from tests.models.attention.passed_cases import (
    CUTS,
    differences,
    halo_of_one_fragment,
    late_limit,
    no_halo,
    no_state,
    rounding_errors,
    sent_bytes,
    with_kernels,
)
from tests.models.attention.test_kernels import mixer_of, recurrence_of
from tests.models.attention.test_recurrent import attached
from tests.models.families import HYBRIDS, tiny_model

ROUNDING = 1e-11
"""Of the largest value: sums of at most a few hundred terms, in another order, through four layers in float64."""
ROUNDED = 64 * 2.0**-23
"""Of the largest value, in float32: sums of a few dozen terms."""
KINDS = ["qwen3_next", "nemotron_h", "minimax", "lfm2"]
"""One family for each recurrence but Kimi's, whose rule takes transformers' code for a CPU long."""


def assert_equal(found):
    assert max(max(errors) for errors in found[0].values()) <= ROUNDING, found[0]
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("family", KINDS)
def test_rows_on_ranks_equal_whole_rows(four_ranks, family):
    assert_equal(four_ranks.run(differences, [family], list(CUTS)))


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(HYBRIDS) - set(KINDS)))
def test_rows_of_every_family_on_ranks_equal_whole_rows(four_ranks, family):
    cuts = ["zigzag", "cost", "sequence", "ring x sequence", "short"]
    # Kimi's rule takes long, and another test has the first cut.
    cuts = cuts[3:] if family in ("bailing_hybrid", "kimi_linear") else cuts
    assert_equal(four_ranks.run(differences, [family], cuts))


def test_the_rule_of_kimi_passes_its_state(four_ranks):
    assert_equal(four_ranks.run(differences, ["kimi_linear"], ["zigzag"]))


def test_checkpointed_layers_exchange_again(four_ranks):
    assert_equal(four_ranks.run(differences, KINDS, ["zigzag"], None, True))


@pytest.mark.parametrize("trained", ["A_log", "lm_head"])
def test_gradients_of_some_parameters_alone(four_ranks, trained):
    """A rank that passes nothing on takes part in the backward if, and only if, the others do."""
    cuts = ["uneven", "short sequence"]
    assert_equal(four_ranks.run(differences, ["qwen3_next"], cuts, None, False, trained))


@pytest.mark.parametrize(
    ("family", "cut", "broken"),
    [
        ("lfm2", "zigzag", no_halo),
        ("qwen3_next", "short", halo_of_one_fragment),
        ("qwen3_next", "zigzag", no_state),
        ("nemotron_h", "zigzag", no_state),
        ("minimax", "zigzag", no_state),
    ],
)
def test_what_is_not_passed_on_is_noticed(four_ranks, family, cut, broken):
    ((logits, gradients),) = four_ranks.run(differences, [family], [cut], broken)[0].values()
    assert min(logits, gradients) > 0.01


def test_padding_that_changes_a_state_is_noticed(four_ranks):
    """The lower limit of Nemotron-H's step sizes, 0.001, moves a state a little with each token of padding."""
    ((logits, gradients),) = four_ranks.run(differences, ["nemotron_h"], ["cost"], late_limit)[0].values()
    assert min(logits, gradients) > 1e4 * ROUNDING


@pytest.mark.parametrize("family", slow_after(3, ["qwen3_next", "nemotron_h", "lfm2", "kimi_linear"]))
def test_kernels_take_states_in_place_of_boundaries(four_ranks, family):
    """Stand-ins in training. Delta rules take runs one after another, scans a padded batch; halos part convolutions."""
    for found, given in four_ranks.run(with_kernels, family, ["zigzag"]):
        assert_equal([found])
        assert "mamba_split_conv1d_scan_combined" not in given
        assert not any("seq_idx" in arguments for arguments in given.values())
        assert given
        for name, arguments in given.items():
            if name.startswith("chunk"):
                assert {"cu_seqlens", "initial_state", "output_final_state"} <= arguments
            if name.startswith("mamba"):
                assert {"initial_states", "return_final_states"} <= arguments


@pytest.mark.parametrize("family", slow_after(1, ["qwen3_5", "bamba", "minimax", "lfm2"]))
def test_states_are_passed_as_exactly_as_whole_rows_are_computed(four_ranks, family):
    """In bfloat16, with the budget of every attention engine: at most twice the error of the plain computation."""
    for mine, whole in four_ranks.run(rounding_errors, family):
        assert 0 < mine <= 2 * whole


@pytest.mark.parametrize("family", KINDS)
def test_the_bytes_that_ranks_send_follow_from_layouts(four_ranks, family):
    ranks = four_ranks.run(sent_bytes, family, list(CUTS))
    for cut in zip(*ranks, strict=True):
        for forward, backward in cut:
            assert forward[0] == forward[1]
            assert backward[0] == backward[1]
        # What is sent comes back as gradients.
        assert sum(forward[0] for forward, _ in cut) == sum(backward[0] for _, backward in cut) > 0


def chunk_gated_delta_rule(q, k, v, g, beta, use_qk_l2norm_in_kernel=False, cu_seqlens=None):
    raise AssertionError


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, dt_bias=None, dt_softplus=False, seq_idx=None
):
    raise AssertionError


@pytest.mark.parametrize("family", ["qwen3_next", "bamba"])
def test_a_kernel_that_takes_no_state_is_not_called(family, monkeypatch):
    """On a rank with a whole document, which is all that one process can play."""
    model = tiny_model(family, sharp=True)
    mixer, recurrence = mixer_of(model), recurrence_of(model)
    layout = PackedLayout.from_lengths([20, 20], "intra_document", 0)
    sharded = ShardedLayouts.of([layout], SequenceGroups(ring=2), "contiguous")
    hidden = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = mixer(hidden)
        kernels = (chunk_gated_delta_rule, mamba_chunk_scan_combined)
        standin_kernels.install(monkeypatch, type(mixer), **{each.__name__: each for each in kernels})
        found = passed_states.passed(mixer, recurrence, sharded, hidden)
    assert float((found - expected).abs().max()) <= ROUNDED * float(expected.abs().max())


@pytest.mark.parametrize("family", sorted(HYBRIDS))
def test_the_code_of_transformers_is_as_expected(family):
    """Its forwards call the functions that are replaced; comparisons with whole rows notice what these take."""
    model = tiny_model(family, sharp=True)
    mixer = mixer_of(model)
    forward = inspect.unwrap(type(mixer).forward)
    for name in FUNCTIONS.get(recurrence_of(model), ()):
        assert name in forward.__code__.co_names
        assert name in passed_states.WRAPPED
    assert not forward.__code__.co_freevars


def test_a_mixer_that_computes_its_recurrence_otherwise_is_refused_by_name(monkeypatch):
    model = attached(tiny_model("lfm2", sharp=True))
    for module in (kernels, passed_states):
        monkeypatch.setattr(module, "FUNCTIONS", {SHORT_CONVOLUTION: ("convolve",)})
    sharded = ShardedLayouts.of([PackedLayout.from_lengths([10, 21], "anchor")], SequenceGroups(ring=2))
    with pytest.raises(EngineError, match="computes Lfm2ShortConv without convolve, so its state cannot"):
        model(input_ids=torch.ones(1, sharded.shard_length, dtype=torch.long), layout=sharded)
