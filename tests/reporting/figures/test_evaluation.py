"""Figures of an evaluation: what was measured is drawn, and what was not is said."""

import math
from dataclasses import replace
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.score_rows import ScoreRow, score_during, score_rows
from ropewalk.reporting.figures import evaluation
from ropewalk.reporting.figures.drawing import Figure
from tests.reporting.axes_cases import (
    areas,
    bars,
    boxes,
    cells,
    close,
    ends,
    every_line,
    gaps,
    is_bold,
    lines,
    names,
    note_texts,
    notes,
    only,
    panels,
    points,
    rules,
    scale,
    steps,
    ticks,
    whiskers,
    words,
)
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


def rows(results: Any) -> list[ScoreRow]:
    """Rows of results by model, or of a single model's."""
    return score_rows(results if isinstance(results, dict) else {"m": results})


def positions(series: Any = None, **changes: Any) -> Figure:
    given = {"before": [BEFORE], "after": [AFTER]} if series is None else series
    return evaluation.perplexity_figure(rows(given), **{"trained_length": 512, **changes})


def score(series: Any = None, **changes: Any) -> Figure:
    given = {"before": FALLING, "after": HOLED} if series is None else series
    return evaluation.score_figure(rows(given), **{"trained_length": 8192, "threshold": 85.6, **changes})


def tasks(results: Any = None, **changes: Any) -> Figure:
    some = [r for r in ruler() if r.task in ("niah_single_2", "vt", "qa_1", "qa_2", "overall")]
    given = rows(some if results is None else results)
    return evaluation.tasks_figure(given, **{"trained_length": 8192, "threshold": 85.6, **changes})


def needles(results: Any = None, **changes: Any) -> Figure:
    return evaluation.needle_figure(rows(needle() if results is None else results), **changes)


def retention(series: Any = None, **changes: Any) -> Figure:
    given = {"before": short(), "after": short(0.07)} if series is None else series
    return evaluation.retention_figure(rows(given), **changes)


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
    (retention, {"series": {"m": short()[:1]}}),
    (retention, {"series": {f"{LONG} {n}": short() for n in range(4)}}),
    (
        retention,
        {"series": {"m": [scored("longbench", f"{LONG} {n}", None, n, 200 + n) for n in range(21)]}},
    ),
    (differences, {"differences": DIFFERENCES[:1]}),
    (differences, {"differences": [difference(LONG, n - 20, 3) for n in range(40)]}),
    (differences, {"names": ("base", "extended to 128k")}),
    (differences, {"names": (f"{LONG} 1", f"{LONG} 2")}),
    (
        positions,
        {"series": [perplexity([5.0 * 4**n for n in range(8)], [0, *(8192 * 2**n for n in range(8))])]},
    ),
]


@pytest.mark.parametrize("make", FIGURES)
def test_a_figure_explains_itself(make: Any) -> None:
    assert make().caption.endswith(".")


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (positions, {"series": {"a": [perplexity([math.nan] * 4)]}}, "no finite perplexity"),
        (positions, {"series": {}}, "no finite perplexity"),
        (score, {"series": {}}, "both a finite score and a length"),
        (score, {"series": {"m": HOLED[2:3]}}, "both a finite score and a length"),
        (score, {"series": {"m": [scored("short", "mmlu", None, 1, 2)]}}, "both a finite score and a length"),
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
    assert found["before"].dash != found["after"].dash
    bands = boxes(panel)[:4]
    assert [band[2:] for band in bands] == [each.ci95 for each in BEFORE.positions]
    assert tuple(band[1] for band in bands) == found["before"].edges[1:]
    assert rules(panel) == {"trained length 512": 512}
    assert ticks(panel.xaxis) == ["0", "512", "1k", "1.5k", "2k"]
    assert (words(panel.xaxis), words(panel.yaxis)) == ("position in the sequence (tokens)", "perplexity")
    assert (names(panel), ends(panel)) == ([], ["before", "after"])


def test_a_single_model_has_no_key_and_no_mark_beyond_the_rows() -> None:
    panel = only(positions(series={"model": [BEFORE]}, trained_length=8192))
    assert names(panel) == []
    assert rules(panel) == {}


def test_wide_ranges_of_perplexity_are_logarithmic() -> None:
    wide = perplexity([5.0 * 4**n for n in range(8)], [0, *(8192 * 2**n for n in range(8))])
    panel = only(positions(series={"before": [wide]}, trained_length=8192))
    assert (scale(panel.xaxis), scale(panel.yaxis)) == ("log2", "log")
    assert ticks(panel.xaxis)[:2] == ["8k", "16k"]
    assert ticks(panel.xaxis)[-1] == "1M"
    # The first bin, from 0, begins at the left end.
    assert lines(panel) == {}
    (only_steps,) = steps(panel)
    assert only_steps.edges[0] == panel.get_xlim()[0] == 4096


def test_perplexities_that_are_no_number_are_gaps() -> None:
    holed = perplexity([2.0, math.nan, math.inf, 3.0])
    (only_steps,) = steps(only(positions(series={"a": [holed]})))
    assert gaps(only_steps) == [False, True, True, False]
    assert len(boxes(only(positions(series={"a": [holed]})))) == 2


def test_scores_have_bands_on_a_log_axis_of_lengths() -> None:
    panel = only(score())
    assert scale(panel.xaxis) == "log2"
    assert ticks(panel.xaxis) == ["4k", "8k", "16k", "32k", "64k", "128k"]
    assert lines(panel)["before"].y == (100, 85, 40, 0, 0, 0)
    assert areas(panel)[0][8192] == FALLING[1].ci95
    looks = [(line.dash, line.marker) for line in lines(panel).values()]
    assert len(set(looks)) == 2
    assert rules(panel) == {"threshold\n85.6": 85.6, "trained length 8k": 8192}
    assert words(panel.yaxis) == "correct (%)"


def test_a_line_is_broken_where_nothing_was_run_and_the_reason_is_said() -> None:
    figure = score()
    assert gaps(lines(only(figure))["after"]) == [False, False, True, False, True, False]
    assert f"Not run: after at 16k, 64k ({MEMORY})." in figure.caption
    # Alone, the lengths that nobody ran keep their place on the axis.
    panel = only(score(series={"m": HOLED}))
    (line,) = every_line(panel)
    assert gaps(line) == [False, False, True, False, True, False]
    assert [note.xy[0] for note in note_texts(panel) if note.get_text() == "not run"] == [16384, 65536]
    # Points without neighbours have no band; they get whiskers.
    assert close(whiskers(panel), [(32768, *HOLED[3].ci95), (131072, *HOLED[5].ci95)])


def test_scores_that_are_no_number_are_gaps() -> None:
    infinite = replace(KEY_TOKENS[1], score=math.inf, ci95=(3.0, math.inf))
    panel = only(score(series={"m": [KEY_TOKENS[0], infinite, KEY_TOKENS[2]]}, threshold=None))
    (line,) = every_line(panel)
    assert gaps(line) == [False, True, False]
    assert words(panel.yaxis) == "perplexity"


def test_a_trained_length_beyond_the_axis_is_not_marked() -> None:
    assert rules(only(score(trained_length=2**20, threshold=None))) == {}


def test_eight_models_can_be_told_apart_without_colour() -> None:
    found = lines(only(score(series={str(n): FALLING for n in range(8)}))).values()
    assert len({line.marker for line in found}) == 8
    assert len({line.colour for line in found}) == 8


def test_eight_cells_have_different_steps_by_position() -> None:
    series = {str(n): [perplexity([5.0 + n, 7.0 + n], [0, 128, 256])] for n in range(8)}
    panel = only(positions(series=series))
    assert len({each.get_edgecolor() for each in panel.patches}) == 8
    assert len({str(each.get_linestyle()) for each in panel.patches}) == 8
    with pytest.raises(RopewalkError, match="at most 8 series, got 9"):
        positions(series=series | {"8": series["0"]})


def test_each_task_has_a_panel_and_the_overall_score_the_last() -> None:
    figure = tasks(results=ruler())
    by_task = {panel.get_title(): panel for panel in panels(figure)}
    assert list(by_task) == [*RULER_TASKS, "overall"]
    assert [task for task, panel in by_task.items() if is_bold(panel.title)] == ["overall"]
    assert len({(panel.get_xlim(), panel.get_ylim()) for panel in panels(figure)}) == 1
    assert {panel.get_gridspec().ncols for panel in panels(figure)} == {4}
    assert figure.page.get_supylabel() == "correct (%)"
    assert list(every_line(by_task["vt"])[0].y) == [r.score for r in ruler() if r.task == "vt"]
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
    assert ticks(panel.xaxis) == ["4k", "8k", "16k", "32k", "64k", "128k"]
    assert ticks(panel.yaxis) == [str(depth) for depth in range(0, 101, 10)]
    low, high = panel.get_ylim()
    assert low > high
    found = cells(panel)
    assert [row[4] for row in found.values] == [cell["score"] for cell in needle()[4].details["depths"]]
    assert found.numbers[3 * 6 + 4] == "20" == f"{found.values[3][4]:.0f}"
    assert found.words == "correct (%)"
    # The same colours for the same scores, whatever the scores are.
    perfect = cells(only(needles(results=needle(LENGTHS[:2]))))
    assert (perfect.low, perfect.high) == (found.low, found.high) == (0, 100)
    assert (perfect.colours, found.colours) == ("cividis", "cividis")


def test_needle_cells_that_were_not_run_are_named() -> None:
    figure = needles(results=HALF_NEEDLE)
    panel = only(figure)
    assert ticks(panel.xaxis)[-1] == "64k"
    assert [note.xy[0] for note in note_texts(panel)] == [4]
    assert notes(panel) == ["not run"]
    assert [math.isnan(row[4]) for row in cells(panel).values] == [True] * 11
    assert f"Hatched columns did not run ({MEMORY})." in figure.caption
    assert "without words" not in figure.caption
    odd = needles(results=[*needle(LENGTHS[:1], 3), *needle(LENGTHS[1:2], 5)])
    assert "no sample at this depth" in odd.caption


def test_retention_has_a_bar_a_model() -> None:
    panel = only(retention())
    assert [right for _, right, _, _ in boxes(panel)] == pytest.approx([79, 63, 54, 72, 56, 47])
    middles = [(low + high) / 2 for _, _, low, high in boxes(panel)]
    assert middles == pytest.approx([-0.2, 0.8, 1.8, 0.2, 1.2, 2.2])
    assert [each.get_hatch() for each in bars(panel)] == ["///", None]
    assert ticks(panel.yaxis) == ["hellaswag", "mmlu", "arc_challenge", "truthfulqa_mc2"]
    assert notes(panel) == ["not run"] * 2
    assert names(panel) == ["before", "after"]


def test_retention_names_samples_and_what_has_no_bar() -> None:
    assert "; 1,000 samples per task." in retention().caption
    word = TaskResult("lm_eval", "wikitext", None, 62, 12.0, (11.0, 13.0), unit="perplexity")
    other = scored("short", "hellaswag", None, 5, 10042)
    figure = retention(series={"a": [*short(), word], "b": [other]})
    assert ticks(only(figure).yaxis) == [
        "hellaswag, n 1,000 / 10,042",
        "mmlu, n 1,000",
        "arc_challenge, n 1,000",
        "truthfulqa_mc2",
    ]
    assert "Not shown because not in percent: wikitext." in figure.caption


def test_real_differences_are_filled_and_units_have_axes_of_their_own() -> None:
    figure = differences()
    percent, perplexities = panels(figure)
    assert words(percent.xaxis) == "B minus A (percentage points)"
    assert words(perplexities.xaxis) == "B minus A (percent of the perplexity)"
    assert ticks(percent.yaxis)[1] == "niah_multikey_2, 128k"
    real = {round(x, 1) for x, _ in points(percent, hollow=False)}
    chance = {round(x, 1) for x, _ in points(percent, hollow=True)}
    assert (real, chance) == ({-12.3, 25.0, -2.0, 40.0}, {0.5, -0.4})
    assert [text.strip() for text in notes(percent) if "not" in text] == ["not compared"]
    assert notes(perplexities) == ["-3.4 %"]
    assert names(percent) == ["significant", "not significant"]
    for panel in panels(figure):
        assert rules(panel) == {"": 0}
        low, high = panel.get_xlim()
        assert low < 0 < high


def test_an_interval_of_the_whole_scale_is_not_drawn() -> None:
    """Two seeds of four wrong answers: Student's interval is 0 to 100, and its band would look like a score of 100."""
    unsure = [replace(scored("passkey", "passkey", n, 0, 8), ci95=(0.0, 100.0)) for n in (512, 1024)]
    known = scored("passkey", "passkey", 2048, 0, 8)
    panel = only(evaluation.score_figure(rows([*unsure, known])))
    assert [(list(area), [high for _, high in area.values()]) for area in areas(panel)] == [
        ([2048], [known.ci95[1]])
    ]
    sentence = "No interval is drawn where it is 0 to 100 %, because there are too few samples or seeds."
    assert sentence in evaluation.score_figure(rows([*unsure, known])).caption
    assert sentence not in evaluation.score_figure(rows([known])).caption


@pytest.mark.parametrize(
    "edges", [[*range(0, 8193, 128)], [0, *(1024 * q * 2**k for k in range(8) for q in (4, 5, 6, 7))]]
)
def test_many_position_bins_have_labels_with_room_between_them(edges: list[int]) -> None:
    panel = only(positions([perplexity([5.0] * (len(edges) - 1), edges)]))
    assert 3 <= len(ticks(panel.xaxis)) <= 11


def during(length, value, task="passkey", ends=(None, None), unit="percent"):
    score = {
        "suite": "passkey",
        "task": task,
        "length": length,
        "n": 4,
        "score": value,
        "unit": unit,
        "ci95": list(ends),
    }
    return score_during(score)


def test_curves_have_a_line_and_a_band_a_length():
    scores = {2: [during(512, 50.0, ends=(20, 80)), during(1024, 0.0)], 4: [during(512, 75.0, ends=(40, 90))]}
    panel = only(evaluation.curve_figure(scores, "passkey during training"))
    assert {name: (line.x, line.y) for name, line in lines(panel).items()} == {
        "512 tokens": ((2, 4), (50, 75)),
        "1k tokens": ((2,), (0,)),
    }
    assert areas(panel) == [{2: (20, 80), 4: (40, 90)}, {}]
    with pytest.raises(RopewalkError, match="no score from an evaluation during training"):
        evaluation.curve_figure({})


def test_many_tasks_are_drawn_as_their_mean():
    figure = evaluation.curve_figure({2: [during(512, 10.0 * n, f"task{n}") for n in range(9)]})
    (line,) = every_line(only(figure))
    assert (line.name, line.y) == ("512 tokens", (40.0,))
    assert "Mean over all tasks" in figure.caption


def test_a_perplexity_that_is_infinite_is_a_gap():
    values = {2: 9.0, 4: math.inf, 6: 8.0}
    scores = {step: [during(512, value, unit="perplexity")] for step, value in values.items()}
    (line,) = every_line(only(evaluation.curve_figure(scores)))
    assert gaps(line) == [False, True, False]
    with pytest.raises(RopewalkError, match="no score from an evaluation during training"):
        evaluation.curve_figure({4: scores[4]})


def breakdown(length, **details):
    return TaskResult("passkey", "passkey", length, 50, 50.0, (40.0, 60.0), details=details)


def level(name, value, score):
    return {name: value, "n": 10, "score": score, "ci95": [score - 5, score + 5]}


def test_a_curve_by_depth_has_a_line_for_each_length():
    results = [
        breakdown(length, fifths=[level("depth", depth, 100 * depth) for depth in (0.1, 0.3, 0.5, 0.7, 0.9)])
        for length in (4096, 8192)
    ]
    panel = only(evaluation.depth_curve_figure(score_rows({"model": results})))
    found = lines(panel)
    assert list(found) == ["4k tokens", "8k tokens"]
    assert [line.y for line in found.values()] == [pytest.approx((10, 30, 50, 70, 90))] * 2
    assert ticks(panel.xaxis) == ["0 to 20", "20 to 40", "40 to 60", "60 to 80", "80 to 100"]
    with pytest.raises(RopewalkError, match="no result has scores by depth"):
        evaluation.depth_curve_figure(score_rows({"model": [breakdown(4096)]}))


def test_a_map_by_difficulty_has_a_cell_for_each_length():
    results = [
        breakdown(length, difficulties=[level("difficulty", n, 10 * n) for n in (2, 4, 8)])
        for length in (4096, 8192)
    ]
    panel = only(evaluation.difficulty_figure(score_rows({"model": results})))
    assert cells(panel).values == [[20, 20], [40, 40], [80, 80]]
    assert ticks(panel.yaxis) == ["2", "4", "8"]
    with pytest.raises(RopewalkError, match="no result has scores by difficulty"):
        evaluation.difficulty_figure(score_rows({"model": [breakdown(4096)]}))
