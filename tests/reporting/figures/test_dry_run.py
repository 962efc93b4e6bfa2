"""The figure of a planned step's memory holds the parts, and their sum is the memory."""

import itertools
from dataclasses import replace

import numpy as np

from ropewalk.reporting.figures.drawing import draw
from ropewalk.reporting.figures.dry_run import BANDS, memory_figure
from tests.dry_run.cases import planned_run
from tests.reporting.axes_cases import areas, heading, names, note_texts, only, rules


def test_bands_stack_up_to_the_memory_below_the_usable_line(tmp_path):
    result = planned_run()
    figure = memory_figure(result)
    panel = only(figure)
    found = areas(panel)
    assert [each.get_label() for each in panel.collections] == names(panel) == list(BANDS)
    for lower, upper in itertools.pairwise(found):
        assert [high for _, high in lower.values()] == [low for low, _ in upper.values()]
    assert [low for low, _ in found[0].values()] == [0] * 3
    assert np.allclose([high for _, high in found[-1].values()], 64.0)
    assert rules(panel) == {"usable: 72 GB": 72.0}
    (stage,) = result.stages
    assert heading(panel) == (f"stage 1: {stage.context:,} tokens", stage.mesh)
    assert "usable: 72 GB" in figure.alternative()
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
    panel = only(memory_figure(replace(result, stages=(replace(stage, memory=memory),))))
    notes = [(note.get_text(), note.xy[0]) for note in note_texts(panel)]
    assert notes == [("forward", 0.0), ("backward", 1.0), ("update", 4.0)]
