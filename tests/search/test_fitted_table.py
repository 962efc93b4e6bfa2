"""A factor table as it applies to a checkpoint: its method and context, what it is known by, what does not fit."""

import hashlib
import json
import math

import pytest
import transformers

from ropewalk import RopewalkError
from ropewalk.rope import LongRope
from ropewalk.search import Factors, write_factors
from ropewalk.search.factor_table import FactorsModel, Provenance
from ropewalk.search.fitted_table import export, fitted_table, other_checkpoint

LONG = (1.0, 1.5, 2.0, 4.0)


def table(**changes):
    values = {
        "model": FactorsModel(
            name="tiny", rotary_dim=8, rope_theta=1e4, original_max_position_embeddings=512, digest="a" * 64
        ),
        "target_length": 2048,
        "long_factor": LONG,
        "attention_factor": math.sqrt(1 + math.log(4) / math.log(512)),
        "provenance": Provenance(kind="csv", source="factors.csv"),
    }
    return Factors(**{**values, **changes})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A config alone; whoever asks for a method needs no weights."""
    folder = tmp_path_factory.mktemp("checkpoint")
    transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rope_theta=1e4,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "factors.json"


def test_a_checkpoint_gets_the_factors_and_the_length_of_the_table(file, checkpoint):
    write_factors(file, table())
    found = fitted_table(file, checkpoint)
    assert isinstance(found.method, LongRope)
    assert (found.method.long_factor, found.method.short_factor) == (LONG, (1.0,) * 4)
    assert (found.method.rotary_dim, found.method.rope_theta) == (8, 1e4)
    assert found.method.original_max_position_embeddings == 512
    assert found.context == 2048
    assert found.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_results_under_a_table_are_known_by_its_file_and_what_it_was_found_on(file, checkpoint):
    write_factors(file, table(start_tokens=4))
    found = fitted_table(file, checkpoint)
    assert json.loads(json.dumps(found.record, allow_nan=False)) == {
        "sha256": found.sha256,
        "found_on": {"name": "tiny", "sha256": "a" * 64},
        "provenance": Provenance(kind="csv", source="factors.csv").model_dump(),
        "target_length": 2048,
        "start_tokens": 4,
        "attention_factor": found.method.attention_factor,
    }


@pytest.mark.parametrize(
    ("found_on", "digest", "said"),
    [("a", "a", False), (None, "a", False), ("a", None, False), ("a", "b", True)],
)
def test_other_weights_are_told_where_both_are_known(found_on, digest, said):
    notes = other_checkpoint({"found_on": {"name": "tiny", "sha256": found_on}}, digest)
    assert len(notes) == said
    assert all("found on another checkpoint (tiny)" in note for note in notes)


def test_a_table_for_no_more_than_the_original_length_is_refused(file, checkpoint):
    write_factors(file, table(target_length=512))
    with pytest.raises(
        RopewalkError, match=r"long factors for 512 tokens.*original length of 512.*for a longer target"
    ):
        fitted_table(file, checkpoint)


def test_start_tokens_and_a_folder_that_is_there_are_refused_before_anything_is_written(
    file, checkpoint, tmp_path
):
    write_factors(file, table(start_tokens=4))
    with pytest.raises(RopewalkError, match=r"4 start tokens, which config.json cannot store"):
        export(checkpoint, file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "there").mkdir()
    with pytest.raises(RopewalkError, match="there"):
        export(checkpoint, file, tmp_path / "there")
