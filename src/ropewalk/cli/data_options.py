"""What several commands of ``ropewalk data`` share: documents as arguments, and the context of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ropewalk.cli.output import notes
from ropewalk.data.settings import SourceFields, SourceSpec

if TYPE_CHECKING:
    from ropewalk.parallel.context import RunContext

Paths = Annotated[
    tuple[str, ...],
    Field(
        min_length=1,
        description="JSON lines (.jsonl, also .gz and .zst), Parquet, text and source files, folders of them, "
        "hf:owner/name[:config][@split], or embedded; records may hold text, or token ids already.",
    ),
]


def sources(paths: tuple[str, ...], fields: SourceFields) -> tuple[SourceSpec, ...]:
    """The sources that a command's arguments name, all read alike."""
    return tuple(SourceSpec(path=path, **dict(fields)) for path in paths)


def context_of(out: Path | None = None) -> RunContext:
    """A run in this process alone, whose progress is drawn on stderr."""
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.parallel.context import RunContext

    return RunContext(output=out, reporter=ConsoleReporter(notes))
