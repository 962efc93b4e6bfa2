"""What becomes of results: files, figures and the page of a folder; tables or JSON on stdout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.cli.output import print_json, print_whole, results

if TYPE_CHECKING:
    from ropewalk.evaluation.record import EvaluationResult
    from ropewalk.evaluation.results import TaskResult
    from ropewalk.reporting import Picture


def show(result: EvaluationResult, out: Path | None, as_json: bool) -> None:
    """Print results as JSON, or as tables with what they amount to below."""
    if as_json:
        print_json(dict(result.record))
        return
    from ropewalk.reporting import evaluation_tables

    for number, table in enumerate(evaluation_tables({str(result.record["model"]): result.results})):
        if number:
            results().print()
        print_whole(table.rich())
    told = findings(result.record, result.results)
    if told:
        results().print("\n" + "\n".join(told), soft_wrap=True, markup=False)
    if out is not None:
        results().print()
        results().say(str(out / "report.html"))


def findings(record: Mapping[str, Any], found: Sequence[TaskResult]) -> list[str]:
    """What the results amount to, a line each, and whether lengths are beyond what the model was made for."""
    beyond = {r.length: r.details["max_position_embeddings"] for r in found if r.details.get("beyond_config")}
    told = [*effective_sentences(record["summary"])]
    if beyond:
        lengths = ", ".join(f"{length:,}" for length in sorted(length for length in beyond if length))
        stated = next(iter(beyond.values()))
        told.append(f"Beyond the config's max_position_embeddings of {stated:,}: {lengths} tokens")
    return told


def effective_sentences(summary: Mapping[str, Any]) -> Iterator[str]:
    """How long a context every task was good for, a line each."""
    from ropewalk.io.lengths import format_length

    for each in summary["effective_length"]:
        task = (
            each["suite"] if each["task"] in (each["suite"], "overall") else f"{each['suite']} {each['task']}"
        )
        bar = f"{each['threshold']:g} %"
        if each["length"] is None:
            yield f"Effective length by {task}: none, the shortest scores {bar} or less"
        else:
            least = "at least " if each["length"] == each["longest"] else ""
            certain = each["certain"]
            if certain == each["length"]:
                told = ", certain by the intervals"
            else:
                told = f", certain to {format_length(certain)}" if certain else ", certain at no length"
            yield f"Effective length by {task}: {least}{format_length(each['length'])} (above {bar}{told})"
    averages = summary["ruler_weighted_average"]
    if averages is not None:
        yield (
            f"RULER over lengths: {averages['increasing']:.1f} with weights that rise with the length, "
            f"{averages['decreasing']:.1f} with weights that fall"
        )


def draw(out: Path, result: EvaluationResult) -> None:
    """The figures and the page of a result, each complete or not there.

    Args:
        out: the folder.
        result: what is shown.
    """
    from ropewalk.reporting import write_evaluation_report

    record, found = result.record, result.results
    name = Path(str(record["model"])).name
    pictures = pictures_of(out, name, found, record["settings"]["threshold"])
    shown = {**record, "findings": ". ".join(findings(record, found)) or None}
    write_evaluation_report(out, shown, found, pictures, examples(out, found))


def pictures_of(out: Path, name: str, found: Sequence[TaskResult], threshold: float) -> list[Picture]:
    """Figures where there is something to draw, in the order of the page."""
    from ropewalk.io.files import plain_name
    from ropewalk.reporting import draw as draw_figure
    from ropewalk.reporting import evaluation_figures

    # A task is named by results.json, which may have come from elsewhere.
    return [
        draw_figure(figure, out / plain_name(f"{stem}.png", out / "results.json"))
        for stem, figure in evaluation_figures(name, found, threshold)
    ]


def examples(out: Path, found: Sequence[TaskResult]) -> Iterator[dict[str, Any]]:
    """The predictions of these results, one after the other; the page takes a few."""
    from ropewalk.evaluation.store import PREDICTIONS, read_predictions

    wanted = {(result.suite, result.task, result.length) for result in found}
    for prediction in read_predictions(out / PREDICTIONS):
        if (prediction.suite, prediction.task, prediction.length) in wanted:
            yield prediction.to_json()
