"""``ropewalk eval``: measure a checkpoint, or a model behind a server, on long-context benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ropewalk.cli import evaluate_compare
from ropewalk.cli.binding import make_command, make_group_with_default
from ropewalk.cli.options import JsonFlag
from ropewalk.cli.output import on_interrupt
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.settings import HOW, TEXTS, EvaluationOutput, Loading, Serving, Settings
from ropewalk.io.settings import Option

if TYPE_CHECKING:
    from ropewalk.parallel import World


def evaluate(
    model: Annotated[
        str,
        Field(
            description="A checkpoint's folder, a Hub id, or embedded; with --average a folder of checkpoints; with "
            "--server where its tokenizer lies."
        ),
    ],
    settings: Settings,
    loading: Loading,
    serving: Serving | None = None,
    *,
    output: EvaluationOutput,
    text: Annotated[str, TEXTS, Field(description="Documents for perplexity: as for ropewalk data pack.")] = (
        "embedded:validation"
    ),
    average: Annotated[
        bool, HOW, Field(description="MODEL holds checkpoints: the mean over the last ones.")
    ] = False,
    last: Annotated[int, HOW, Field(ge=1, description="Checkpoints of --average.")] = 5,
    parallel: Annotated[
        str | None,
        HOW,
        Option(metavar="KEY=DEGREE"),
        Field(
            description="Under torchrun, how its processes share model and rows: shard=2,sequence=4. All are sequence "
            "if not given."
        ),
    ] = None,
    as_json: Annotated[JsonFlag, Option(group="Output")] = False,
) -> None:
    """Measure a checkpoint on long-context and short-context benchmarks, with 95 % intervals."""
    from ropewalk.cli.evaluate_run import Output, measure
    from ropewalk.cli.evaluate_sharded import check_processes, measure_sharded
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.models.load import choose_device
    from ropewalk.parallel import joined, require_devices

    def check(world: World) -> None:
        """Raise for options that do not go together."""
        _check_effect(settings)
        _check_server(loading, serving, average)
        check_processes(
            world.size, parallel, average, None if serving is None else serving.url, loading.device
        )
        if world.size > 1:
            require_devices(world, choose_device(loading.device))

    if settings.evaluator is not None:
        settings = settings.model_copy(update={"evaluator": resolve_model(settings.evaluator)})
    kept = Output(output.out, output.samples_dir, as_json)
    with (
        on_interrupt(lambda: _so_far(output.out)),
        joined(loading.device, "the same command goes on where it was") as world,
    ):
        # Every process reads the same command; what is wrong with it is said once.
        world.lead(lambda: check(world))
        if world.size == 1:
            measure(model, settings, text, loading, serving, last if average else None, kept)
        else:
            measure_sharded(model, settings, text, loading, parallel, kept, world)


def _check_effect(settings: Settings) -> None:
    """Raise for options of suites that are not asked for."""
    for option, value, needed in (
        ("--lm-eval-tasks", ",".join(settings.harness_names), "lm_eval"),
        ("--lines", ",".join(map(str, settings.lines)), "longeval"),
        ("--evaluator", settings.evaluator, "longppl"),
    ):
        if value and needed not in settings.suites:
            raise RopewalkError(
                f"{option} {value} has no effect without the suite {needed}; add it to --suite"
            )


def _check_server(loading: Loading, serving: Serving | None, average: bool) -> None:
    """Raise for what a model behind a server cannot do."""
    if serving is None:
        return
    if average:
        raise RopewalkError(
            "--average measures checkpoints one after the other; a server holds one: leave one out"
        )
    if loading.rope is not None:
        raise RopewalkError(
            f"--rope {loading.rope} is for a model in memory; a server has the factors of the folder that it loaded, "
            "which ropewalk export writes"
        )


def _so_far(out: Path | None) -> str:
    if out is None:
        return "nothing is kept without --out; with it, the same command goes on where it was interrupted"
    # A mean of checkpoints has a folder for each.
    if not any(log.stat().st_size for log in out.rglob("*.jsonl")):
        return "nothing is measured yet; the same command starts again"
    return f"the answers and results so far lie in {out}; the same command goes on from there"


app = make_group_with_default(
    "eval",
    "Measure a checkpoint on long-context and short-context benchmarks; compare two measurements.",
    evaluate,
    own_name="model",
    example="ropewalk eval meta-llama/Llama-3.1-8B --suite ruler,passkey --lengths 8k,128k --out results   "
    "See also: ropewalk eval compare --help, ropewalk eval rescore --help",
)
app.command(
    make_command(
        evaluate_compare.compare_command, "compare", "ropewalk eval compare results/base results/extended"
    )
)
app.command(make_command(evaluate_compare.rescore_command, "rescore", "ropewalk eval rescore results/base"))
