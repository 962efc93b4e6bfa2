"""Results of a run are read back as they were written, refused where they are damaged, and told in a sentence."""

import json
import math

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import TaskResult
from ropewalk.io.digests import FileDigest, write_sealed
from ropewalk.training.measurement import (
    _write_results,
    describe_short_context,
    evaluation_file,
    evaluation_record,
    results_in,
    short_context,
)


def perplexity(score, length=64):
    ends = (0.9 * score, 1.1 * score)
    return TaskResult("perplexity", "perplexity", length, 2, score, ends, unit="perplexity")


def seal(path, text):
    """Write a file of results with the record that belongs to it."""
    path.write_text(text)
    write_sealed(path.with_name(evaluation_record("before")), {}, {path.name: FileDigest.of(path)})


RESULTS = [perplexity(7.5), TaskResult("passkey", "passkey", 32, 4, 75.0, (30.0, 95.0))]
ASKED = {"perplexity": [64], "passkey": [32]}


def test_results_are_read_back_as_they_were_written(tmp_path):
    assert results_in(tmp_path, "before", ASKED) is None
    _write_results(tmp_path, "before", RESULTS)
    assert results_in(tmp_path, "before", ASKED) == RESULTS
    assert results_in(tmp_path, "after", ASKED) is None
    (tmp_path / evaluation_record("before")).unlink()
    with pytest.raises(RopewalkError, match=r"its record evaluation-before\.digest\.json is missing"):
        results_in(tmp_path, "before", ASKED)


def test_a_change_of_any_byte_is_noticed(tmp_path):
    _write_results(tmp_path, "after", RESULTS)
    path = tmp_path / evaluation_file("after")
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(RopewalkError, match=r"evaluation-after\.json"):
            results_in(tmp_path, "after", ASKED)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({**ASKED, "perplexity": [64, 128]}, "it lacks a result of perplexity at 128 tokens"),
        (
            {"perplexity": [64]},
            "it holds a result of passkey at 32 tokens, which the recipe does not list",
        ),
    ],
)
def test_results_that_the_recipe_does_not_ask_for_are_not_taken_for_those_it_does(tmp_path, asked, message):
    _write_results(tmp_path, "before", RESULTS)
    with pytest.raises(RopewalkError, match=message):
        results_in(tmp_path, "before", asked)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"suite": "passkey"}]', "[NaN]"])
def test_what_holds_no_results_is_refused_with_what_to_do(tmp_path, text):
    _write_results(tmp_path, "before", RESULTS)
    seal(tmp_path / evaluation_file("before"), text)
    with pytest.raises(
        RopewalkError, match=r"is damaged \(.*\); delete it, and --resume will repeat the evaluation"
    ):
        results_in(tmp_path, "before", ASKED)


def test_the_original_length_is_compared_before_and_after():
    before, after = [perplexity(9.0, 128), perplexity(4.0, 32)], [perplexity(5.0, 128), perplexity(4.2, 32)]
    found = short_context(32, before, after)
    assert found["ratio"] == pytest.approx(1.05)
    assert json.loads(json.dumps(found)) == found
    assert describe_short_context(found) == "perplexity at 32 tokens 4.000 before and 4.200 after, +5.0 %"
    assert math.isclose(short_context(32, after, before)["ratio"], 1 / 1.05)


def test_what_was_not_measured_on_both_sides_is_not_compared():
    here, none = [perplexity(4.0, 32)], [perplexity(4.0, 128)]
    assert short_context(None, here, here) is None
    assert short_context(32, none, here) is short_context(32, here, none) is None
