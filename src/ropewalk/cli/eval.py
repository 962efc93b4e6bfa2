"""``ropewalk eval``: measure a checkpoint, or a model behind a server, on long-context benchmarks."""

from __future__ import annotations

import logging
import os
import shlex
import sys
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command, make_group_with_default
from ropewalk.cli.output import JsonFlag, PlotFile, Terminal, figure_of, resumable, run_context, show_result
from ropewalk.errors import RunFailure
from ropewalk.evaluation.settings import (
    CompareSettings,
    EvaluationSettings,
    ExportSettings,
    JudgeSettings,
    ViewSettings,
)
from ropewalk.evaluation.tasks.suite import WAITING
from ropewalk.io.settings import COMMON, FilePath, Folder, Option

if TYPE_CHECKING:
    from ropewalk.evaluation.run import RopeOf
    from ropewalk.parallel import World


MOST_LEFT_OUT = 1000
"""Characters with which the names of results without answers are printed."""


def evaluate(
    settings: EvaluationSettings,
    *,
    out: Annotated[
        Folder | None,
        COMMON,
        Field(
            description="Folder for results, predictions, figures and a report page. Run the same command again to "
            "resume. Default: write no files."
        ),
    ] = None,
    as_json: Annotated[JsonFlag, COMMON] = False,
) -> None:
    """Measure a checkpoint on long-context and short-context benchmarks, with 95 % confidence intervals.

    Suites: ruler (RULER), passkey (find a number hidden in the text), longeval (LongChat's line retrieval), needle
    (needle in a haystack, at several depths), nolima (facts that share no word with the question), graphwalks
    (questions about the edges of a graph), icl (label a text by many labelled ones), mrcr (one of several answers to
    the same request in a chat), counting (count and compare classes of lines), ruler2 (RULERv2, of which ten tasks need
    MMLU or HotpotQA), babilong (bAbI's facts in a long text), perplexity, longppl (LongPPL, the perplexity of
    those tokens that need a long context), short (HellaSwag, MMLU, ARC-Challenge and TruthfulQA in lm_eval), longbench
    (LongBench in lm_eval), and lm_eval (the tasks that --lm-eval-tasks names). With the authors' own files
    (--benchmark-data): helmet_rag, helmet_rerank, helmet_icl, openai_mrcr, google_mrcr, longbench_v2,
    longbench_pro, infinitebench, longproc, repoqa, and, scored by ropewalk eval judge, aa_lcr and helmet_narrativeqa.

    With several processes: torchrun --nproc-per-node 4 -m ropewalk eval MODEL --suite perplexity
    """
    from ropewalk.parallel import joined

    def so_far() -> str:
        return _so_far(out)

    advice = "run the same command again to resume"
    with resumable(so_far), joined(settings.loading.device, advice) as world:
        _measure(settings, out, as_json, world)


def _measure(settings: EvaluationSettings, out: Path | None, as_json: bool, world: World) -> None:
    from ropewalk.evaluation import run
    from ropewalk.reporting.scores.evaluation import describe_evaluation, report_evaluation

    if not world.is_rank_0:
        # Every rank would print the same warnings.
        logging.getLogger("ropewalk").setLevel(logging.ERROR)
    rope = settings.loading.rope
    result = run.evaluate(
        settings,
        run_context(world, out),
        None if rope is None else _rope_of(rope),
        None if out is None else lambda found: report_evaluation(out, found),
    )
    if world.is_rank_0:
        show_result(result, as_json, lambda found: describe_evaluation(found, out))
        # Single tasks may be skipped or fail, but a script must notice that nothing was measured.
        if all(each.status != "ok" and WAITING not in each.details for each in result.results):
            raise RunFailure(f"no task could run: {result.results[0].reason}")


def _rope_of(table: Path) -> RopeOf:
    # Imported only with a table, because it takes most of a second.
    from ropewalk.search.fitted_table import fitted_table

    return lambda path: fitted_table(table, path)


def _so_far(out: Path | None) -> str:
    if out is None:
        return "nothing was saved; with --out, an interrupted run can resume"
    # Search subfolders too: --average writes a folder for each checkpoint.
    if not any(log.stat().st_size for log in out.rglob("*.jsonl")):
        return "nothing was measured yet; run the same command to start again"
    return f"the answers and results so far are in {out}; run the same command again to resume"


def compare_command(
    settings: CompareSettings,
    *,
    plot: Annotated[PlotFile, figure_of("the differences with their 95 % intervals")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare evaluation B with evaluation A, paired by sample, and test which differences are significant."""
    from ropewalk.evaluation.record import compare_folders
    from ropewalk.reporting import difference_figure, draw
    from ropewalk.reporting.scores.evaluation import describe_comparison

    result = compare_folders(settings)
    if plot is not None:
        draw(difference_figure(result.differences, f"{settings.b.name} against {settings.a.name}"), plot)
    show_result(result, as_json, describe_comparison)


def rescore_command(
    folder: Annotated[FilePath, Field(description="Folder of a finished evaluation.")],
    *,
    as_json: JsonFlag = False,
) -> None:
    """Score the stored answers of an evaluation again, without the model, and rewrite its results, figures and report
    page.
    """
    from ropewalk.evaluation.record import rescore_folder
    from ropewalk.reporting.scores.evaluation import describe_evaluation, report_evaluation

    result = rescore_folder(folder, lambda found: report_evaluation(folder, found))
    show_result(result, as_json, lambda found: describe_evaluation(found, folder))


def judge_command(settings: JudgeSettings, *, as_json: JsonFlag = False) -> None:
    """Have a model on a server judge the stored answers of suites that need it, and write the scores.

    The result names the judge and its prompt, and says how often it agrees with other judges that have read the same
    answers. Run the same command again to resume.
    """
    from ropewalk.evaluation.judging import judge_folder
    from ropewalk.reporting.scores.evaluation import describe_evaluation, report_evaluation

    folder = settings.folder
    result = judge_folder(
        settings, lambda found: report_evaluation(folder, found), run_context().rank_0_reporter.note
    )
    show_result(result, as_json, lambda found: describe_evaluation(found, folder))


def verify_command(
    folder: Annotated[FilePath, Field(description="Folder of a finished evaluation.")],
    *,
    tokenizer: Annotated[
        str | None,
        Field(description="Folder or Hub id of the tokenizer. Default: the model that the record names."),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Check whether a result follows from the files in its folder: the scores from the stored answers, and the prompts
    from the seed and the tokenizer.

    The model is not run. Exits with status 1 if the files contradict the result.
    """
    from ropewalk.evaluation.reproduction import verify_result

    result = verify_result(folder, tokenizer)
    show_result(result, as_json, lambda found: [f"{each.status:12} {each.said}" for each in found.findings])
    if result.contradicted:
        wrong = ", ".join(each.what for each in result.findings if each.status == "differs")
        raise RunFailure(f"the files in {folder} contradict the result: {wrong}")


def view_command(
    settings: ViewSettings,
    *,
    open_page: Annotated[
        bool,
        Option(name="--open"),
        Field(description="Open the page in a browser, if there is one and stdout is a terminal."),
    ] = True,
    as_json: JsonFlag = False,
) -> None:
    """Write a folder of pages with every answer of an evaluation or of a training run, and open it in a browser.

    The pages need no server and no network. They show what the answer needs within each prompt, filter by task,
    length, depth, difficulty and verdict, and search the answers.
    """
    from ropewalk.reporting.answers import write_view

    result = write_view(settings)
    show_result(result, as_json, lambda found: [f"page  {found.page}"])
    if open_page and not as_json and Terminal().is_terminal and has_browser():
        webbrowser.open(result.page.resolve().as_uri())


def export_command(settings: ExportSettings, *, as_json: JsonFlag = False) -> None:
    """Write the answers of an evaluation as logs of inspect_ai, one for each task and length.

    inspect view shows them, and inspect_ai.analysis reads them as data frames. Each sample has the excerpt of its
    prompt that the evaluation kept. Needs pip install 'ropewalk[inspect-ai]'.
    """
    from ropewalk.reporting.inspect_logs import export_logs
    from ropewalk.reporting.shown_text import shown

    result = export_logs(settings)
    left_out = shown(", ".join(result.left_out), MOST_LEFT_OUT)
    show_result(
        result,
        as_json,
        lambda found: [
            f"{len(found.logs):,} log{'s' * (len(found.logs) != 1)} with {found.samples:,} samples in {found.folder}",
            *([f"left out, because they have no answers: {left_out}"] if left_out else []),
            f"read them with: inspect view --log-dir {shlex.quote(str(found.folder))}",
        ],
    )


def has_browser() -> bool:
    """Whether a browser with windows can open: without a screen, only ones in the terminal would."""
    return sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


def fetch_command(*, as_json: JsonFlag = False) -> None:
    """Fetch the essays and question sets that seven of RULER's tasks need, 51 MB, into the cache folder.

    They are not part of ropewalk. Each file must have the digest of the published one. Later evaluations find the
    files themselves.
    """
    from ropewalk.evaluation.tasks.fetched_data import SOURCES, fetch_all

    result = fetch_all(run_context().rank_0_reporter.note)
    show_result(
        result,
        as_json,
        lambda found: [f"{SOURCES[name].content}: {path}" for name, path in found.files.items()],
    )


app = make_group_with_default(
    "eval",
    "Measure a checkpoint on long-context and short-context benchmarks, with 95 % confidence intervals.",
    evaluate,
    own_name="model",
    example="ropewalk eval meta-llama/Llama-3.1-8B --suite ruler,passkey --lengths 8k,128k --out results",
)
app.command(make_command(compare_command, "compare", "ropewalk eval compare results/base results/extended"))
app.command(make_command(export_command, "export", "ropewalk eval export results/base --out logs/base"))
app.command(make_command(fetch_command, "fetch", "ropewalk eval fetch"))
app.command(
    make_command(judge_command, "judge", "ropewalk eval judge results/base --server http://localhost:8000/v1")
)
app.command(make_command(rescore_command, "rescore", "ropewalk eval rescore results/base"))
app.command(make_command(verify_command, "verify", "ropewalk eval verify results/base"))
app.command(make_command(view_command, "view", "ropewalk eval view results/base results/extended"))
