"""A run's copy at a URL (``checkpoints.copy_to``): what goes there, and how an empty folder is filled from it."""

from __future__ import annotations

from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.runs.store import EARLIER, STEPS
from ropewalk.training.checkpoint.files import CHECKPOINTS, RECORD, Completed, checkpoints_in, nothing_more
from ropewalk.training.checkpoint.remote import RemoteCopy
from ropewalk.training.folder import METRICS, RECIPE
from ropewalk.training.measurement import DURING
from ropewalk.training.metrics import LOST, MetricsLog


def copying(output: Path, url: str | None) -> Completed:
    """What a run does with each complete checkpoint: copy it to a URL, or nothing."""
    if url is None:
        return nothing_more
    copy = RemoteCopy(url)

    def completed(checkpoint: Path) -> None:
        files = [each for folder in (".", STEPS, DURING) for each in (output / folder).glob("*")]
        needed = [path for path in files if path.is_file() and not path.name.startswith(".")]
        # The recipe says that the folder contains a run.
        copy.upload(output, sorted(needed, key=lambda path: path.name == RECIPE), checkpoint)

    return completed


def take_from_copy(output: Path, url: str | None, resume: bool) -> str | None:
    """Check that a copy can be written to, and fill an empty folder with it before a run is resumed.

    Args:
        output: folder of the run, which this process has locked.
        url: URL of the copy; None for none.
        resume: whether to resume the run.

    Returns:
        A sentence for the user if the folder was filled.

    Raises:
        RopewalkError: if the URL cannot be written to or read, or contains another run.
    """
    if url is None:
        return None
    copy = RemoteCopy(url)
    copy.check()
    there = copy.read(RECIPE) is not None
    if (output / RECIPE).is_file():
        if there and not _same_run(output, copy):
            # A damaged log is named as such, and not taken for that of another run.
            MetricsLog(output / METRICS).read()
            raise RopewalkError(
                f"{copy.url} contains the copy of another run; set checkpoints.copy_to to another URL"
            )
        return None
    if there and not resume:
        raise RopewalkError(
            f"{copy.url} contains the copy of a run; add --resume to continue that run, or set checkpoints.copy_to to "
            "another URL"
        )
    if not resume:
        return None
    names = copy.restore(output, RECIPE)
    return f"the run was copied from {copy.url}, with {', '.join(names)}" if names else None


def _same_run(output: Path, copy: RemoteCopy) -> bool:
    """Whether a copy is that of the run in a folder."""
    places = (output / METRICS, output / LOST, output / EARLIER / METRICS)
    log, lost, earlier = (_lines(path.read_bytes() if path.is_file() else None) for path in places)
    copied = _lines(copy.read(METRICS))
    # A line holds the loss and duration of a step, which no two runs share.
    if copied & (log | lost | earlier) or not (copied or log):
        return True
    # The checkpoints tell only where the log is lost: a recipe that is run twice may give the same weights.
    records = [path / RECORD for path in checkpoints_in(output / CHECKPOINTS) if (path / RECORD).is_file()]
    return (not log or (output / LOST).exists()) and any(
        copy.read(f"{CHECKPOINTS}/{path.parent.name}/{RECORD}") == path.read_bytes() for path in records
    )


def _lines(log: bytes | None) -> set[bytes]:
    """Complete lines of a log."""
    return set((log or b"").split(b"\n")[:-1]) - {b""}
