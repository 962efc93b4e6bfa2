"""Results as JSON and in a notebook."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ropewalk import RopewalkError
from ropewalk.io.results import MOST_LINES, MOST_ROWS, WIDTH, Result, plain_json


@dataclass(frozen=True)
class Part:
    name: str
    score: float


@dataclass(frozen=True)
class Whole(Result):
    parts: tuple[Part, ...]
    by_length: dict[int, Any]
    folder: Path | None = None


def test_json_holds_plain_values_alone():
    whole = Whole(
        (Part("a", 0.5), Part("b", float("nan"))),
        {4096: numpy.float64(1.5), 8192: torch.tensor(3)},
        Path("x") / "y",
    )
    expected = {
        "parts": [{"name": "a", "score": 0.5}, {"name": "b", "score": None}],
        "by_length": {"4096": 1.5, "8192": 3},
        "folder": str(Path("x") / "y"),
    }
    assert json.loads(json.dumps(whole.to_json(), allow_nan=False)) == expected == whole.to_json()


def test_a_parts_own_json_is_asked():
    class Own:
        def to_json(self):
            return {"said": float("inf")}

    assert plain_json([Own()]) == [{"said": None}]


def test_what_has_no_json_is_named():
    with pytest.raises(TypeError, match="cannot convert object to JSON"):
        plain_json({"x": object()})


def test_a_notebook_escapes_all_text():
    shown = Whole((Part("<script>", 1 / 3),), {1: {"<b>": "&"}})._repr_html_()
    assert "<script>" not in shown
    assert "<b>" not in shown
    assert "&lt;script&gt;" in shown
    assert "&lt;b&gt;" in shown
    assert "&amp;" in shown
    assert "0.333333" in shown


def test_a_notebook_says_how_much_it_leaves_out():
    whole = Whole(
        tuple(Part(str(n), 0.0) for n in range(MOST_ROWS + 3)), {n: n for n in range(MOST_ROWS + 1)}
    )
    assert "and 3 more" in whole._repr_html_()
    assert "and 1 more" in whole._repr_html_()
    assert len(whole.to_json()["parts"]) == MOST_ROWS + 3


@dataclass(frozen=True)
class Scored(Result):
    model: str
    rows: tuple[Part, ...]

    def scores(self):
        return [
            {"task": part.name, "length": None, "value": part.score, "n": 1, "ran": True, "note": ""}
            for part in self.rows
        ]


def test_the_text_of_a_result_begins_with_its_scores_and_leaves_out_columns_that_say_nothing():
    text = repr(Scored("m", (Part("passkey", 100 / 3), Part("ruler", float("nan")))))
    assert text.splitlines() == [
        "Scored",
        "task     value    n",
        "passkey  33.3333  1",
        "ruler             1",
        "model: m",
    ]


def test_the_text_of_any_result_is_at_most_a_screen():
    many = tuple(Part(f"task {n} " + "long " * 30, 0.0) for n in range(100))
    for result in (Scored("m" * 300 + "\nn", many), Whole(many, {n: n for n in range(99)}, Path("x"))):
        lines = repr(result).splitlines()
        assert len(lines) <= MOST_LINES
        assert max(map(len, lines)) <= WIDTH
    assert "... 89 more in to_frame()" in repr(Scored("m", many))
    whole = Whole((Part("a", 0.5),), {4096: 1.5}, Path("x"))
    assert repr(whole).splitlines() == [
        "Whole",
        'parts: [{"name": "a", "score": 0.5}]',
        'by_length: {"4096": 1.5}',
        "folder: x",
    ]


@dataclass(frozen=True)
class Answered(Result):
    parts: tuple[Part, ...]

    def overview(self):
        return [{"name": part.name, "good": True, "unused": None} for part in self.parts]

    def statement(self):
        return ["All is <good>.", "  - indented: " + "word " * 30]


def test_a_result_with_an_answer_begins_with_it_and_its_frame_has_its_rows():
    first, second, *_, header, row = repr(Answered((Part("a", 1.0),))).splitlines()[1:]
    assert (first, second[:13]) == ("All is <good>.", "  - indented:")
    assert (header.split(), row.split()) == (["name", "good"], ["a", "true"])
    many = Answered((Part("a", 1.0),) * 40)
    assert repr(many).splitlines()[-1] == "... 40 rows in to_frame()"
    assert len(many.to_frame()) == 40
    assert many._repr_html_().startswith("<h4>Answered</h4><p>All is &lt;good&gt;.</p>")


def test_a_notebook_begins_with_the_scores():
    shown = Scored("model", (Part("passkey", 1.0),))._repr_html_()
    assert shown.index("passkey") < shown.index("model")
    assert shown.startswith("<h4>Scored</h4><table><tr><th>task</th>")
    assert (
        Whole((), {})._repr_html_().startswith("<h4>Whole</h4><table><tr><th style='text-align:left'>parts")
    )


def test_a_frame_has_a_row_for_each_score_or_each_entry_of_the_first_list():
    frame = Scored("m", (Part("a", 1.0), Part("b", 2.0))).to_frame()
    assert list(frame.columns) == ["task", "length", "value", "n", "ran", "note"]
    assert frame["value"].tolist() == [1.0, 2.0]
    assert Whole((Part("a", 0.5),), {}).to_frame().to_dict("records") == [{"name": "a", "score": 0.5}]
    assert len(Whole((), {}, Path("x")).to_frame()) == 1


def test_a_frame_without_pandas_is_refused_with_a_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        RopewalkError, match=r"^to_frame\(\) needs pandas; install it with pip install pandas$"
    ):
        Whole((), {}).to_frame()
