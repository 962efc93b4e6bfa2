"""Proportional RoPE: the frequencies are transformers' own, configs say it both ways, and no scaling is guessed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropewalk import RopewalkError
from ropewalk.rope import Default, Proportional, Yarn, config_entries, method_for_target, methods_from_config
from ropewalk.rope.theory import context_bound
from tests.rope.rope_cases import FLOAT32_ORACLE, dims, examples, factors, thetas


@st.composite
def proportionals(draw: st.DrawFn) -> Proportional:
    dim = draw(dims)
    # At least one pair turns, whatever rounding makes of the share.
    share = draw(st.floats(2.1 / dim, 1))
    return Proportional(dim, draw(thetas), share, draw(factors))


def entry_of(method: Proportional) -> dict[str, object]:
    return config_entries(method, method.rotary_dim)["rope_parameters"]  # type: ignore[no-any-return]


@examples
@given(proportionals())
def test_proportional_equals_transformers(method: Proportional) -> None:
    config = Gemma3TextConfig(head_dim=method.rotary_dim, layer_types=["full_attention"], num_hidden_layers=1)
    config.rope_parameters = {"full_attention": entry_of(method)}
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["proportional"](config, layer_type="full_attention")
    ours = method.frequencies()
    turning = theirs > 0
    assert torch.equal(ours.inv_freq > 0, turning)
    error = (ours.inv_freq[turning] / theirs[turning].double() - 1).abs().max()
    assert float(error) <= FLOAT32_ORACLE
    assert ours.attention_factor == attention_factor == 1


def test_pairs_that_turn_keep_the_frequencies_of_the_whole_head() -> None:
    """Partial rotation of plain RoPE would spread half as many pairs over the whole range."""
    half = Proportional(8, 1e4, 0.5).frequencies().inv_freq
    assert half.tolist() == [*Default(8, 1e4).frequencies().inv_freq[:2].tolist(), 0, 0]
    assert half[1] != Default(4, 1e4).frequencies().inv_freq[1]


@examples
@given(proportionals())
def test_what_is_written_is_read_back(method: Proportional) -> None:
    config = {"head_dim": method.rotary_dim, "rope_parameters": entry_of(method)}
    assert methods_from_config(config) == {None: method}


def test_a_published_entry_is_read_and_written_as_it_stands() -> None:
    entry = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config = {"head_dim": 512, "rope_parameters": entry}
    assert methods_from_config(config) == {None: Proportional(512, 1e6, 0.25)}
    assert entry_of(Proportional(512, 1e6, 0.25)) == entry


def test_a_new_base_keeps_the_share_and_nothing_else_is_guessed() -> None:
    current = Proportional(64, 1e6, 0.5)
    assert method_for_target("theta", current, 4096, 65536, rope_theta=4e6) == Proportional(64, 4e6, 0.5)
    scaled = method_for_target("proportional", current, 4096, 65536, parameters={"factor": 2.0})
    assert scaled == Proportional(64, 1e6, 0.5, 2.0)
    for name, before, said in (
        ("theta", current, "set rope_theta"),
        ("proportional", current, "method 'theta' with a larger rope_theta"),
        ("proportional", Default(64, 1e4), "this checkpoint has default RoPE"),
        ("yarn", current, "already has proportional RoPE"),
        ("proportional", Yarn(64, 1e4, 2.0, 4096), "already has yarn RoPE"),
    ):
        with pytest.raises(RopewalkError, match=said):
            method_for_target(name, before, 4096, 65536)


@pytest.mark.parametrize("share", [0, -1, 1.5, True, "x"])
def test_a_share_out_of_range_is_refused_with_its_value(share: object) -> None:
    with pytest.raises(
        RopewalkError, match="partial_rotary_factor must be a number above 0 and at most 1, got"
    ):
        Proportional(8, 1e4, share)  # type: ignore[arg-type]


def test_a_share_without_a_turning_pair_is_refused() -> None:
    with pytest.raises(RopewalkError, match="leaves no pair to rotate"):
        Proportional(8, 1e4, 0.2)


def test_pairs_that_stand_still_count_in_the_context_bound() -> None:
    """They compare tokens alike at every distance, so the margin is larger by their number."""
    whole, half = (
        context_bound(each.frequencies().inv_freq) for each in (Default(64, 1e4), Proportional(64, 1e4, 0.5))
    )
    assert whole is not None
    assert half is None or half > whole
