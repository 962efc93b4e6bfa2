"""Figures of an evaluation: what was measured is drawn, and what was not is said."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.reporting.figures import evaluation
from ropewalk.reporting.figures.primitives import Area, Boxes, Figure, HeatMap, Line, Note
from tests.reporting.evaluation_results import (
    DIFFERENCES,
    LENGTHS,
    NO_QUESTIONS,
    RULER_TASKS,
    difference,
    needle,
    not_compared,
    retrieval,
    ruler,
    scored,
    short,
)
from tests.reporting.reporting_cases import AFTER, BEFORE, perplexity
from tests.reporting.specification_cases import (
    boxes,
    ends,
    lines,
    names,
    notes,
    of_kind,
    only,
    points,
    rules,
    ticks,
    whiskers,
)

LONG = "meta-llama/Llama-3.1-8B-Instruct extended to 128k by YaRN, checkpoint 500"
MEMORY = "out of memory at batch 1 with a prefill chunk of 256"
FALLING = retrieval("passkey", "passkey", {n: max(0, 20 - 3 * i * i) for i, n in enumerate(LENGTHS)})
HOLED = [
    *retrieval("passkey", "passkey", {4096: 20, 8192: 20}),
    TaskResult.not_run("passkey", "passkey", 16384, MEMORY),
    *retrieval("passkey", "passkey", {32768: 17}),
    TaskResult.not_run("passkey", "passkey", 65536, MEMORY),
    *retrieval("passkey", "passkey", {131072: 9}),
]
KEY_TOKENS = [TaskResult("longppl", "longppl", n, 7, 3.3, (3.1, 3.6), unit="perplexity") for n in LENGTHS[:3]]
HALF_NEEDLE = [*needle(LENGTHS[:4]), TaskResult.not_run("needle", "generated", 65536, MEMORY)]
CHANCE = {"hellaswag": 25.0, "mmlu": 25.0}


def positions(**changes: Any) -> Figure:
    given = {"series": {"before": BEFORE, "after": AFTER}, "trained_length": 512}
    return evaluation.perplexity_figure(**{**given, **changes})


def score(**changes: Any) -> Figure:
    settings = {"series": {"before": FALLING, "after": HOLED}, "trained_length": 8192, "threshold": 85.6}
    return evaluation.score_figure(**{**settings, **changes})


def tasks(**changes: Any) -> Figure:
    some = [r for r in ruler() if r.task in ("niah_single_2", "vt", "qa_1", "qa_2", "overall")]
    settings = {"results": some, "trained_length": 8192, "threshold": 85.6}
    return evaluation.tasks_figure(**{**settings, **changes})


def needles(**changes: Any) -> Figure:
    return evaluation.needle_figure(**{"results": needle(), **changes})


def retention(**changes: Any) -> Figure:
    settings = {"series": {"before": short(), "after": short(0.07)}, "chance": CHANCE}
    return evaluation.retention_figure(**{**settings, **changes})


def differences(**changes: Any) -> Figure:
    return evaluation.difference_figure(**{"differences": DIFFERENCES, **changes})


FIGURES = [score, tasks, needles, retention, differences, positions]
EDGES = [
    (score, {"series": {"m": FALLING[:1]}, "trained_length": 4096}),
    (score, {"series": {"m": HOLED}, "trained_length": 131072}),
    (score, {"series": {f"{LONG} {n}": FALLING for n in range(8)}}),
    (score, {"series": {"m": KEY_TOKENS}, "threshold": None}),
    (score, {"series": {"m": retrieval("passkey", "passkey", {1000 + n: n for n in range(20)})}}),
    (tasks, {"results": [r for r in ruler(LENGTHS[:1]) if r.task in ("vt", "overall")]}),
    (tasks, {"results": [r for r in ruler() if r.task == "cwe"]}),
    (tasks, {"results": [scored("lm_eval", f"{LONG} {n}", 4096, 1, 2) for n in range(3)]}),
    (needles, {"results": needle(LENGTHS[:1], 1)}),
    (needles, {"results": needle(LENGTHS[:1], 3)}),
    (needles, {"results": HALF_NEEDLE}),
    (needles, {"results": [*needle(LENGTHS[:1], 1), *HALF_NEEDLE[-1:]]}),
    (needles, {"results": needle(tuple(range(1024, 41 * 1024, 1024)), 40, 1)}),
    (retention, {"series": {"m": short()[:1]}, "chance": None}),
    (retention, {"series": {f"{LONG} {n}": short() for n in range(4)}}),
    (
        retention,
        {"series": {"m": [scored("longbench", f"{LONG} {n}", None, n, 200 + n) for n in range(21)]}},
    ),
    (differences, {"differences": DIFFERENCES[:1]}),
    (differences, {"differences": [difference(LONG, n - 20, 3) for n in range(40)]}),
    (differences, {"names": ("base", "extended to 128k")}),
    (
        positions,
        {"series": {"m": perplexity([5.0 * 4**n for n in range(8)], [0, *(8192 * 2**n for n in range(8))])}},
    ),
]


@pytest.mark.parametrize("make", FIGURES)
def test_a_figure_explains_itself(make: Any) -> None:
    assert make().caption.endswith(".")


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (positions, {"series": {"a": perplexity([math.nan] * 4)}}, "no finite perplexity"),
        (positions, {"series": {}}, "no finite perplexity"),
        (score, {"series": {}}, "both a finite score and a length"),
        (score, {"series": {"m": HOLED[2:3]}}, "both a finite score and a length"),
        (score, {"series": {"m": [scored("short", "mmlu", None, 1, 2)]}}, "both a finite score and a length"),
        (score, {"series": {"m": ruler()}}, "one task, got 14; .*: ruler niah_single_1, ruler niah_single_2"),
        (score, {"series": dict.fromkeys("abcdefghi", FALLING)}, "at most 8 series, got 9"),
        (tasks, {"results": []}, "both a finite score and a length"),
        (tasks, {"results": short()}, "both a finite score and a length"),
        (needles, {"results": []}, "no result has scores by depth"),
        (needles, {"results": HALF_NEEDLE[-1:]}, "no result has scores by depth"),
        (needles, {"results": FALLING}, "no result has scores by depth"),
        (retention, {"series": {"m": short()[-1:]}}, "no result has a score in percent"),
        (retention, {"series": {"m": KEY_TOKENS}}, "no result has a score in percent"),
        (retention, {"series": dict.fromkeys("abcde", short())}, "at most 4 series, got 5"),
        (differences, {"differences": []}, "no finite score difference to draw"),
        (differences, {"differences": [not_compared("qa_1", "x")]}, "no finite score difference to draw"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    make: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RopewalkError, match=message) as refusal:
        make(**changes)
    assert "\n" not in str(refusal.value)


def test_perplexity_is_steps_with_bands_and_the_trained_length() -> None:
    panel = only(positions(title="stories"))
    found = lines(panel)
    assert found["before"].edges == (0, 512, 1024, 1536, 2048)
    assert found["before"].y == (2.64, 2.79, 3.19, 4.2)
    assert found["before"].look.dash != found["after"].look.dash
    bands = of_kind(panel, Boxes)[0]
    assert list(zip(bands.low, bands.high, strict=True)) == [each.ci95 for each in BEFORE.positions]
    assert bands.right == found["before"].edges[1:]
    assert rules(panel) == {"trained length 512": 512}
    assert ticks(panel.x) == ["0", "512", "1k", "1.5k", "2k"]
    assert (panel.x.label, panel.y.label) == ("position in the sequence (tokens)", "perplexity")
    assert (names(panel), ends(panel)) == ([], ["before", "after"])


def test_a_single_model_has_no_key_and_no_mark_beyond_the_rows() -> None:
    panel = only(positions(series={"model": BEFORE}, trained_length=8192))
    assert names(panel) == []
    assert rules(panel) == {}


def test_wide_ranges_of_perplexity_are_logarithmic() -> None:
    wide = perplexity([5.0 * 4**n for n in range(8)], [0, *(8192 * 2**n for n in range(8))])
    panel = only(positions(series={"before": wide}, trained_length=8192))
    assert (panel.x.scale, panel.y.scale) == ("log2", "log")
    assert ticks(panel.x)[:2] == ["8k", "16k"]
    assert ticks(panel.x)[-1] == "1M"
    # The first bin, from 0, begins at the left end.
    assert lines(panel) == {}
    (steps,) = [mark for mark in panel.marks if hasattr(mark, "edges")]
    assert steps.edges[0] == panel.x.limits[0] == 4096


def test_perplexities_that_are_no_number_are_gaps() -> None:
    holed = perplexity([2.0, math.nan, math.inf, 3.0])
    (steps,) = [mark for mark in only(positions(series={"a": holed})).marks if hasattr(mark, "edges")]
    assert [math.isnan(value) for value in steps.y] == [False, True, True, False]
    assert len(of_kind(only(positions(series={"a": holed})), Boxes)[0].left) == 2


def gaps(line: Any) -> list[bool]:
    return [math.isnan(value) for value in line.y]


def test_scores_have_bands_on_a_log_axis_of_lengths() -> None:
    panel = only(score())
    assert panel.x.scale == "log2"
    assert ticks(panel.x) == ["4k", "8k", "16k", "32k", "64k", "128k"]
    assert lines(panel)["before"].y == (100, 85, 40, 0, 0, 0)
    band = of_kind(panel, Area)[0]
    assert (band.low[1], band.high[1]) == FALLING[1].ci95
    looks = [(line.look.dash, line.look.marker) for line in lines(panel).values()]
    assert len(set(looks)) == 2
    assert rules(panel) == {"threshold\n85.6": 85.6, "trained length 8k": 8192}
    assert panel.y.label == "correct (%)"


def test_a_line_is_broken_where_nothing_was_run_and_the_reason_is_said() -> None:
    figure = score()
    assert gaps(lines(only(figure))["after"]) == [False, False, True, False, True, False]
    assert f"Not run: after at 16k, 64k ({MEMORY})." in figure.caption
    # Alone, the lengths that nobody ran keep their place on the axis.
    panel = only(score(series={"m": HOLED}))
    (line,) = of_kind(panel, Line)
    assert gaps(line) == [False, False, True, False, True, False]
    assert [note.x for note in of_kind(panel, Note) if note.text == "not run"] == [16384, 65536]
    # Points without neighbours have no band; they get whiskers.
    assert whiskers(panel) == [(32768, *HOLED[3].ci95), (131072, *HOLED[5].ci95)]


def test_scores_that_are_no_number_are_gaps() -> None:
    infinite = replace(KEY_TOKENS[1], score=math.inf, ci95=(3.0, math.inf))
    panel = only(score(series={"m": [KEY_TOKENS[0], infinite, KEY_TOKENS[2]]}, threshold=None))
    (line,) = of_kind(panel, Line)
    assert gaps(line) == [False, True, False]
    assert panel.y.label == "perplexity"


def test_a_trained_length_beyond_the_axis_is_not_marked() -> None:
    assert rules(only(score(trained_length=2**20, threshold=None))) == {}


def test_eight_models_can_be_told_apart_without_colour() -> None:
    found = lines(only(score(series={str(n): FALLING for n in range(8)}))).values()
    assert len({line.look.marker for line in found}) == 8
    assert len({line.look.colour for line in found}) == 8


def test_each_task_has_a_panel_and_the_overall_score_the_last() -> None:
    figure = tasks(results=ruler())
    assert [panel.title for panel in figure.panels] == [*RULER_TASKS, "overall"]
    assert [panel.bold for panel in figure.panels] == [False] * 13 + [True]
    assert len({(panel.x, panel.y) for panel in figure.panels}) == 1
    assert (figure.columns, figure.shared, figure.y_label) == (4, True, "correct (%)")
    by_task = {panel.title: panel for panel in figure.panels}
    assert list(of_kind(by_task["vt"], Line)[0].y) == [r.score for r in ruler() if r.task == "vt"]
    (reason,) = [text.replace("\n", " ") for text in notes(by_task["qa_1"])]
    assert reason == f"not run: {NO_QUESTIONS}"
    assert notes(by_task["niah_single_2"]) == ["not run"]
    assert "100 samples per point" in figure.caption
    assert (
        "The vertical line is the trained length, 8k. The horizontal line is the threshold" in figure.caption
    )
    assert "effective length, 85.6 %." in figure.caption


def test_needle_has_lengths_across_and_the_beginning_at_the_top() -> None:
    panel = only(needles(results=needle()[::-1]))
    assert ticks(panel.x) == ["4k", "8k", "16k", "32k", "64k", "128k"]
    assert ticks(panel.y) == [str(depth) for depth in range(0, 101, 10)]
    low, high = panel.y.limits
    assert low > high
    (cells,) = of_kind(panel, HeatMap)
    assert [row[4] for row in cells.values] == [cell["score"] for cell in needle()[4].details["depths"]]
    assert cells.text(cells.values[3][4]) == "20"
    assert cells.label == "correct (%)"
    # The same colours for the same scores, whatever the scores are.
    (perfect,) = of_kind(only(needles(results=needle(LENGTHS[:2]))), HeatMap)
    assert (perfect.low, perfect.high) == (cells.low, cells.high) == (0, 100)
    assert (perfect.colours, cells.colours) == ("even", "even")


def test_needle_cells_that_were_not_run_are_named() -> None:
    figure = needles(results=HALF_NEEDLE)
    panel = only(figure)
    assert ticks(panel.x)[-1] == "64k"
    assert [note.x for note in of_kind(panel, Note)] == [4]
    assert notes(panel) == ["not run"]
    (cells,) = of_kind(panel, HeatMap)
    assert [math.isnan(row[4]) for row in cells.values] == [True] * 11
    assert f"Hatched columns did not run ({MEMORY})." in figure.caption
    assert "without words" not in figure.caption
    odd = needles(results=[*needle(LENGTHS[:1], 3), *needle(LENGTHS[1:2], 5)])
    assert "no sample at this depth" in odd.caption


def test_retention_has_a_bar_a_model_and_marks_chance_only_where_it_is_known() -> None:
    panel = only(retention())
    assert [right for _, right, _, _ in boxes(panel)] == pytest.approx([79, 63, 54, 72, 56, 47])
    middles = [(low + high) / 2 for _, _, low, high in boxes(panel)]
    assert middles == pytest.approx([-0.2, 0.8, 1.8, 0.2, 1.2, 2.2])
    assert [mark.fill.hatch for mark in of_kind(panel, Boxes)] == ["///", ""]
    assert ticks(panel.y) == ["hellaswag", "mmlu", "arc_challenge", "truthfulqa_mc2"]
    assert notes(panel) == ["not run"] * 2
    assert [line.x for line in of_kind(panel, Line) if line.name == "chance"] == [(25, 25)] * 2
    assert names(panel) == ["before", "after", "chance"]
    assert names(only(retention(chance=None))) == ["before", "after"]


def test_retention_names_samples_and_what_has_no_bar() -> None:
    assert "; 1,000 samples per task." in retention().caption
    word = TaskResult("lm_eval", "wikitext", None, 62, 12.0, (11.0, 13.0), unit="perplexity")
    other = scored("short", "hellaswag", None, 5, 10042)
    figure = retention(series={"a": [*short(), word], "b": [other]})
    assert ticks(only(figure).y) == [
        "hellaswag, n 1,000 / 10,042",
        "mmlu, n 1,000",
        "arc_challenge, n 1,000",
        "truthfulqa_mc2",
    ]
    assert "Not shown because not in percent: wikitext." in figure.caption


def test_real_differences_are_filled_and_units_have_axes_of_their_own() -> None:
    figure = differences()
    percent, perplexities = figure.panels
    assert percent.x.label == "B minus A (percentage points)"
    assert perplexities.x.label == "B minus A (percent of the perplexity)"
    assert ticks(percent.y)[1] == "niah_multikey_2, 128k"
    real = {round(x, 1) for x, _ in points(percent, hollow=False)}
    chance = {round(x, 1) for x, _ in points(percent, hollow=True)}
    assert (real, chance) == ({-12.3, 25.0, -2.0, 40.0}, {0.5, -0.4})
    assert [text.strip() for text in notes(percent) if "not" in text] == ["not compared"]
    assert notes(perplexities) == ["-3.4 %"]
    assert names(percent) == ["significant", "not significant"]
    for panel in figure.panels:
        assert rules(panel) == {"": 0}
        low, high = panel.x.limits
        assert low < 0 < high


def test_an_interval_of_the_whole_scale_is_not_drawn() -> None:
    """Two seeds of four wrong answers: Student's interval is 0 to 100, and its band would look like a score of 100."""
    unsure = [replace(scored("passkey", "passkey", n, 0, 8), ci95=(0.0, 100.0)) for n in (512, 1024)]
    known = scored("passkey", "passkey", 2048, 0, 8)
    (panel,) = evaluation.score_figure({"a": [*unsure, known]}).panels
    (area,) = [mark for mark in panel.marks if isinstance(mark, Area)]
    assert [math.isnan(each) for each in area.high] == [True, True, False]
    sentence = "No interval is drawn where it is 0 to 100 %, because there are too few samples or seeds."
    assert sentence in evaluation.score_figure({"a": [*unsure, known]}).caption
    assert sentence not in evaluation.score_figure({"a": [known]}).caption


@pytest.mark.parametrize(
    "edges", [[*range(0, 8193, 128)], [0, *(1024 * q * 2**k for k in range(8) for q in (4, 5, 6, 7))]]
)
def test_many_position_bins_have_labels_with_room_between_them(edges: list[int]) -> None:
    (panel,) = evaluation.perplexity_figure({"m": perplexity([5.0] * (len(edges) - 1), edges)}).panels
    assert 3 <= len(panel.x.ticks) <= 11
