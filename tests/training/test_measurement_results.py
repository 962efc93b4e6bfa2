"""Results of a run are read back as they were written, refused where they are damaged, and told in a sentence."""

import json
import math

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import TaskResult
from ropewalk.training.checkpoint.files import Position
from ropewalk.training.measurement import (
    _write_results,
    describe_short_context,
    during,
    evaluation_file,
    evaluation_record,
    results_in,
    short_context,
)


def perplexity(score, length=64):
    ends = (0.9 * score, 1.1 * score)
    return TaskResult("perplexity", "perplexity", length, 2, score, ends, unit="perplexity")


RESULTS = [perplexity(7.5), TaskResult("passkey", "passkey", 32, 4, 75.0, (30.0, 95.0))]
AT = during(Position(0, 2, 0))


def test_results_are_read_back_as_they_were_written(tmp_path):
    for when in ("before", AT):
        assert results_in(tmp_path, when) is None
        _write_results(tmp_path, when, RESULTS)
        assert results_in(tmp_path, when) == RESULTS
    assert results_in(tmp_path, "after") is None
    # The record of the run's step has the digests of what is measured before and after.
    assert not (tmp_path / evaluation_record("before")).exists()
    (tmp_path / evaluation_record(AT)).unlink()
    with pytest.raises(RopewalkError, match=r"its record stage0-step000002\.digest\.json is missing"):
        results_in(tmp_path, AT)


def test_a_change_of_any_byte_is_noticed(tmp_path):
    _write_results(tmp_path, AT, RESULTS)
    path = tmp_path / evaluation_file(AT)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(RopewalkError, match=r"stage0-step000002\.json"):
            results_in(tmp_path, AT)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"suite": "passkey"}]', "[NaN]"])
def test_what_holds_no_results_is_refused_with_what_to_do(tmp_path, text):
    _write_results(tmp_path, "before", RESULTS)
    (tmp_path / evaluation_file("before")).write_text(text)
    with pytest.raises(
        RopewalkError, match=r"is damaged \(.*\); delete it, and --resume will go on without it"
    ):
        results_in(tmp_path, "before")


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
