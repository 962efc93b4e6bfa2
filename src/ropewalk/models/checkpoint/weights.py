"""The files that hold a checkpoint's weights, as their index names them, and the tensors in their headers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError, first_line
from ropewalk.io.files import parse_json, path_inside, refuse_lfs_pointer
from ropewalk.models.checkpoint.origin import cached_folder

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""Names of a single file of weights, and of the index of several, as transformers writes them."""
_CHOSEN_BY_CONFIG = "transformers_weights"
"""Key of config.json that names another file or index."""


def weight_files(path_or_id: str | os.PathLike[str]) -> tuple[Path, ...]:
    """The files that transformers reads a checkpoint's weights from, the index first if there is one.

    Args:
        path_or_id: a folder, or a Hub id whose files may be in the local cache.

    Returns:
        The files; none if there are no safetensors weights, or if a Hub id's are not in the local cache.

    Raises:
        RopewalkError: if the index cannot be read, or names a missing file or one outside of the checkpoint's folder;
            if there are parts without an index; if a Git LFS pointer is in place of a file.
    """
    folder = cached_folder(str(path_or_id))
    if folder is None:
        return ()
    first = _first_file(folder)
    if first is None:
        return ()
    refuse_lfs_pointer(first)
    parts = [folder / name for name in _parts(first)] if first.suffix == ".json" else []
    for part in parts:
        if not part.is_file():
            # Loading a Hub id downloads what the cache lacks.
            if not Path(path_or_id).is_dir():
                return ()
            raise RopewalkError(
                f"{first} names {part.relative_to(folder)}, which is missing; restore this file of weights"
            )
        refuse_lfs_pointer(part)
    return (first, *parts)


def weight_tensors(path_or_id: str | os.PathLike[str]) -> Iterator[tuple[str, str, list[int]]]:
    """Name, dtype and shape of each tensor in the files of a checkpoint, from their headers alone.

    The dtype is named as in the files, such as ``BF16`` or ``F8_E4M3``.

    Raises:
        RopewalkError: as :func:`weight_files` does, and for a file that is not in the format.
    """
    from safetensors import SafetensorError, safe_open

    for file in weight_files(path_or_id):
        if file.suffix == ".json":
            continue
        try:
            with safe_open(file, framework="pt") as weights:
                # safe_open returns no mapping: it has keys() but cannot be iterated.
                for name in weights.keys():  # noqa: SIM118
                    part = weights.get_slice(name)
                    yield name, part.get_dtype(), part.get_shape()
        except (OSError, SafetensorError) as error:
            reason = first_line(error)
            raise RopewalkError(f"cannot load the model in {path_or_id}: {file.name}: {reason}") from error


def _first_file(folder: Path) -> Path | None:
    """The single file or the index, in the order in which transformers looks for them."""
    # transformers would read these in place of all others.
    shards = sorted(each.name for each in folder.glob("shard-*-model-*-of-*.safetensors"))
    if shards:
        raise RopewalkError(
            f"{folder} contains {shards[0]}, a part of a distributed checkpoint of transformers, which ropewalk does "
            "not read; save the model with save_pretrained(distributed_checkpoint=False)"
        )
    config = folder / "config.json"
    stated: Any = _json(config) if config.is_file() else {}
    named = stated.get(_CHOSEN_BY_CONFIG) if isinstance(stated, Mapping) else None
    if named is not None:
        return folder / _inside(named, config)
    for name in (WEIGHTS, INDEX):
        if (folder / name).is_file():
            return folder / name
    parts = sorted(each.name for each in folder.glob("*-of-*.safetensors"))
    if parts:
        raise RopewalkError(
            f"{folder} contains a part of a model's weights, {parts[0]}, but no {INDEX}, which lists all parts; "
            "restore the index"
        )
    return None


def _parts(index: Path) -> list[str]:
    """Names of the files in an index, sorted."""
    stated = _json(index)
    keys = ("metadata", "weight_map")
    of_index = isinstance(stated, Mapping) and all(isinstance(stated.get(key), Mapping) for key in keys)
    if not of_index or not stated["weight_map"]:
        raise RopewalkError(
            f"{index} is not an index of weights, which is a JSON object with the objects metadata and weight_map, and "
            "in weight_map the file of each weight; restore the index"
        )
    return sorted({_inside(name, index) for name in stated["weight_map"].values()})


def _inside(name: Any, place: Path) -> str:
    """Validate the path of a safetensors file below a checkpoint's folder, as an index there names it."""
    if (
        not isinstance(name, str)
        or not name.endswith((".safetensors", ".safetensors.index.json"))
        or path_inside(place.parent, name) is None
    ):
        raise RopewalkError(
            f"{place} names the file of weights {name!r}, but may name only .safetensors files in its own folder; "
            "correct it, or do not use this checkpoint"
        )
    return name


def _json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise RopewalkError(f"{path} is not valid JSON: {error}") from error
