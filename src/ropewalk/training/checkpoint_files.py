"""Checkpoints as folders: names in order, a record of every file by which damage is found, and retention."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ropewalk.errors import RopewalkError
from ropewalk.files import write_json, writing
from ropewalk.parallel import World

RECORD = "training_state.json"
VERSION = 1
_NAME = re.compile(r"stage(\d+)-step(\d+)")
_LEFT_OVER = re.compile(r"\.stage\d+-step\d+\.(partial|old)")
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
class FileDigest:
    """What a file was when it was written: its size in bytes, and its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return cls(path.stat().st_size, sha256)


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
    found = [(match, path) for path in folder.glob("stage*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))]


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
        "files": {name: {"bytes": d.bytes, "sha256": d.sha256} for name, d in sorted(record.files.items())},
    }
    write_json(path / RECORD, {**values, "sha256": _digest_of(values)})


def read_record(path: Path) -> Record:
    """The record in a checkpoint's folder.

    Raises:
        RopewalkError: if it is missing, damaged, or from a newer version.
    """
    try:
        values = json.loads((path / RECORD).read_text(encoding="utf-8"))
        position = Position(*(int(values[key]) for key in ("stage", "step", "tokens")))
        if values.keys() == _OLDEST_KEYS:
            return Record(position)
        if values["version"] > VERSION:
            raise RopewalkError(
                f"the checkpoint {path} has format version {values['version']}, this ropewalk reads up to {VERSION}; "
                "resume with the newer one that wrote it"
            )
        if values.pop("sha256") != _digest_of(values):
            raise ValueError(f"{RECORD} was altered: its SHA-256 differs")
        return Record(
            position,
            {name: FileDigest(**digest) for name, digest in values["files"].items()},
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
    except (ValueError, TypeError, AttributeError) as error:
        raise RopewalkError(f"{path} is no checkpoint of a run: {RECORD} is damaged: {error}") from error
    except KeyError as error:
        raise RopewalkError(f"{path} is no checkpoint of a run: {RECORD} lacks {error}") from error


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
        record = read_record(path)
    except RopewalkError as error:
        mine = [(-1, str(error).removeprefix(f"{path} is no checkpoint of a run: "))]
    else:
        # Largest first, dealt in turn: every rank gets about as many bytes to hash.
        order = sorted(record.files, key=lambda name: (-record.files[name].bytes, name))
        checked = list(enumerate(order))[world.rank :: world.size]
        found = ((i, _damage(path / name, record.files[name])) for i, name in checked)
        mine = [(i, damage) for i, damage in found if damage is not None]
    everything = [damage for damages in told_to_all(world, mine) for damage in damages]
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
    paths = world.lead(lambda: checkpoints_in(folder))
    damaged: list[tuple[Path, str]] = []
    while paths:
        path = paths.pop()
        damage = check_checkpoint(path, world)
        if damage is not None:
            damaged.append((path, damage))
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


def remove_left_over(folder: Path) -> None:
    """Delete what a killed run left of a checkpoint that it was writing or deleting."""
    for path in folder.glob(".stage*"):
        if _LEFT_OVER.fullmatch(path.name):
            with writing(path):
                shutil.rmtree(path)


def keep_latest(folder: Path, keep: int) -> None:
    """Delete all complete checkpoints but the latest ones."""
    for path in checkpoints_in(folder)[:-keep]:
        # Under another name first: a half-deleted folder must not pass for a checkpoint.
        with writing(path):
            retired = path.with_name(f".{path.name}.old")
            path.rename(retired)
            shutil.rmtree(retired)


def sync_folder(path: Path) -> None:
    """Make the names in a folder last, as fsync does with a file's content."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def digests(paths: Iterable[Path]) -> dict[str, FileDigest]:
    """Digests by file name."""
    return {path.name: FileDigest.of(path) for path in paths}


def _digest_of(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _damage(path: Path, wanted: FileDigest) -> str | None:
    try:
        size = path.stat().st_size
        if size < wanted.bytes:
            return f"{path.name} is {wanted.bytes - size} bytes short"
        if size > wanted.bytes:
            return f"{path.name} is {size - wanted.bytes} bytes too long"
        if FileDigest.of(path) != wanted:
            return f"{path.name} was altered: its SHA-256 differs"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error.strerror or error}"
    return None
