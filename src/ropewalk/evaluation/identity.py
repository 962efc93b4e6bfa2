"""What was measured: a digest of a checkpoint's weights and config."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest


def model_digest(path_or_id: str) -> str | None:
    """SHA-256 over a checkpoint's configs and safetensors files, by their names and contents.

    Args:
        path_or_id: a folder, or a hub id whose files lie in the local cache.

    Returns:
        None where the weights are not at hand, as for a model behind a server.

    Raises:
        RopewalkError: if a file cannot be read.
    """
    folder = _folder(path_or_id)
    if folder is None:
        return None
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        return None
    # The generation config names the tokens that end an answer.
    files = [*folder.glob("config.json"), *folder.glob("generation_config.json"), *weights]
    try:
        return digest([[path.name, _sha256(path)] for path in files])
    except OSError as error:
        raise RopewalkError(f"cannot read {folder}: {error.strerror or error}") from error


def path_digest(path: Path) -> str:
    """SHA-256 over a file, or over all files of a folder with their names.

    Raises:
        RopewalkError: if something cannot be read.
    """
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    try:
        return digest([[each.relative_to(path).as_posix(), _sha256(each)] for each in files])
    except OSError as error:
        raise RopewalkError(f"cannot read {path}: {error.strerror or error}") from error


def _folder(path_or_id: str) -> Path | None:
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path_or_id, "config.json")
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
