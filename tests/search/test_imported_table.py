"""Factors from elsewhere come in number by number; what is left out is said, and what does not fit is refused."""

import json

import numpy as np
import pytest

from ropewalk.errors import RopewalkError
from ropewalk.models.config.model import ModelConfig
from ropewalk.rope import LongRope, methods_from_config
from ropewalk.search import read_factors, write_factors
from ropewalk.search.factor_table import checkpoint
from ropewalk.search.imported_table import for_model, from_config, from_csv, is_config
from tests.places import CONFIGS

PHI = ["phi-3-mini-128k-instruct-april-2024", "phi-3-mini-128k-instruct", "phi-3.5-mini-instruct"]
PAIRS = 64
FACTORS = np.round(np.linspace(1, 32, PAIRS) ** 0.9, 2)


@pytest.fixture(scope="module")
def llama():
    return checkpoint(str(CONFIGS / "llama-2-7b.json"))


@pytest.fixture
def csv(tmp_path):
    return tmp_path / "factors.csv"


def test_one_factor_a_line_as_savetxt_writes(csv, llama):
    np.savetxt(csv, FACTORS, delimiter="\n")
    imported = from_csv(csv, llama, 131072, start_tokens=16)
    made = imported.factors
    assert made.long_factor == tuple(FACTORS)
    assert (made.short_factor, made.start_tokens, made.target_length) == (None, 16, 131072)
    assert imported.notes == ()
    assert made.provenance.kind == "csv"
    method = made.method(llama.full_attention_rope, 4096)
    assert method.attention_factor == pytest.approx((1 + np.log(32) / np.log(4096)) ** 0.5, rel=1e-15)
    path = csv.with_suffix(".json")
    write_factors(path, made)
    assert read_factors(path) == made


def test_one_row_with_commas_is_the_same(csv, llama):
    np.savetxt(csv, FACTORS[None], delimiter=",", fmt="%.18e")
    assert from_csv(csv, llama, 131072).factors.long_factor == tuple(FACTORS)


def test_a_byte_order_mark_is_no_part_of_the_first_number(csv, llama):
    csv.write_text("\r\n".join(map(str, FACTORS)), encoding="utf-8-sig")
    assert from_csv(csv, llama, 131072).factors.long_factor == tuple(FACTORS)


def test_equal_rows_for_each_layer_are_one_list(csv, llama):
    np.savetxt(csv, np.tile(FACTORS, (32, 1)), delimiter=",", fmt="%.16g")
    imported = from_csv(csv, llama, 131072)
    assert imported.factors.long_factor == tuple(FACTORS)
    assert imported.notes == ("factors.csv has 32 equal rows, one per layer; ropewalk used the first.",)


def test_rows_that_differ_are_refused(csv, llama):
    rows = np.tile(FACTORS, (32, 1))
    rows[31, 5] += 0.01
    np.savetxt(csv, rows, delimiter=",")
    with pytest.raises(RopewalkError, match="has 32 rows of factors that are not all equal; give one row"):
        from_csv(csv, llama, 131072)


@pytest.mark.parametrize("delimiter", ["\n", ","])
def test_piece_borders_are_left_out_and_it_is_said(csv, llama, delimiter):
    values = np.concatenate([[20, 45], FACTORS])
    np.savetxt(csv, values if delimiter == "\n" else values[None], delimiter=delimiter)
    imported = from_csv(csv, llama, 131072)
    assert imported.factors.long_factor == tuple(FACTORS)
    (note,) = imported.notes
    assert "begins with the piece borders of dim_piece_mono, 20 and 45; ropewalk ignored them" in note


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (FACTORS[:-1], "has 63 factors, but the model has 64 rotary pairs"),
        ([*FACTORS, 32.0], "has 65 factors, but the model has 64 rotary pairs"),
        ([1.5, 2.0, *FACTORS], "has 66 factors, but the model has 64 rotary pairs"),
        ([-1.0, 2.0, *FACTORS], "has 66 factors"),
        ([*FACTORS[:-1], 0.0], "contains the factor 0; factors must be above 0"),
        ([*FACTORS[:-1], np.nan], "contains 'nan', which is not a number"),
    ],
)
def test_other_counts_and_numbers_are_refused(csv, llama, values, message):
    np.savetxt(csv, np.array(values), delimiter="\n")
    with pytest.raises(RopewalkError, match=message):
        from_csv(csv, llama, 131072)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("1.0,two", "contains 'two', which is not a number"), ("1.0,,2", "contains ''")],
)
def test_what_is_no_table_is_refused(csv, llama, text, message):
    csv.write_text(text)
    with pytest.raises(RopewalkError, match=message):
        from_csv(csv, llama, 131072)


def test_a_missing_file_and_a_length_that_extends_nothing_are_refused(csv, llama):
    with pytest.raises(RopewalkError, match=r"cannot read .*: No such file"):
        from_csv(csv, llama, 131072)
    np.savetxt(csv, FACTORS)
    with pytest.raises(RopewalkError, match="give a target length above 4096"):
        from_csv(csv, llama, 4096)


def test_odd_factors_come_in_as_they_are(csv, llama):
    odd = FACTORS.copy()
    odd[3], odd[0] = 0.5, 0.99
    np.savetxt(csv, odd)
    made = from_csv(csv, llama, 131072).factors
    assert made.long_factor == tuple(odd)
    assert len(made.remarks()) == 2


def test_factors_up_to_the_original_length_are_short_ones(csv):
    phi = checkpoint(str(CONFIGS / f"{PHI[0]}.json"))
    np.savetxt(csv, np.linspace(1, 2, 48))
    made = from_csv(csv, phi, 4096).factors
    assert made.long_factor is None
    current = phi.full_attention_rope
    method = made.method(current, 131072)
    assert (method.short_factor, method.long_factor) == (made.short_factor, current.long_factor)
    assert method.attention_factor == current.attention_factor
    with pytest.raises(
        RopewalkError,
        match=r"--start-tokens 4 applies to long factors only, .* \(within the original length of 4096\)",
    ):
        from_csv(csv, phi, 4096, start_tokens=4)


@pytest.mark.parametrize("name", PHI)
def test_a_published_config_gives_its_own_method_back(name, tmp_path):
    path = CONFIGS / f"{name}.json"
    raw = json.loads(path.read_text())
    made = from_config(checkpoint(str(path))).factors
    assert list(made.long_factor) == raw["rope_scaling"]["long_factor"]
    assert list(made.short_factor) == raw["rope_scaling"]["short_factor"]
    assert (made.target_length, made.model.original_max_position_embeddings) == (131072, 4096)
    written = tmp_path / "factors.json"
    write_factors(written, made)
    method = read_factors(written).method(checkpoint(str(path)).full_attention_rope, 131072)
    assert method == methods_from_config(raw)[None]
    assert isinstance(method, LongRope)


def test_a_config_of_another_length_or_without_factors_is_refused(llama):
    phi = checkpoint(str(CONFIGS / f"{PHI[1]}.json"))
    assert from_config(phi, 131072) == from_config(phi)
    with pytest.raises(RopewalkError, match="are for 131072 tokens, not for 65536"):
        from_config(phi, 65536)
    with pytest.raises(RopewalkError, match="has no rescale factors: its RoPE is default"):
        from_config(llama)


def test_a_config_goes_to_another_model_only_where_it_fits(llama):
    first, second = (checkpoint(str(CONFIGS / f"{name}.json")) for name in PHI[:2])
    moved = for_model(from_config(first), second).factors
    assert moved.model.name == second.model
    assert moved.provenance.source == first.model
    with pytest.raises(RopewalkError, match=r"rotary_dim 96, but this model has rotary_dim 128"):
        for_model(from_config(first), llama)


def test_a_config_is_told_from_a_table(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "numbers").write_text("1.0")
    configs = [str(tmp_path / "model"), "config.json", "microsoft/Phi-3.5-mini-instruct", "embedded"]
    assert [is_config(each) for each in configs] == [True] * 4
    assert [is_config(each) for each in ("missing.csv", "a.txt", str(tmp_path / "numbers"))] == [False] * 3


def test_of_layers_of_several_kinds_those_of_full_attention_have_factors():
    gemma = checkpoint(str(CONFIGS / "gemma-3-1b.json"))
    assert gemma.full_attention_rope == gemma.methods["full_attention"]
    values = {"rope_theta": 1e4, "head_dim": 8, "max_position_embeddings": 64}
    assert ModelConfig(values, "plain").full_attention_rope.rotary_dim == 8
