"""Factor tables: read back as written, refused where they cannot be right, and honest about what they are."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.attention.layout import PackedLayout, Row
from ropewalk.errors import RopewalkError
from ropewalk.rope import Default, Linear, LongRope, Yarn
from ropewalk.search import Candidate, Factors, goal_of, read_factors, write_factors
from ropewalk.search.algorithms import Measured
from ropewalk.search.data import SearchData, rows_digest
from ropewalk.search.factor_table import FactorsModel, Provenance, perplexity
from ropewalk.search.loop import Minimum, Trace
from ropewalk.search.run import SearchOutcome, SearchProblem, factors_found
from ropewalk.search.settings import SearchSettings

MODEL = FactorsModel(name="tiny", rotary_dim=8, rope_theta=1e4, original_max_position_embeddings=512)
LONG = (1.0, 1.5, 2.0, 4.0)


def table(**changes):
    values = {
        "model": MODEL,
        "target_length": 2048,
        "long_factor": LONG,
        "attention_factor": math.sqrt(1 + math.log(4) / math.log(512)),
        "provenance": Provenance(kind="csv", source="factors.csv"),
    }
    return Factors(**{**values, **changes})


FACTORS = st.lists(st.floats(0.01, 1e4), min_size=4, max_size=4).map(tuple)


@given(long=FACTORS, short=st.none() | FACTORS, tokens=st.integers(0, 300))
def test_a_table_is_read_back_as_it_was_written(tmp_path_factory, long, short, tokens):
    path = tmp_path_factory.mktemp("factors") / "factors.json"
    made = table(long_factor=long, short_factor=short, start_tokens=tokens)
    write_factors(path, made)
    assert read_factors(path) == made


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "its format is 'other', expected 'ropewalk-factors/1'"),
        ({"long_factor": [1.0, 2.0]}, "long_factor must have one number for each of 4 rotary pairs, got 2"),
        ({"long_factor": [1.0, 0.0, 1.0, 2.0]}, "long_factor must contain only numbers above 0, got 0"),
        ({"long_factor": None}, "long_factor and short_factor are both missing"),
        ({"start_tokens": -1}, "start_tokens"),
        ({"attention_factor": 0}, "attention_factor"),
        ({"invented": 1}, "invented"),
        (
            {"baseline_factors": {"pi": [4.0]}},
            r"baseline_factors\.pi must have one number for each of 4 rotary pairs, got 1",
        ),
        (
            {"baseline_factors": {"pi": [4.0, 4, 4, 0]}},
            r"baseline_factors\.pi must contain only numbers above 0",
        ),
        ({"target_length": "long"}, "target_length"),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(tmp_path, change, message):
    path = tmp_path / "factors.json"
    path.write_text(json.dumps({**table().model_dump(mode="json"), **change}))
    with pytest.raises(RopewalkError, match=message) as refused:
        read_factors(path)
    assert str(path) in str(refused.value)


def test_what_is_no_table_is_refused(tmp_path):
    path = tmp_path / "factors.json"
    with pytest.raises(RopewalkError, match=r"cannot read .*factors\.json: No such file"):
        read_factors(path)
    path.write_text("1.0\n1.2\n")
    with pytest.raises(RopewalkError, match="is not a factor table, because it cannot be read as JSON"):
        read_factors(path)
    path.write_bytes(b"{\xff}")
    with pytest.raises(RopewalkError, match=r"factors\.json is not UTF-8: byte 0xff at offset 1"):
        read_factors(path)
    path.write_text("[1.0]")
    with pytest.raises(
        RopewalkError, match="convert a CSV or a config to a table with ropewalk search import"
    ):
        read_factors(path)


def test_the_method_of_a_checkpoint():
    made = table().method(Default(8, 1e4), 512)
    assert made == LongRope(8, 1e4, (1.0,) * 4, LONG, table().attention_factor, 512)
    longer = made.__class__(8, 1e4, (1.0, 1.1, 1.2, 1.3), (3.0,) * 4, 1.3, 512, 4)
    # What the table does not say stays as it is in the checkpoint.
    assert table().method(longer, 1024).short_factor == (1.0, 1.1, 1.2, 1.3)
    short = table(long_factor=None, short_factor=LONG, target_length=512, attention_factor=1.3)
    assert short.method(longer, 1024) == LongRope(8, 1e4, LONG, (3.0,) * 4, 1.3, 512, 4)


@pytest.mark.parametrize(
    ("current", "length", "message"),
    [
        (Default(16, 1e4), 512, "rotary_dim 8, but this model has rotary_dim 16"),
        (Default(8, 5e5), 512, "rope_theta 10000, but this model has rope_theta 500000"),
        (
            Default(8, 1e4),
            256,
            "original_max_position_embeddings 512, .* model has original_max_position_embeddings 256",
        ),
        (Linear(8, 1e4, 2.0), 512, "the checkpoint uses linear scaling"),
        (Yarn(8, 1e4, 2.0, 256), 512, "the checkpoint uses yarn scaling"),
    ],
)
def test_another_checkpoint_is_refused(current, length, message):
    with pytest.raises(RopewalkError, match=message):
        table().method(current, length)


def test_short_factors_of_another_attention_factor_are_refused():
    checkpoint = LongRope(8, 1e4, (1.0,) * 4, (3.0,) * 4, 1.3, 512)

    def short(attention_factor):
        return table(
            long_factor=None, short_factor=LONG, target_length=512, attention_factor=attention_factor
        )

    with pytest.raises(
        RopewalkError,
        match=r"attention factor 1\.2, but the checkpoint has the attention factor 1\.3; search short factors on this",
    ):
        short(1.2).method(checkpoint, 2048)
    # The same one, written with six digits: the checkpoint keeps its own to the last bit.
    assert short(1.3000001).method(checkpoint, 2048).attention_factor == 1.3
    # Long factors bring the attention factor of the whole config.
    assert table(attention_factor=1.2).method(checkpoint, 2048).attention_factor == 1.2


def test_short_factors_alone_need_long_ones():
    with pytest.raises(
        RopewalkError,
        match=r"only short factors, and this checkpoint has no long factors \(its RoPE is default",
    ):
        table(long_factor=None, short_factor=LONG, target_length=512).method(Default(8, 1e4), 512)


def test_a_table_with_nothing_odd_has_no_remarks():
    assert table().remarks() == []
    assert table(long_factor=(1.0, 1.0, 2.0, 2.0), short_factor=(1.0,) * 4).remarks() == []
    # Six digits of the published formula are the published formula.
    assert table(attention_factor=1.105542).remarks() == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"start_tokens": 4}, "The RoPE angles of the first 4 tokens stay unscaled"),
        ({"attention_factor": 1.0}, "attention factor 1 is not the published .* = 1.10554: .*vLLM"),
        ({"long_factor": (1.0, 3.0, 2.0, 1.5)}, "pair 2 has 2 after 3, and 1 more pairs decrease"),
        ({"long_factor": (0.9, 1.0, 2.0, 3.0)}, r"1 factor below 1 \(the smallest is 0.9\)"),
        ({"short_factor": (1.0, 2.0, 1.0, 2.0)}, r"^short_factor is not ascending: pair 2 has 1 after 2\.$"),
    ],
)
def test_what_is_odd_is_said(change, sentence):
    import re

    (said,) = table(**change).remarks()
    assert re.search(sentence, said)


def test_the_attention_factor_of_short_factors_is_not_judged():
    # It belongs to the whole config, whose longest length a table of short factors does not know.
    assert table(long_factor=None, short_factor=LONG, target_length=256, attention_factor=1.3).remarks() == []


@pytest.mark.parametrize(("nats", "value"), [(0.0, 1.0), (1.0, math.e), (math.inf, None), (1e4, None)])
def test_a_perplexity_is_finite_or_none(nats, value):
    assert perplexity(nats) == value


def found(length=2048, current=None, best=None, objective=1.0):
    goal = goal_of(current or Default(8, 1e4), 512, length)
    measured = Measured(best or Candidate(LONG, 4), objective, 2)
    worse = Measured(Candidate((1.0,) * 4), math.inf, 2)
    result = Minimum(measured, (Trace(2, worse), Trace(7, measured)), 9, 5, spent=True)
    baselines = {"pi": math.inf, "ntk": 1.5}
    settings = SearchSettings(budget=9, start_tokens=(0, 4))
    data = SearchData([row(1), row(2)], [row(3), row(4), row(5)], source="text.jsonl")
    problem = SearchProblem(goal, data, settings)
    return SearchOutcome(problem, result, baselines, {"best": 1.25, **baselines}, 0.123)


def row(token):
    ids = torch.full((4,), token)
    return Row(ids, ids, PackedLayout.from_lengths([4], "full", anchor_length=0))


def of_found(given_):
    return factors_found(given_, MODEL, "cpu", "float32")


def test_the_table_of_a_search_holds_perplexities():
    made = of_found(found())
    assert made.best.objective == math.e
    assert (made.best.rescale_factors, made.best.start_tokens) == (LONG, 4)
    assert (made.long_factor, made.short_factor, made.start_tokens) == (LONG, None, 4)
    assert made.baselines == {"pi": None, "ntk": math.exp(1.5)}
    assert [(point.forwards, point.objective) for point in made.history] == [(2, None), (7, math.e)]
    assert (made.held_out.best, made.held_out.baselines) == (math.exp(1.25), made.baselines)
    assert (made.held_out.documents, made.held_out.documents_sha256) == (
        3,
        rows_digest([row(3), row(4), row(5)]),
    )
    assert (made.forwards, made.search.candidates, made.search.ended_by) == (9, 5, "budget")
    assert made.search.largest == 5.0
    assert made.attention_factor == pytest.approx(math.sqrt(1 + math.log(4) / math.log(512)), rel=1e-15)
    json.loads(made.model_dump_json(), parse_constant=pytest.fail)


def test_short_factors_are_kept_as_such():
    longer = LongRope(8, 1e4, (1.0,) * 4, (2.0,) * 4, 1.2, 512)
    made = of_found(found(256, longer, Candidate((1.0, 1.0, 1.1, 1.2))))
    assert (made.long_factor, made.short_factor) == (None, (1.0, 1.0, 1.1, 1.2))
    assert made.attention_factor == 1.2
    assert made.baseline_factors == {"original": (1.0,) * 4, "long": (2.0,) * 4}


def test_baselines_of_a_second_search_are_kept_as_it_ran_them():
    first = of_found(found())
    assert set(first.baseline_factors) == {"pi", "ntk", "yarn"}
    assert first.baseline_factors["pi"] == (4.0,) * 4
    own = (1.0, 1.5, 2.0, 5.0)
    goal = goal_of(LongRope(8, 1e4, (1.0,) * 4, own, 1.2, 512), 2048, 4096)
    first = found()
    problem = dataclasses.replace(first.problem, goal=goal)
    second = of_found(dataclasses.replace(first, problem=problem)).baseline_factors
    # PI divides what the checkpoint has by two more.
    assert second["pi"] == pytest.approx([2 * each for each in own], rel=1e-15)
    # NTK's factors ascend from 1 to the ratio, on top of the checkpoint's; a few roundings in float64.
    ratio = [a / b for a, b in zip(second["ntk"], own, strict=True)]
    assert ratio == pytest.approx([2 ** (pair / 3) for pair in range(4)], rel=1e-12)


def test_an_objective_that_is_no_perplexity_is_refused():
    with pytest.raises(RopewalkError, match="1000 nats per token, too large for a finite perplexity"):
        of_found(found(objective=1000.0))
