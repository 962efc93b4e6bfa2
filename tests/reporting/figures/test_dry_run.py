"""The figure of a planned step's memory holds the parts, and their sum is the memory."""

import itertools
from dataclasses import replace

import numpy as np

from ropewalk.reporting.figures.drawing import draw
from ropewalk.reporting.figures.dry_run import BANDS, memory_figure
from ropewalk.reporting.figures.primitives import Area, Note, Rule
from tests.dry_run.cases import planned_run


def test_bands_stack_up_to_the_memory_below_the_usable_line(tmp_path):
    result = planned_run()
    figure = memory_figure(result)
    (panel,) = figure.panels
    areas = [mark for mark in panel.marks if isinstance(mark, Area)]
    assert [area.name for area in areas] == list(BANDS)
    for lower, upper in itertools.pairwise(areas):
        assert lower.high == upper.low
    assert areas[0].low == (0.0,) * 3
    assert np.allclose(areas[-1].high, 64.0)
    (rule,) = [mark for mark in panel.marks if isinstance(mark, Rule)]
    assert rule.at == 72.0
    assert "usable" in figure.alternative() or "usable" in rule.words
    draw(figure, tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").stat().st_size > 1000


def test_moments_that_a_second_pass_repeats_are_named_once():
    result = planned_run()
    (stage,) = result.stages
    memory = replace(
        stage.memory,
        course=stage.memory.course[:2] * 2 + stage.memory.course[2:],
        course_moments=("forward", "backward", "forward", "backward", "update"),
    )
    (panel,) = memory_figure(replace(result, stages=(replace(stage, memory=memory),))).panels
    notes = [(mark.text, mark.x) for mark in panel.marks if isinstance(mark, Note)]
    assert notes == [("forward", 0.0), ("backward", 1.0), ("update", 4.0)]
