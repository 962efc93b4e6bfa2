"""The digest by which a checkpoint is known again: of its weights and its config."""

from __future__ import annotations

from ropewalk.errors import RopewalkError
from ropewalk.io.digests import FileDigest, digest
from ropewalk.models.checkpoint.origin import cached_folder
from ropewalk.models.checkpoint.weights import weight_files


def model_digest(path_or_id: str) -> str | None:
    """Compute the SHA-256 digest of a checkpoint's configs, index and files of weights, over names and contents.

    Args:
        path_or_id: a folder, or a Hub id whose files are in the local cache.

    Returns:
        The digest; None if the weights are not on this machine.

    Raises:
        RopewalkError: if a file cannot be read, or as :func:`~ropewalk.models.checkpoint.weights.weight_files` does.
    """
    folder, weights = cached_folder(path_or_id), weight_files(path_or_id)
    if folder is None or not weights:
        return None
    # The generation config affects the results: it lists the tokens that end an answer.
    files = [*folder.glob("config.json"), *folder.glob("generation_config.json"), *weights]
    try:
        return digest([[path.relative_to(folder).as_posix(), FileDigest.of(path).sha256] for path in files])
    except OSError as error:
        raise RopewalkError(f"cannot read {folder}: {error.strerror or error}") from error
