"""The script that draws the figures of the pages; the test of the pages compares its diagrams."""

import runpy

import pytest

from ropewalk.cli.app import main
from tests.places import ROOT


@pytest.mark.slow  # three figures
def test_figures_are_drawn(tmp_path):
    script = runpy.run_path(str(ROOT / "scripts" / "draw_pictures.py"))
    statuses = []
    # The command runs in this process.
    script["draw_figures"].__globals__.update(
        IMAGES=tmp_path, ropewalk=lambda *words: statuses.append(main([*map(str, words)]))
    )
    script["draw_figures"](None, None)
    assert statuses == [0]
    assert {path.name for path in tmp_path.iterdir()} == {"eval-needle.png", "bases.png", "margin.png"}
