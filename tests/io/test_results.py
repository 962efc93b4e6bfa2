"""Results as JSON and in a notebook."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from ropewalk.io.results import MOST_ROWS, Result, plain_json


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
