"""``ropewalk verify``: on the user's own model and documents, that nothing changes a number."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.output import JsonOption, notes, print_json, print_whole, results
from ropewalk.errors import RopewalkError, RunFailure

if TYPE_CHECKING:
    from ropewalk.parallel import MeshShape, World
    from ropewalk.training.recipe.recipe import Recipe
    from ropewalk.verification import Case, Check

SECONDS_A_CHECK = 1800.0
"""After which a check counts as hung."""


def register(app: typer.Typer) -> None:
    """Add the command ``verify``."""
    app.command("verify")(verify_command)


def verify_command(
    recipe: Annotated[str, typer.Argument(help="A recipe in YAML, or the name of a shipped one (demo).")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key: stages.0.context=32k"),
    ] = None,
    layers: Annotated[
        int | None, typer.Option(help="Verify the model's first layers alone; all of them.", min=1)
    ] = None,
    rows: Annotated[
        int, typer.Option(help="Packed rows to verify on, at least one for each rank.", min=2)
    ] = 4,
    length: Annotated[
        str | None,
        typer.Option(help="Tokens of a row; the first stage's context, or less for a large model."),
    ] = None,
    ranks: Annotated[
        int, typer.Option(help="Processes to start on this machine; under torchrun its own are used.", min=2)
    ] = 2,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the result as JSON into FILE.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Verify on your model and documents that packing, ranks, checkpoints and RoPE change no number.

    On the machines of a run: torchrun --nproc-per-node 4 -m ropewalk verify recipe.yaml

    Example: [bold]ropewalk verify recipe.yaml --layers 2 --length 4k --out verify.json[/bold]
    """
    from ropewalk.io.lengths import parse_length
    from ropewalk.parallel import joined
    from ropewalk.training import load_recipe
    from ropewalk.verification import summary

    if out is not None and out.is_dir():
        raise RopewalkError(f"{out} is a folder; --out names a file")
    tokens = None if length is None else parse_length(length)
    began = time.perf_counter()
    with joined() as world:
        read = world.lead(lambda: load_recipe(recipe, overrides or []))
        options: dict[str, Any] = {"rows": rows, "length": tokens, "layers": layers}
        if world.size > 1:
            case, told, mesh, checks = _on_given_ranks(read, world, options)
        else:
            with _ended_by_sigterm():
                case, told, mesh, checks = _on_own_ranks(read, ranks, options)
        if not world.leads:
            return
    counts = summary(checks)
    record = {
        "model": read.model,
        **_described(case, layers),
        "mesh": told,
        "recipe_mesh": None if mesh is None else str(mesh),
        "seconds": time.perf_counter() - began,
        **counts,
        "checks": [check.to_json() for check in checks],
    }
    if out is not None:
        from ropewalk.io.files import write_json

        write_json(out, record)
    if as_json:
        print_json(record)
    else:
        _print(checks, record, out)
    failed = [check.name for check in checks if check.passed is False]
    if failed:
        raise RunFailure(f"{len(failed)} of {len(checks)} checks failed: {'; '.join(failed)}")


def _described(case: Case, layers: int | None) -> dict[str, Any]:
    from ropewalk.versions import software_versions

    return {
        "layers": layers,
        "rows": len(case.rows),
        "length": case.length,
        "context": case.context,
        "pattern": case.rows[0].layout.pattern,
        "precision": case.precision,
        "device": case.device,
        "versions": software_versions(),
    }


def _on_own_ranks(
    recipe: Recipe, ranks: int, options: dict[str, Any]
) -> tuple[Case, str, MeshShape | None, list[Check]]:
    """In a pool of processes on this machine, which talk over gloo."""
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.parallel import MeshShape
    from ropewalk.testing.ranks import Ranks
    from ropewalk.training.recipe.recipe import Parallel
    from ropewalk.verification import planned_checks, prepare, run_planned, verify

    own = MeshShape(**recipe.parallel.model_dump()) if isinstance(recipe.parallel, Parallel) else None
    here = own if own is not None and own.world_size == ranks else None
    reporter = ConsoleReporter(notes)
    if own is not None and own.world_size > 1 and here is None:
        reporter.note(f"the recipe's mesh of {own} takes --ranks {own.world_size}; it is not verified here")
    # A mesh is what torchrun's processes form; there are none.
    alone = recipe.model_copy(update={"parallel": "auto"})
    with _scratch(Path(recipe.output), shared=False) as folder, Ranks(ranks) as pool:
        case, remarks, _ = prepare(alone, folder, **{**options, "rows": _rows(options["rows"], ranks)})
        for remark in remarks:
            reporter.note(remark)
        checks = verify(
            planned_checks(case, ranks, here),
            lambda planned: pool.run(run_planned, planned, case)[0],
            reporter,
        )
    return case, f"{ranks} gloo processes on this machine", here, checks


def _on_given_ranks(
    recipe: Recipe, world: World, options: dict[str, Any]
) -> tuple[Case, str, MeshShape | None, list[Check]]:
    """In the processes that torchrun started, on the recipe's mesh too."""
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.verification import planned_checks, prepare, run_in, verify

    several = world.local_size < world.size
    with _scratch(Path(recipe.output), shared=several) if world.leads else _nothing() as folder:
        options = {**options, "rows": _rows(options["rows"], world.size), "world": world}
        case, remarks, mesh = world.lead(lambda: prepare(recipe, folder, **options))
        reporter = ConsoleReporter(notes) if world.leads else None
        for remark in remarks if reporter else ():
            notes.say(remark)
        kind = case.device.partition(":")[0]
        planned = planned_checks(case, world.size, mesh)
        checks = verify(planned, lambda each: run_in(each, case, world, kind), reporter)
        world.barrier()
    return case, f"{world.size} processes of torchrun, {kind}", mesh, checks


def _rows(asked: int, ranks: int) -> int:
    """As many rows for each rank."""
    return -(-asked // ranks) * ranks


@contextmanager
def _scratch(output: Path, shared: bool) -> Iterator[Path]:
    """A folder that is gone afterwards; beside the run's output where other machines must see it."""
    place = output.expanduser().absolute().parent if shared else None
    if place is not None:
        place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="ropewalk-verify-", dir=place) as folder:
        yield Path(folder)


class _Terminated(BaseException):
    """SIGTERM came; not an Exception, so that nothing on the way mistakes it for its own failure."""


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM closes what is open inside, the pool and the scratch folder, as Ctrl-C does.

    Raises:
        RunFailure: if it came.
    """

    def end(*_: Any) -> None:
        # Once is enough: what is being closed is to be closed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise _Terminated

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:
        # Only the main thread may; elsewhere whoever started the thread decides.
        yield
        return
    try:
        yield
    except _Terminated:
        raise RunFailure("verify was told to end by SIGTERM, and left nothing behind") from None
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _nothing() -> Iterator[Path]:
    """Where rank 0 makes the folder."""
    yield Path()


def _print(checks: Sequence[Check], record: dict[str, Any], out: Path | None) -> None:
    from ropewalk.reporting import ResultTable
    from ropewalk.reporting.style import MISSING
    from ropewalk.verification.case import first_layers

    def figure(value: float | None) -> str:
        return MISSING if value is None else "0" if value == 0 else f"{value:.1e}"

    verdicts = {True: "yes", False: "NO", None: MISSING}
    layers = "" if record["layers"] is None else f", {first_layers(record['layers'])}"
    table = ResultTable(
        f"{record['model']}{layers}: {record['rows']} rows of {record['length']:,} tokens, pattern "
        f"{record['pattern']}; {record['mesh']}",
        ("check", "error", "budget", "passed", "seconds"),
        tuple(
            (
                check.name,
                figure(check.error),
                figure(check.budget),
                verdicts[check.passed],
                f"{check.seconds:.1f}",
            )
            for check in checks
        ),
    )
    print_whole(table.rich())
    console = results()
    console.print()
    for verdict, word in ((None, "not run"), (False, "failed")):
        for check in checks:
            if check.passed is verdict:
                text = f"{word}: {check.name}: {check.note.removeprefix('not run here: ')}"
                console.say(text)
    counts = f"{record['passed']} passed, {record['failed']} failed, {record['not_run']} not run"
    console.say(f"{counts} in {record['seconds']:.0f} s")
    if out is not None:
        console.say(str(out))
