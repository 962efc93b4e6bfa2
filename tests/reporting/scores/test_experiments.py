"""A comparison as tables, figures and a page: conclusion first, hostile names harmless."""

from dataclasses import replace
from pathlib import Path

from ropewalk.evaluation.comparison import ScoreDifference
from ropewalk.evaluation.results import TaskResult
from ropewalk.experiments.run import Cell, ExperimentResult, Failure
from ropewalk.experiments.statistics import means_over_seeds
from ropewalk.reporting.scores.experiments import (
    describe_experiment,
    experiment_figures,
    experiment_tables,
    report_experiment,
)
from tests.reporting.axes_cases import boxes, only, panels
from tests.reporting.reporting_cases import perplexity

HOSTILE = "<script>alert(1)</script>\x1b[31m"


def cell(name, score):
    results = [TaskResult("passkey", "passkey", n, 30, score, (score - 5, score + 5)) for n in (256, 512)]
    return Cell(name, (0, 1, 2), tuple(results), 0.5, 1234.5)


DIFFERENCE = ScoreDifference("passkey", "passkey", 512, "percent", 30, 50, 62, 12, (3, 21), 0.01, 0.02, True)
RESULT = ExperimentResult(
    Path("out"),
    "full",
    (cell("full", 50.0), cell(HOSTILE, 62.0)),
    {HOSTILE: (DIFFERENCE,)},
    (Failure("anchor", 2, f"{HOSTILE} fell over", Path("out/cells/anchor/seed-2.log")),),
    1,
    "One sentence.",
)


def test_the_conclusion_comes_first_and_failures_are_named():
    lines = [str(part) for part in describe_experiment(RESULT, (Path("out/report.html"),))]
    assert lines[0] == "One sentence."
    assert any(line.startswith("failed   anchor, seed 2:") and "\x1b" not in line for line in lines)
    assert any("1 run is not finished; run the same command again to resume it" in line for line in lines)
    assert lines[-1] == "report   out/report.html"


def test_a_table_of_scores_one_of_differences_and_one_of_cost():
    titles = [table.title for table in experiment_tables(RESULT)]
    assert titles[0].startswith("Passkey")
    assert "Change from full" in titles[1]
    assert titles[2].startswith("Cells")
    assert "1,234" in str(experiment_tables(RESULT)[2].rows)
    assert not any("memory" in heading for heading in experiment_tables(RESULT)[2].header)


def test_differences_over_seeds_name_their_own_test():
    table = experiment_tables(RESULT)[1]
    assert "paired by seed and sample" in table.title
    assert any("Student's t distribution" in note for note in table.notes)
    assert not any("permutation" in note for note in table.notes)


def test_degrees_of_freedom_are_a_column():
    found = {HOSTILE: (replace(DIFFERENCE, freedom=3.456),)}
    table = experiment_tables(replace(RESULT, differences=found))[1]
    assert table.rows[0][table.header.index("df")] == "3.46"
    assert experiment_tables(RESULT)[1].rows[0][table.header.index("df")] == "–"
    assert any("all cells share" in note for note in table.notes)


def test_few_seeds_and_bands_are_explained_where_intervals_are():
    def said(*seeds):
        cells = tuple(replace(each, seeds=own) for each, own in zip(RESULT.cells, seeds, strict=True))
        return " ".join(experiment_tables(replace(RESULT, cells=cells))[0].notes)

    assert "2 seeds: the interval reaches 12.7 standard errors" in said((0, 1), (0, 1, 2, 3))
    assert "3 seeds: the interval reaches 4.3 standard errors" in said((0, 1, 2), (0,))
    assert "standard errors" not in said((0, 1, 2, 3), (0, 1, 2, 3))
    assert "lowest to highest seed" in said((0, 1, 2, 3), (0, 1, 2, 3))
    assert not said((0,), (0,))


def test_times_have_the_unit_that_people_would_use_and_their_spread():
    first, second = RESULT.cells
    cells = (
        replace(first, hours=0.002, fewest_hours=0.001, most_hours=0.003, tokens=8192.0),
        replace(second, hours=12.34),
    )
    table = experiment_tables(replace(RESULT, cells=cells))[2]
    assert [row[2:5] for row in table.rows] == [
        ("8,192", "7.2 seconds", "3.6 seconds to 11 seconds"),
        ("", "12.3 hours", ""),
    ]
    alone = experiment_tables(replace(RESULT, cells=(replace(first, seeds=(0,)),), differences={}))[-1]
    assert "lowest to highest" not in alone.header


def test_perplexity_by_position_is_a_figure_for_any_number_of_seeds():
    def of(seeds):
        results = {seed: [perplexity([5.0 + seed, 7.0 - seed], [0, 128, 256])] for seed in seeds}
        samples = [{"index": 0, "nats": 6.0, "tokens": 3}, {"index": 1, "nats": 7.0, "tokens": 3}]
        results = {seed: [replace(each, samples=samples)] for seed, (each,) in results.items()}
        return Cell("c", tuple(seeds), tuple(means_over_seeds(results)), None, None)

    def drawn(*cells):
        figures = experiment_figures(replace(RESULT, cells=cells, differences={}))
        # One length alone has no figure by length.
        assert list(figures) == ["perplexity-by-position.png"]
        return figures["perplexity-by-position.png"]

    figure = drawn(of(range(3)))
    assert [box[2:] for box in boxes(only(figure))] == [(5.0, 7.0), (5.0, 7.0)]
    assert "from the lowest to the highest seed." in figure.caption
    assert figure.title.endswith("mean over seeds")
    alone = drawn(of([0]))
    assert "Bands are 95 % intervals over sequences." in alone.caption
    assert "seeds" not in alone.title
    mixed = drawn(of(range(2)), replace(of([0]), name="d"))
    assert "with one seed, they are 95 % intervals over sequences" in mixed.caption


def test_memory_is_a_cost_that_says_of_what():
    first, second = RESULT.cells
    cells = (replace(first, process_memory=3 * 2**29), replace(second, gpu_memory=2**31))
    table = experiment_tables(replace(RESULT, cells=cells))[2]
    assert table.header[-2:] == ("peak GPU memory (GiB)", "peak memory of the process (GiB)")
    assert [row[-2:] for row in table.rows] == [("", "1.50"), ("2.00", "")]


def test_a_figure_for_each_suite_and_each_cell():
    assert list(experiment_figures(RESULT)) == ["passkey.png", "difference-1.png"]
    alone = replace(RESULT, cells=RESULT.cells[:1], differences={})
    assert list(experiment_figures(alone)) == ["passkey.png"]


def test_the_tasks_of_a_suite_are_panels_of_one_figure(tmp_path):
    second = [
        replace(cell, results=(*cell.results, *(replace(each, task="forced") for each in cell.results)))
        for cell in RESULT.cells
    ]
    figures = experiment_figures(replace(RESULT, cells=tuple(second)))
    assert list(figures) == ["passkey.png", "difference-1.png"]
    assert len(panels(figures["passkey.png"])) == 2
    assert len({panel.get_title("left") for panel in panels(figures["passkey.png"])}) == 2
    report_experiment(replace(RESULT, cells=tuple(second)), tmp_path)


def test_names_are_text_on_the_page(tmp_path):
    page, *pictures = report_experiment(RESULT, tmp_path)
    text = page.read_text()
    assert "<script>" not in text
    assert "\x1b" not in text
    assert "full (3 seeds)" in text
    assert '<p class="lead">One sentence.</p>' in text
    assert text.index("One sentence.") < text.index("<dl>")
    assert all(picture.is_file() for picture in pictures)


def test_the_limit_of_the_statistics_is_said_where_it_applies():
    def says_it(result):
        return any(
            "8 % if that cell is the reference" in str(part) for part in describe_experiment(result, ())
        )

    three = replace(RESULT, cells=(*RESULT.cells, cell("reset", 50.0)))
    assert says_it(three)
    assert not says_it(RESULT)
    assert not says_it(replace(three, differences={HOSTILE: (replace(DIFFERENCE, real=False),)}))
    assert not says_it(replace(three, cells=tuple(replace(each, seeds=(0,)) for each in three.cells)))
