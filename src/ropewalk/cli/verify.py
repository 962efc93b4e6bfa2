"""``ropewalk verify``: on the user's own model and documents, that nothing changes a number."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.options import JsonFlag
from ropewalk.cli.output import notes, print_json, print_whole, results
from ropewalk.errors import RunFailure
from ropewalk.io.settings import OutputFile, Settings
from ropewalk.verification.settings import VerifySettings

if TYPE_CHECKING:
    from ropewalk.verification import VerifyResult


class VerifyOutput(Settings):
    """What verify writes and prints."""

    group: ClassVar[str | None] = "Output"

    out: OutputFile | None = Field(None, description="Write the result as JSON into FILE.")
    as_json: JsonFlag = False


def verify(
    recipe: Annotated[str, Field(description="A recipe in YAML, or the name of a shipped one (demo).")],
    settings: VerifySettings,
    output: VerifyOutput,
) -> None:
    """Verify on your model and documents that packing, ranks, checkpoints and RoPE change no number.

    On the machines of a run: torchrun --nproc-per-node 4 -m ropewalk verify recipe.yaml
    """
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.io.files import write_json
    from ropewalk.parallel import joined
    from ropewalk.parallel.context import RunContext
    from ropewalk.verification import verify as run

    out = output.out
    config = settings.model_copy(update={"recipe": recipe})
    with joined() as world:
        with _ended_by_sigterm() if world.size == 1 else nullcontext():
            result = run(config, RunContext(world=world, reporter=ConsoleReporter(notes)))
        if not world.is_rank_0:
            return
    if out is not None:
        write_json(out, result.to_json())
    if output.as_json:
        print_json(result.to_json())
    else:
        _print(result, out)
    if result.failed:
        failed = f"{len(result.failed)} of {len(result.checks)} checks failed"
        raise RunFailure(f"{failed}: {'; '.join(result.failed)}")


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


def _print(result: VerifyResult, out: Path | None) -> None:
    from ropewalk.reporting import ResultTable
    from ropewalk.reporting.style import MISSING
    from ropewalk.verification.case import first_layers

    def figure(value: float | None) -> str:
        return MISSING if value is None else "0" if value == 0 else f"{value:.1e}"

    verdicts = {True: "yes", False: "NO", None: MISSING}
    layers = "" if result.layers is None else f", {first_layers(result.layers)}"
    table = ResultTable(
        f"{result.model}{layers}: {result.rows} rows of {result.length:,} tokens, pattern {result.pattern}; "
        f"{result.mesh}",
        ("check", "error", "budget", "passed", "seconds"),
        tuple(
            (
                check.name,
                figure(check.error),
                figure(check.budget),
                verdicts[check.passed],
                f"{check.seconds:.1f}",
            )
            for check in result.checks
        ),
    )
    print_whole(table.rich())
    console = results()
    console.print()
    for verdict, word in ((None, "not run"), (False, "failed")):
        for check in result.checks:
            if check.passed is verdict:
                text = f"{word}: {check.name}: {check.note.removeprefix('not run here: ')}"
                console.say(text)
    verdicts_found = [check.passed for check in result.checks]
    counts = ", ".join(
        f"{verdicts_found.count(verdict)} {word}"
        for verdict, word in ((True, "passed"), (False, "failed"), (None, "not run"))
    )
    console.say(f"{counts} in {result.seconds:.0f} s")
    if out is not None:
        console.say(str(out))


app = make_command(verify, "verify", "ropewalk verify recipe.yaml --layers 2 --length 4k --out verify.json")
