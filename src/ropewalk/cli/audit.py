"""``ropewalk audit``: how far arithmetic breaks a checkpoint's relative positions, where, and what mitigates it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from ropewalk.audit.settings import AuditSettings
from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, notes, print_json, results, show
from ropewalk.errors import RopewalkError
from ropewalk.io.settings import Device, Folder, Settings


class AuditOutput(Settings):
    """What an audit draws and prints."""

    group: ClassVar[str | None] = "Output"

    plot: Folder | None = Field(None, description="Draw the pictures into DIR.")
    as_json: JsonFlag = False


def audit(
    settings: AuditSettings,
    output: AuditOutput,
    *,
    device: Device = "auto",
) -> None:
    """Measure how far arithmetic breaks relative positions in a model, which step does it, and what mitigates it."""
    from ropewalk.audit import audit as run
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.parallel.context import RunContext
    from ropewalk.reporting.audit import describe_audit, draw_audit

    _make_folder(output.plot)
    reporter = ConsoleReporter(notes)
    result = run(settings, RunContext(reporter=reporter, device=device))
    if output.as_json:
        print_json(result.to_json())
    else:
        show(describe_audit(result))
    # After the result: a picture that cannot be written must not take it away.
    if output.plot is not None:
        files, left_out = draw_audit(result.audit, output.plot, Path(result.model).name)
        for sentence in left_out:
            reporter.note(sentence)
        if not output.as_json:
            results().print()
            for file in files:
                results().say(f"picture {file}")


def _make_folder(plot: Path | None) -> None:
    """Make the folder for the pictures, or refuse before the work."""
    if plot is None:
        return
    try:
        plot.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RopewalkError(f"cannot make the folder {plot} for --plot: {error.strerror}") from error


app = make_command(
    audit,
    "audit",
    "ropewalk audit meta-llama/Llama-3.2-1B --text books/ --shifts 0,16,1k,128k,1M --plot audit",
)
