"""Checkpoint folders: names, the record of file digests that reveals damage, and deletion of old checkpoints."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest, damage, digests, read_sealed, write_sealed
from ropewalk.io.files import DELETED, parse_json, unique_name, writing
from ropewalk.io.json_lines import check_types
from ropewalk.parallel import World

CHECKPOINTS = "checkpoints"
"""Subfolder of a run that contains its checkpoints."""
RECORD = "training_state.json"
EXPORT_RECORD = "ropewalk-digests.json"
"""Record of file digests in an exported folder. It is inside the folder, so it is moved and copied with the files;
programs that read such folders ignore JSON files whose names they do not know."""
VERSION = 1
_NAME = re.compile(r"stage(\d+)-step(\d+)")


Completed = Callable[[Path], None]
"""What else is done with a complete checkpoint."""


def nothing_more(checkpoint: Path) -> None:
    """Leave a checkpoint where it is."""


class EarlierVersion(RopewalkError):
    """An earlier version of ropewalk wrote a checkpoint, which is intact."""


@dataclass(frozen=True)
class Position:
    """Progress of a run.

    Attributes:
        stage: index of the stage, counted from 0.
        step: completed optimizer steps of this stage.
        tokens: tokens trained on so far, over all stages.
    """

    stage: int
    step: int
    tokens: int


@dataclass(frozen=True)
class Record:
    """Content of a checkpoint's ``training_state.json``.

    Attributes:
        position: progress of the run at the checkpoint.
        files: digests of all other files, by name.
        sharded: whether several ranks wrote their shards; otherwise the checkpoint is a Hugging Face folder.
        world_size: number of ranks that wrote the checkpoint.
        mesh: degree of each dimension of their mesh.
        random_states: device types whose random number generator each rank saved.
        betas: decay rates of AdamW's moments.
    """

    position: Position
    files: Mapping[str, FileDigest]
    betas: tuple[float, float]
    sharded: bool = False
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    random_states: tuple[str, ...] = ()


def checkpoint_name(position: Position) -> str:
    """Name of a checkpoint's folder."""
    return f"stage{position.stage}-step{position.step:06d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints in a folder, earliest first; a checkpoint gets its final name once it is fully written."""
    return sorted((path for path in folder.glob("stage*") if is_place(path.name)), key=place_of)


def is_place(name: str) -> bool:
    """Whether a name is one that :func:`checkpoint_name` gives."""
    return _NAME.fullmatch(name) is not None


def place_of(path: Path) -> tuple[int, int]:
    """Stage and step of a checkpoint, from its folder's name alone."""
    found = _NAME.fullmatch(path.name)
    assert found is not None, path
    return int(found[1]), int(found[2])


def write_record(path: Path, record: Record) -> None:
    """Write the record, including a digest of itself, into a checkpoint's folder."""
    values = {
        "version": VERSION,
        "stage": record.position.stage,
        "step": record.position.step,
        "tokens": record.position.tokens,
        "sharded": record.sharded,
        "world_size": record.world_size,
        "mesh": dict(record.mesh),
        "random_states": list(record.random_states),
        "betas": list(record.betas),
    }
    write_sealed(path / RECORD, values, record.files)


def read_record(path: Path) -> Record:
    """Read the record in a checkpoint's folder.

    Raises:
        RopewalkError: if the record is missing, damaged or from another version, or if its step differs from that in
            the folder's name.
    """
    try:
        values = parse_json((path / RECORD).read_text(encoding="utf-8"), strict=True)
        if values["version"] > VERSION:
            raise RopewalkError(
                f"the checkpoint {path} has format version {values['version']}, but this version of ropewalk reads "
                f"versions up to {VERSION}; resume with the ropewalk version that wrote it"
            )
        files = read_sealed(values, path / RECORD)
        if "betas" not in values:
            raise EarlierVersion(
                f"{path} was written by an earlier version of ropewalk, whose runs this version cannot resume; resume "
                "with the ropewalk version that wrote it, or start a new run in another output folder"
            )
        first, second = map(float, values["betas"])
        check_types(values, dict.fromkeys(("stage", "step", "tokens"), (int,)))
        position = Position(values["stage"], values["step"], values["tokens"])
        # The latest checkpoint is found by its name, so a renamed folder would resume at the wrong step.
        if _NAME.fullmatch(path.name) and place_of(path) != (position.stage, position.step):
            raise RopewalkError(
                f"{path} is not a checkpoint of a run: the folder contains the checkpoint "
                f"{checkpoint_name(position)}; rename the folder to {checkpoint_name(position)}"
            )
        return Record(
            position,
            files,
            (first, second),
            values["sharded"],
            values["world_size"],
            values["mesh"],
            tuple(values["random_states"]),
        )
    # A RopewalkError is a ValueError too, and the clause below would call the record damaged.
    except RopewalkError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise RopewalkError(
            f"{path} is not a checkpoint of a run: {RECORD} cannot be read: {reason}"
        ) from error
    # A damaged record may still be JSON, with any value in any place.
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise RopewalkError(f"{path} is not a checkpoint of a run: {RECORD} is damaged: {error}") from error
    except KeyError as error:
        raise RopewalkError(f"{path} is not a checkpoint of a run: {RECORD} lacks the key {error}") from error


def write_export_record(
    folder: Path, position: Position | None, weights: Mapping[str, Any] | None = None
) -> None:
    """Write the digests of all files of an exported model into its folder.

    Args:
        folder: folder of the model, with all other files written.
        position: progress of the run that the weights come from; None if they are not from a run.
        weights: the checkpoints that were exported; None for the last one.
    """
    files = digests(path for path in folder.iterdir() if path.is_file())
    write_sealed(
        folder / EXPORT_RECORD,
        {
            "version": VERSION,
            "position": None if position is None else asdict(position),
            **({} if weights is None else {"weights": dict(weights)}),
        },
        files,
    )


def read_export_record(folder: Path) -> tuple[Position | None, dict[str, FileDigest]]:
    """Read the position of an exported model, None if it is not from a run, and the digests of its files.

    Raises:
        RopewalkError: if the record is missing or damaged; the message does not contain the folder's name.
    """
    try:
        values = parse_json((folder / EXPORT_RECORD).read_text(encoding="utf-8"), strict=True)
        files = read_sealed(values, folder / EXPORT_RECORD)
        if (at := values["position"]) is None:
            return None, files
        position = Position(**at)
        # Names of folders are made of it.
        check_types(asdict(position), dict.fromkeys(("stage", "step", "tokens"), (int,)))
        return position, files
    except FileNotFoundError as error:
        raise RopewalkError(f"{EXPORT_RECORD}, the record of its files, is missing") from error
    except NotADirectoryError as error:
        raise RopewalkError("it is not a folder") from error
    except OSError as error:
        raise RopewalkError(f"{EXPORT_RECORD} cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise RopewalkError(f"{EXPORT_RECORD} is damaged: {error}") from error
    except KeyError as error:
        raise RopewalkError(f"{EXPORT_RECORD} is damaged: it lacks {error}") from error


def read_exported_weights(folder: Path) -> dict[str, Any] | None:
    """Read which checkpoints an intact exported model was made of; None for the last one."""
    found: dict[str, Any] | None = parse_json((folder / EXPORT_RECORD).read_text(encoding="utf-8")).get(
        "weights"
    )
    return found


def check_export(folder: Path, world: World | None = None) -> str | None:
    """Describe the damage to an exported model's files, as :func:`check_checkpoint` does; None if there is none."""
    try:
        files, unreadable = read_export_record(folder)[1], None
    except RopewalkError as error:
        files, unreadable = {}, str(error)
    return _first_damage(folder, files, unreadable, world or World())


def read_position(path: Path) -> Position:
    """Progress of the run at a checkpoint.

    Raises:
        RopewalkError: if the record is missing, damaged or from another version.
    """
    return read_record(path).position


def check_checkpoint(path: Path, world: World | None = None) -> str | None:
    """Describe the damage to a checkpoint's files, such as ``model.safetensors is 10 bytes short``; None if none.

    Args:
        path: folder of the checkpoint.
        world: ranks that share the hashing, each of which must call this function; this process alone if None.

    Raises:
        EarlierVersion: on every rank, if an earlier version of ropewalk wrote it.
    """
    world = world or World()
    try:
        files, unreadable = read_record(path).files, None
    except EarlierVersion as error:
        # No damage, for which another checkpoint would be recommended.
        raise world.known_to_all(error) from None
    except RopewalkError as error:
        files, unreadable = {}, str(error).removeprefix(f"{path} is not a checkpoint of a run: ")
    return _first_damage(path, files, unreadable, world)


def _first_damage(
    folder: Path, files: Mapping[str, FileDigest], unreadable: str | None, world: World
) -> str | None:
    """Describe an unreadable record on any rank, or else the first damaged file; None if there is no damage.

    Every rank must call this function with the record as it read it, and hashes its share of the files.
    """
    # Deal the files in turn, largest first, so that ranks hash about equally many bytes.
    order = sorted(files, key=lambda name: (-files[name].bytes, name))
    checked = list(enumerate(order))[world.rank :: world.size]
    found = ((i, damage(folder / name, files[name])) for i, name in checked)
    # -1 sorts before every file: without a readable record nothing is known about the files.
    mine = [(i, what) for i, what in found if what is not None] if unreadable is None else [(-1, unreadable)]
    everything = [each for of_rank in world.gather(mine) for each in of_rank]
    return min(everything)[1] if everything else None


def latest_whole(
    folder: Path, world: World | None = None, limit: tuple[int, int] | None = None
) -> Path | None:
    """Latest checkpoint in a folder, after verifying its files; None if there is no checkpoint.

    Args:
        folder: folder of the checkpoints.
        world: as for :func:`check_checkpoint`.
        limit: stage and step after which checkpoints are not looked at; None for all.

    Raises:
        RopewalkError: if the latest checkpoint is damaged; the message names the latest intact one and what to do.
            This function never falls back to it silently, because the run would repeat steps that the user believes
            are done.
    """
    world = world or World()
    # Rank 0 lists for all, because machines may see the entries of a shared folder at different times.
    paths = world.on_rank_0(lambda: checkpoints_in(folder))
    paths = [path for path in paths if limit is None or place_of(path) <= limit]
    damaged: list[tuple[Path, str]] = []
    while paths:
        path = paths.pop()
        # Every checkpoint is hashed before it is used: a truncated file would otherwise load as damaged weights.
        what = check_checkpoint(path, world)
        if what is not None:
            damaged.append((path, what))
            continue
        if not damaged:
            return path
        others = "the folder" if len(damaged) == 1 else "the folders"
        refuse(
            world,
            f"checkpoint {damaged[0][0].name} is damaged ({damaged[0][1]}), and the latest intact checkpoint is "
            f"{path.name}; delete {others} {' and '.join(str(each) for each, _ in damaged)}, and --resume will "
            f"continue from {path.name}",
        )
    if damaged:
        refuse(
            world,
            f"checkpoint {damaged[0][0].name} is damaged ({damaged[0][1]}), and no checkpoint is intact; delete the "
            f"folder {folder}, and --resume will restart the training",
        )
    return None


def refuse(world: World, sentence: str) -> None:
    """Raise an error that every rank knows of: rank 0 reports it, the others stay silent."""
    raise world.known_to_all(RopewalkError(sentence))


def keep_latest(folder: Path, keep: int, best: Path | None = None) -> None:
    """Delete all complete checkpoints except the latest ``keep`` and the best."""
    for path in checkpoints_in(folder)[:-keep]:
        if best is not None and path.name == best.name:
            continue
        # Rename before deleting, so that a half-deleted folder is never mistaken for a checkpoint.
        with writing(path):
            retired = unique_name(path, DELETED)
            path.rename(retired)
            shutil.rmtree(retired)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries to disk: without this, a rename may be lost in a power failure."""
    # A folder cannot be opened for writing, and fsync does not need it to be.
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
