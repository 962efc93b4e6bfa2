"""``ropewalk audit``: how far limited precision breaks relative positions, its causes, and mitigations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from ropewalk.audit.settings import AuditSettings
from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, results, run_context, show_result
from ropewalk.errors import RopewalkError
from ropewalk.io.settings import COMMON, Device, Folder, Settings


class AuditOutput(Settings):
    """Output options: figures and JSON."""

    group: ClassVar[str | None] = COMMON.group

    plot: Folder | None = Field(default=None, description="Folder for figures (.png).")
    as_json: JsonFlag = False


def audit(
    settings: AuditSettings,
    output: AuditOutput,
    *,
    device: Annotated[Device, COMMON] = "auto",
) -> None:
    """Measure how much rounding changes attention when the same text moves to other positions. Also find which
    operation causes the change, and what reduces it.

    With RoPE, attention depends only on the distances between tokens. In exact arithmetic, moving the text would
    therefore change nothing.
    """
    from ropewalk.audit import audit as run
    from ropewalk.reporting.audit import describe_audit, draw_audit

    _make_folder(output.plot)
    context = run_context(device=device)
    result = run(settings, context)
    show_result(result, output.as_json, describe_audit)
    # Figures come after the result, so that a figure that cannot be written does not lose the result.
    if output.plot is not None:
        files, left_out = draw_audit(result.audit, output.plot, Path(result.model).name)
        for sentence in left_out:
            context.reporter.note(sentence)
        if not output.as_json:
            results().print()
            for file in files:
                results().say(f"picture {file}")


def _make_folder(plot: Path | None) -> None:
    """Create the folder for the figures, or raise before the work starts."""
    if plot is None:
        return
    try:
        plot.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RopewalkError(f"cannot create the folder {plot} for --plot: {error.strerror}") from error


app = make_command(
    audit,
    "audit",
    "ropewalk audit meta-llama/Llama-3.2-1B --text books/ --shifts 0,16,1k,128k,1M --plot audit",
)
