"""What becomes of results: files, figures and the page of a folder; tables or JSON on stdout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.cli.output import print_json, print_whole, results

if TYPE_CHECKING:
    from ropewalk.cli.evaluate_run import Output
    from ropewalk.evaluation.results import TaskResult
    from ropewalk.reporting import Picture


def show(record: Mapping[str, Any], found: Sequence[TaskResult], output: Output) -> None:
    """Print results as JSON, or as tables with what they amount to below."""
    if output.as_json:
        print_json(dict(record))
        return
    from ropewalk.reporting import evaluation_tables

    for number, table in enumerate(evaluation_tables({str(record["model"]): found})):
        if number:
            results().print()
        print_whole(table.rich())
    told = findings(record, found)
    if told:
        results().print("\n" + "\n".join(told), soft_wrap=True, markup=False)
    if output.out is not None:
        results().print()
        results().say(str(output.out / "report.html"))


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


def write(
    out: Path,
    record: Mapping[str, Any],
    found: Sequence[TaskResult],
    checkpoints: Sequence[tuple[Mapping[str, Any], Sequence[TaskResult]]] = (),
) -> None:
    """The files of a result, each complete or not there: figures, page, and last results.json.

    Args:
        out: the folder.
        record: what results.json holds.
        found: the results in it.
        checkpoints: what each one is known by and its own results, where ``found`` is their mean.
    """
    from ropewalk.evaluation.record import summarise
    from ropewalk.io.files import write_json
    from ropewalk.reporting import write_evaluation_report

    for known, each in checkpoints:
        own = {key: value for key, value in record.items() if key not in ("checkpoints", "summary")}
        own |= {**known, "model": str(Path(str(record["model"])) / known["name"])}
        own["results"] = [result.to_json() for result in each]
        own["summary"] = summarise(each, record["settings"]["threshold"])
        write_json(out / known["name"] / "results.json", _plain(own))
    name = Path(str(record["model"])).name
    pictures = draw(out, name, found, record["settings"]["threshold"])
    shown = {**record, "findings": ". ".join(findings(record, found)) or None}
    write_evaluation_report(out, shown, found, pictures, examples(out, found))
    # Last, so that where it stands the others do.
    write_json(out / "results.json", _plain(record))


def _plain(value: Mapping[str, Any]) -> Any:
    """JSON values with null for numbers that JSON does not have."""
    return json.loads(json.dumps(value), parse_constant=lambda name: None)


def draw(out: Path, name: str, found: Sequence[TaskResult], threshold: float) -> list[Picture]:
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
    from ropewalk.evaluation.predictions import read_predictions
    from ropewalk.evaluation.record import PREDICTIONS

    wanted = {(result.suite, result.task, result.length) for result in found}
    for prediction in read_predictions(out / PREDICTIONS):
        if (prediction.suite, prediction.task, prediction.length) in wanted:
            yield prediction.to_json()
