"""A run's copy at a URL (``checkpoints.copy_to``): what goes there, and how an empty folder is filled from it."""

from __future__ import annotations

from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json
from ropewalk.runs.store import RUN, STEPS, Store
from ropewalk.training.checkpoint.files import Completed, nothing_more
from ropewalk.training.checkpoint.remote import RemoteCopy
from ropewalk.training.folder import RECIPE
from ropewalk.training.measurement import DURING


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
        RopewalkError: if the URL cannot be written to or read, or contains a run that is not to be resumed.
    """
    if url is None:
        return None
    copy = RemoteCopy(url)
    copy.check()
    if (output / RECIPE).is_file():
        return None
    if resume:
        names = copy.restore(output, RECIPE)
        return f"the run was copied from {copy.url}, with {', '.join(names)}" if names else None
    if copy.read(RECIPE) is not None:
        raise RopewalkError(
            f"{copy.url} contains the copy of a run; add --resume to continue that run, or set checkpoints.copy_to to "
            "another URL"
        )
    return None


def refuse_other_copy(store: Store, url: str | None) -> None:
    """Raise a RopewalkError if a URL contains the copy of another run than that of a folder."""
    if url is None or (copy := RemoteCopy(url)).read(RECIPE) is None:
        return
    try:
        same = parse_json(copy.read(RUN) or b"", strict=True)["id"] == store.about.id
    except (ValueError, TypeError, KeyError):
        # What cannot be told apart is not overwritten.
        same = False
    if not same:
        raise RopewalkError(
            f"{copy.url} contains the copy of another run; set checkpoints.copy_to to another URL"
        )
