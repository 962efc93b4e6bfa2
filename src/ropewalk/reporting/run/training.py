"""Show a finished training run: figures, tables and the report page, built from the files in its folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropewalk.compatibility import readings
from ropewalk.data.mixture.report import mixture_sentences
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.score_rows import ScoreRow, score_during, score_rows
from ropewalk.evaluation.settings import ANSWERS
from ropewalk.evaluation.tasks.passkey import SUITE
from ropewalk.experiments.finished_runs import cost_of
from ropewalk.io.files import parse_json
from ropewalk.io.lengths import duration, format_length
from ropewalk.models.checkpoint.card import CARD, is_own_card
from ropewalk.models.config.auto_class import name_of_class
from ropewalk.models.config.file import read_config_file
from ropewalk.reporting import answers
from ropewalk.reporting.compatibility import readers_parts
from ropewalk.reporting.figures.evaluation import curve_figure, perplexity_figure, score_figure
from ropewalk.reporting.figures.search import FactorLines, search_figure
from ropewalk.reporting.figures.training import training_figure
from ropewalk.reporting.page import Page, Picture, write_page
from ropewalk.reporting.run.before_after import conclusion, difference_tables, run_differences, run_results
from ropewalk.reporting.run.model_card import write_model_card
from ropewalk.reporting.scores.tables import evaluation_tables
from ropewalk.reporting.tables import Part, ResultTable
from ropewalk.rope import Default, LongRope
from ropewalk.search import goal_of, rescale_factors
from ropewalk.training.answers import answers_of_run
from ropewalk.training.final_weights import describe_weights
from ropewalk.training.folder import METRICS, PAGE, RECIPE, SUMMARY
from ropewalk.training.measurement import describe_short_context
from ropewalk.training.metrics import MetricsLog
from ropewalk.training.recipe.stage import describe_own_settings
from ropewalk.training.softmax_scale import describe_softmax_scale
from ropewalk.training.stage_rope.auto import describe_choice
from ropewalk.training.stage_rope.search import describe_search
from ropewalk.training.summary import RunResult, StoppedRun

KINDS = {PAGE: "report", answers.PAGE: "answers"}
"""What a run's pages are called in the terminal; other files are pictures."""


def _processes(summary: dict[str, Any]) -> dict[str, object]:
    """Degrees of parallelism of a run; empty for a single process."""
    found = summary["processes"]
    if found["number"] == 1:
        return {}
    degrees = [f"{degree} {name}" for name, degree in found.items() if name != "number" and degree > 1]
    return {"Processes": f"{found['number']}: {' x '.join(degrees)}"}


def _source(summary: dict[str, Any]) -> dict[str, object]:
    """The model before the run, and its RoPE before and after."""
    source, last = summary["source"], summary["stages"][-1]
    return {
        "Source model": source_words(source),
        **({} if source["sha256"] is None else {"Digest": source["sha256"]}),
        "RoPE before": f"{source['rope']['method']} with rope_theta {source['rope']['rope_theta']:,.0f}",
        "RoPE after": f"{last['method']} with rope_theta {last['rope_theta']:,.0f}",
    }


def source_words(source: Mapping[str, Any]) -> str:
    """Name of the model before the run, with its revision on the Hub if that is known."""
    return f"{source['name']}, revision {source['revision']}" if source["revision"] else str(source["name"])


def _cost(output: Path) -> dict[str, object]:
    """Time and speed of the training; empty without training."""
    cost = cost_of(output)
    if cost.tokens_per_second is None:
        return {}
    time = duration(3600 * cost.hours)
    return {"Cost": f"{time} of training, {cost.tokens_per_second:,.0f} tokens per second"}


def _training(stage: dict[str, Any]) -> str:
    if not stage["steps"]:
        return "not trained"
    return f"{stage['pattern']}, {stage['steps']} steps, {stage['tokens']:,} tokens trained{_kinds(stage)}"


def _as_factors(stage: dict[str, Any]) -> str:
    return " as longrope's long factors" if "kinds" in stage and stage["method"] != LongRope.name else ""


def _kinds(stage: dict[str, Any]) -> str:
    """Shares of short and of long rows; nothing where all rows have one RoPE."""
    if "kinds" not in stage:
        return ""
    told = [
        f"{each['rows_share']:.1%} of the rows and {each['trained_tokens_share']:.1%} of the trained tokens are {kind} "
        f"rows ({each['documents']})"
        for kind, each in stage["kinds"].items()
    ]
    return f"; {'; '.join(told)}"


def _other_layers(stage: dict[str, Any]) -> str:
    """RoPE of the layer types that do not limit the context; nothing where all layers share one."""
    return "".join(
        f"; layers of type {kind}: {rope['method']} with rope_theta {rope['rope_theta']:,.0f}"
        for kind, rope in stage.get("other_layers", {}).items()
    )


def _short(summary: dict[str, Any]) -> dict[str, object]:
    """What a run measured for its final weights besides evaluations; empty for most RoPE methods."""
    facts: dict[str, object] = {}
    if (searched := summary.get("short_factors")) is not None:
        facts["Short factors"] = describe_search(searched)
    if (short := summary.get("short_context")) is not None:
        facts["Short context"] = describe_short_context(short)
    if (scaled := summary.get("softmax_scale")) is not None:
        facts["Softmax scale"] = describe_softmax_scale(scaled)
    return facts


def _exported(summary: dict[str, Any]) -> dict[str, object]:
    """Facts about the checkpoints that the result is made of; empty for the last one."""
    found = summary.get("exported")
    return {} if found is None else {"Weights": describe_weights(found)}


def _factor_lines(summary: dict[str, Any]) -> FactorLines | None:
    """Factors of a longrope run beside those of rules; None for other methods."""
    last, original = summary["stages"][-1], summary.get("original_length")
    if original is None:
        return None
    plain = Default(2 * len(last["long_factor"]), last["rope_theta"])
    # Periods before scaling: a pair's own factor must not decide whether it counts as unseen in training.
    periods = (2 * math.pi / plain.frequencies().inv_freq).tolist()
    rules = goal_of(plain, original, summary["context"]).baselines()
    return FactorLines(
        {"long": last["long_factor"], "short": last["short_factor"]},
        {name: rescale_factors(method) for name, method in rules.items()},
        periods,
        original,
    )


def run_tables(summary: dict[str, Any]) -> list[ResultTable]:
    """Tables of a run before and after training."""
    return evaluation_tables(run_results(summary))


def scores_during(summary: dict[str, Any]) -> dict[str, dict[int, list[ScoreRow]]]:
    """Scores of the evaluations during training by suite, each with its step counted over all stages."""
    found: dict[str, dict[int, list[ScoreRow]]] = {}
    for each in summary.get("during", ()):
        step = each["step"] + sum(stage["steps"] for stage in summary["stages"][: each["stage"]])
        for score in each["scores"]:
            if score["score"] is not None:
                found.setdefault(score["suite"], {}).setdefault(step, []).append(score_during(score))
    return found


def write_run_report(output: Path) -> list[Path]:
    """Write the figures and ``report.html`` of a finished run into its folder; returns the files, the page first.

    Raises:
        RopewalkError: if the run is not finished, or the folder cannot be written.
    """
    # Imported here because matplotlib takes a second to import.
    from ropewalk.reporting.figures.drawing import draw_for_page

    try:
        summary = parse_json((output / SUMMARY).read_text(encoding="utf-8"), strict=True)
    except OSError as error:
        raise RopewalkError(f"{output} is not the folder of a finished run: it has no {SUMMARY}") from error
    except ValueError as error:
        raise RopewalkError(
            f"{output / SUMMARY} is damaged ({error}); delete this file, and --resume will write it again"
        ) from error
    rows = score_rows(run_results(summary))
    trained, context = summary["trained_length"], summary["context"]
    what = f"{format_length(trained)} to {format_length(context)} tokens"
    pictures = []
    # Only the target length: shorter lengths have the same shape and would hide the difference there.
    perplexity = [
        row for row in rows if (row.suite, row.task, row.length) == ("perplexity", "perplexity", context)
    ]
    if any(row.cell is not None and math.isfinite(row.value) for row in perplexity):
        figure = perplexity_figure(perplexity, trained, f"Perplexity by position, {what}")
        pictures.append(draw_for_page(figure, output / "perplexity.png"))
    pictures += draw_passkey(rows, trained, output)
    if steps := MetricsLog(output / METRICS).read():
        # By tokens, because the steps of two stages may train on different numbers of them.
        figure = training_figure(steps, "Training loss", x_key="tokens")
        pictures.append(draw_for_page(figure, output / "training.png"))
    for suite, scores in scores_during(summary).items():
        figure = curve_figure(scores, f"{suite} during training")
        pictures.append(draw_for_page(figure, output / f"during-{suite}.png"))
    if (lines := _factor_lines(summary)) is not None:
        figure = search_figure(lines=lines, title=f"Rescale factors, {what}")
        pictures.append(draw_for_page(figure, output / "factors.png"))
    page = output / PAGE
    stages = [
        f"{format_length(stage['context'])} tokens, {stage['method']}{_as_factors(stage)} with rope_theta "
        f"{stage['rope_theta']:,.0f}, "
        + _training(stage)
        + _other_layers(stage)
        + (f"; {describe_own_settings(stage['own'])}" if "own" in stage else "")
        + (f"; {describe_choice(stage['choice'])}" if "choice" in stage else "")
        + (f"; {describe_search(stage['search'])}" if "search" in stage else "")
        for stage in summary["stages"]
    ]
    facts: dict[str, object] = {
        **_source(summary),
        "Context": what,
        "Result": summary["model"],
        **{f"Stage {number}": text for number, text in enumerate(stages, start=1)},
        **_short(summary),
        **_exported(summary),
        "Attention engine": f"{summary['engine']} on {summary['device']}, {summary['precision']}",
        **_processes(summary),
        **_cost(output),
    }
    mixtures = {
        f"Documents of stage {number}": "\n".join(sentences)
        for number, stage in enumerate(summary["stages"], start=1)
        if "mixture" in stage and (sentences := mixture_sentences(stage))
    }
    details = {
        **mixtures,
        # The run's own copy, which also records what --resume changed.
        "Recipe": (output / RECIPE).read_text(encoding="utf-8"),
        "Versions": json.dumps(summary["versions"], indent=2),
    }
    differences = run_differences(summary)
    # Before the page, which has a link to it.
    sides = answers_of_run(output)
    title = f"Answers of {output.resolve().name} before and after training"
    shown = answers.write_answers(output / ANSWERS, title, sides).page if sides else None
    write_page(
        Page(
            f"Context extended from {what}",
            facts,
            pictures,
            run_tables(summary),
            details=details,
            lead=conclusion(trained, context, differences),
            links={} if shown is None else {"Every answer before and after": f"{ANSWERS}/{shown.name}"},
            first=difference_tables(differences),
        ),
        page,
    )
    return [page, *([] if shown is None else [shown]), *(picture.path for picture in pictures)]


def draw_passkey(rows: Sequence[ScoreRow], trained_length: int, output: Path) -> list[Picture]:
    """Draw the passkey scores of each task that ran, by model name, into a run's folder."""
    from ropewalk.reporting.figures.drawing import draw_for_page

    pictures = []
    for task, title in SUITE.titles.items():
        own = [row for row in rows if (row.suite, row.task) == (SUITE.name, task)]
        if any(row.ran and row.length is not None for row in own):
            name = SUITE.name if task == SUITE.main else f"{SUITE.name}-{task}"
            figure = score_figure(own, trained_length, title)
            pictures.append(draw_for_page(figure, output / f"{name}.png"))
    return pictures


def reported(result: RunResult) -> RunResult:
    """Write the model card and the report into the run's folder, and return the result with the report's files.

    Raises:
        RopewalkError: if the folder cannot be written.
    """
    write_model_card(result.output)
    # Last, since its page tells that nothing is missing.
    files = tuple(write_run_report(result.output))
    return replace(result, files=files, readers=tuple(readings(str(result.model))))


def describe_stop(result: StoppedRun) -> Iterator[Part]:
    """Where a run has stopped, and how it goes on."""
    yield f"stopped after stage {result.stage} of {result.stages} because of --until-stage"
    yield f"{'checkpoint':10} {result.checkpoint}"
    yield f"{'next':10} the same command with --resume, and without --until-stage, trains stage {result.stage + 1}"


def describe_run(result: RunResult) -> Iterator[Part]:
    """Tables of a run, the paths of its model and report, and how to load the model.

    Args:
        result: a result that :func:`reported` returned.
    """
    values = result.to_json()
    for table in run_tables(values):
        yield ""
        yield table
    yield ""
    # The sentence that the page begins with.
    yield conclusion(result.trained_length, result.context, run_differences(values))
    yield ""
    facts = [("model", str(result.model))]
    if result.adapter is not None:
        facts.append(("adapter", str(result.adapter)))
    if result.short_context is not None:
        facts.append(("short", describe_short_context(result.short_context)))
    if result.softmax_scale is not None:
        facts.append(("scale", describe_softmax_scale(result.softmax_scale)))
    if result.exported is not None:
        facts.append(("weights", describe_weights(result.exported)))
    for path in result.files or ():
        facts.append((KINDS.get(path.name, "picture"), str(path)))
    # A card that somebody has edited is kept, so it may describe another run.
    card = result.model / CARD
    facts.append(
        ("card", str(card) if is_own_card(card) else f"{card} is not from this run and was left as it is")
    )
    name = name_of_class(read_config_file(str(result.model)).get("model_type"))
    loads = f"{name}.from_pretrained({str(result.model)!r}) loads it in plain transformers"
    publish = f"ropewalk export {result.output} --push OWNER/NAME"
    for name, value in (*facts, ("next", loads), ("publish", publish)):
        yield f"{name:8} {value}"
    if result.readers:
        yield ""
        yield from readers_parts(result.readers, "RoPE of the model in other programs")
