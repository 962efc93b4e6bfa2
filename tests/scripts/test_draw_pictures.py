"""The script that draws the figures of the pages; the test of the pages compares its diagrams."""

import runpy

import pytest

from tests.places import ROOT


@pytest.mark.slow  # a command starts
def test_figures_are_drawn(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "draw_pictures.py"))
    script["draw_figures"].__globals__["IMAGES"] = tmp_path
    script["draw_figures"](None, None)
    assert {path.name for path in tmp_path.iterdir()} == {"eval-needle.png", "bases.png", "margin.png"}
