"""Checkpoints as folders: names in order, a record of every file by which damage is found, and retention."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest, damage, digests, read_sealed, write_sealed
from ropewalk.io.files import DELETED, parse_json, unique_name, writing
from ropewalk.io.json_lines import check_types
from ropewalk.parallel import World

CHECKPOINTS = "checkpoints"
"""Folder of a run that they lie in."""
RECORD = "training_state.json"
EXPORT_RECORD = "ropewalk-digests.json"
"""Within the exported folder, so that it appears with the files it speaks of and goes where they go; no reader of such
folders looks at a JSON file of another name than those it knows."""
VERSION = 1
_NAME = re.compile(r"stage(\d+)-step(\d+)")
_OLDEST_KEYS = {"stage", "step", "tokens"}


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        stage: counted from 0.
        step: optimiser steps of this stage that are done.
        tokens: tokens trained on so far, over all stages.
    """

    stage: int
    step: int
    tokens: int


@dataclass(frozen=True)
class Record:
    """What a checkpoint's ``training_state.json`` says.

    Attributes:
        position: how far the run had come.
        files: digest of every other file, by name; empty in checkpoints from before digests were kept.
        sharded: whether several ranks wrote it, each its shards; else it is a Hugging Face folder.
        world_size: ranks that wrote it.
        mesh: how they were arranged, by dimension.
        random_states: devices whose random number generator each rank saved.
    """

    position: Position
    files: Mapping[str, FileDigest] = field(default_factory=dict)
    sharded: bool = False
    world_size: int = 1
    mesh: Mapping[str, int] = field(default_factory=dict)
    random_states: tuple[str, ...] = ()


def checkpoint_name(position: Position) -> str:
    """Name of a checkpoint's folder."""
    return f"stage{position.stage}-step{position.step:06d}"


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints below a folder, earliest first: one takes its name when all of it is written."""
    return sorted((path for path in folder.glob("stage*") if _NAME.fullmatch(path.name)), key=place_of)


def place_of(path: Path) -> tuple[int, int]:
    """Stage and step of a checkpoint, from its folder's name alone."""
    found = _NAME.fullmatch(path.name)
    assert found is not None, path
    return int(found[1]), int(found[2])


def write_record(path: Path, record: Record) -> None:
    """Write the record into a checkpoint's folder, with a digest of its own."""
    values = {
        "version": VERSION,
        "stage": record.position.stage,
        "step": record.position.step,
        "tokens": record.position.tokens,
        "sharded": record.sharded,
        "world_size": record.world_size,
        "mesh": dict(record.mesh),
        "random_states": list(record.random_states),
    }
    write_sealed(path / RECORD, values, record.files)


def read_record(path: Path) -> Record:
    """The record in a checkpoint's folder.

    Raises:
        RopewalkError: if it is missing, damaged, from a newer version, or of another step than the folder's name says.
    """
    try:
        values = parse_json((path / RECORD).read_text(encoding="utf-8"), strict=True)
        oldest = values.keys() == _OLDEST_KEYS
        if not oldest and values["version"] > VERSION:
            raise RopewalkError(
                f"the checkpoint {path} has format version {values['version']}, this ropewalk reads up to {VERSION}; "
                "resume with the newer one that wrote it"
            )
        files = {} if oldest else read_sealed(values, path / RECORD)
        check_types(values, dict.fromkeys(("stage", "step", "tokens"), (int,)))
        position = Position(values["stage"], values["step"], values["tokens"])
        if _NAME.fullmatch(path.name) and place_of(path) != (position.stage, position.step):
            raise ValueError(
                f"it is of {checkpoint_name(position)}, under another name; rename the folder to that"
            )
        if oldest:
            return Record(position)
        return Record(
            position,
            files,
            values["sharded"],
            values["world_size"],
            values["mesh"],
            tuple(values["random_states"]),
        )
    except RopewalkError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise RopewalkError(f"{path} is no checkpoint of a run: {RECORD} cannot be read: {reason}") from error
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise RopewalkError(f"{path} is no checkpoint of a run: {RECORD} is damaged: {error}") from error
    except KeyError as error:
        raise RopewalkError(f"{path} is no checkpoint of a run: {RECORD} lacks {error}") from error


def write_export_record(folder: Path, position: Position | None) -> None:
    """Write the digests of all files of an exported model into its folder.

    Args:
        folder: with all of its files.
        position: how far the run had come whose weights these are, if they are of one.
    """
    files = digests(path for path in folder.iterdir() if path.is_file())
    write_sealed(
        folder / EXPORT_RECORD,
        {"version": VERSION, "position": None if position is None else asdict(position)},
        files,
    )


def read_export_record(folder: Path) -> tuple[Position | None, dict[str, FileDigest]]:
    """Of which position an exported model is, None if of no run, and the digests of its files.

    Raises:
        RopewalkError: if the record is missing or damaged, without the folder's name.
    """
    try:
        values = parse_json((folder / EXPORT_RECORD).read_text(encoding="utf-8"), strict=True)
        files = read_sealed(values, folder / EXPORT_RECORD)
        return None if values["position"] is None else Position(**values["position"]), files
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


def check_export(folder: Path, world: World | None = None) -> str | None:
    """What is wrong with the files of an exported model, as :func:`check_checkpoint` says it; None if nothing is."""
    try:
        files, unreadable = read_export_record(folder)[1], None
    except RopewalkError as error:
        files, unreadable = {}, str(error)
    return _first_damage(folder, files, unreadable, world or World())


def read_position(path: Path) -> Position:
    """How far the run had come at a checkpoint.

    Raises:
        RopewalkError: as :func:`read_record`.
    """
    return read_record(path).position


def check_checkpoint(path: Path, world: World | None = None) -> str | None:
    """What is wrong with a checkpoint's files, such as ``model.safetensors is 10 bytes short``; None if nothing is.

    Of checkpoints from before digests were kept, only the record is read.

    Args:
        path: the checkpoint's folder.
        world: ranks that share the hashing, each calling this; this process alone if None.
    """
    world = world or World()
    try:
        files, unreadable = read_record(path).files, None
    except RopewalkError as error:
        files, unreadable = {}, str(error).removeprefix(f"{path} is no checkpoint of a run: ")
    return _first_damage(path, files, unreadable, world)


def _first_damage(
    folder: Path, files: Mapping[str, FileDigest], unreadable: str | None, world: World
) -> str | None:
    """What is wrong with a folder's record on any rank, else with the first damaged of its files; None if nothing is.

    Every rank calls this with what it has read of the record, and hashes a part of the files.
    """
    # Largest first, dealt in turn: every rank gets about as many bytes to hash.
    order = sorted(files, key=lambda name: (-files[name].bytes, name))
    checked = list(enumerate(order))[world.rank :: world.size]
    found = ((i, damage(folder / name, files[name])) for i, name in checked)
    mine = [(i, what) for i, what in found if what is not None] if unreadable is None else [(-1, unreadable)]
    everything = [each for of_rank in told_to_all(world, mine) for each in of_rank]
    return min(everything)[1] if everything else None


def latest_whole(folder: Path, world: World | None = None) -> Path | None:
    """The latest checkpoint below a folder, its files checked; None where there is none.

    Args:
        folder: that checkpoints are saved to.
        world: as for :func:`check_checkpoint`.

    Raises:
        RopewalkError: if it is damaged; the message says which one before it is whole, and what to do. Never goes back
            to that one by itself: steps would be trained again that the user believes done.
    """
    world = world or World()
    paths = world.on_rank_0(lambda: checkpoints_in(folder))
    damaged: list[tuple[Path, str]] = []
    while paths:
        path = paths.pop()
        what = check_checkpoint(path, world)
        if what is not None:
            damaged.append((path, what))
            continue
        if not damaged:
            return path
        others = "the folder" if len(damaged) == 1 else "the folders"
        refuse(
            world,
            f"checkpoint {damaged[0][0].name} is damaged ({damaged[0][1]}); the one before it that is whole is "
            f"{path.name}: remove {others} {', '.join(str(each) for each, _ in damaged)}, and --resume goes on from "
            "there",
        )
    if damaged:
        refuse(
            world,
            f"checkpoint {damaged[0][0].name} is damaged ({damaged[0][1]}), and none before it is whole: remove the "
            f"folder {folder}, and --resume begins the training again",
        )
    return None


def refuse(world: World, sentence: str) -> None:
    """Raise on every rank what all of them know: rank 0 says it, the others end in silence."""
    raise world.known_to_all(RopewalkError(sentence))


def told_to_all(world: World, value: Any) -> list[Any]:
    """Every rank's value, in order of rank."""
    values = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value, group=world.control)
    return values


def keep_latest(folder: Path, keep: int) -> None:
    """Delete all complete checkpoints but the latest ones."""
    for path in checkpoints_in(folder)[:-keep]:
        # Under another name first: a half-deleted folder must not pass for a checkpoint.
        with writing(path):
            retired = unique_name(path, DELETED)
            path.rename(retired)
            shutil.rmtree(retired)


def sync_folder(path: Path) -> None:
    """Make the names in a folder last, as fsync does with a file's content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
