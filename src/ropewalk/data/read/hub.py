"""Stream datasets from the Hugging Face Hub (or a local folder) shard by shard, without running their code."""

from __future__ import annotations

import ssl
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from ropewalk.data.read.documents import Record
from ropewalk.data.read.files import HUGGING_FACE
from ropewalk.data.read.records import record_documents
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError, http_errors


def parse_hugging_face(path: str) -> tuple[str, str | None, str]:
    """Parse ``hf:owner/name[:config][@split]`` into (repository, config, split).

    Raises:
        RopewalkError: if the repository, the configuration or the split is empty.
    """
    repository, at, split = path.removeprefix(HUGGING_FACE).partition("@")
    repository, colon, config = repository.partition(":")
    if not repository or (at and not split) or (colon and not config):
        raise RopewalkError(f"{path!r} is not a dataset name; write hf:owner/name[:config][@split]")
    return repository, config or None, split or "train"


def hugging_face_stem(path: str) -> str:
    """Source name of a dataset's documents if neither the user nor a record gives one."""
    return parse_hugging_face(path)[0].rstrip("/").rsplit("/", 1)[-1]


def read_hugging_face(spec: SourceSpec, shard: tuple[int, int] | None = None) -> Iterator[Record]:
    """Stream the records of a dataset, without running code of its repository.

    ``datasets`` decompresses the files. Unlike our file readers, it does not detect a zstd file that is truncated
    between two blocks at the end of a line.

    Args:
        spec: the dataset (``hf:owner/name``, or a local folder that ``datasets`` can load) and its fields.
        shard: (index, number of shards) to read one shard; None for the whole dataset, which is all shards in order.

    Raises:
        RopewalkError: if the dataset, configuration or split does not exist, the Hub cannot be reached, or the
            dataset has another number of shards.
    """
    stem = hugging_face_stem(spec.path)
    # Streaming stores no data, but datasets leaves lock files where its cache would be.
    with TemporaryDirectory(prefix="ropewalk-") as cache:
        stream = _stream(spec, cache)
        place = spec.path
        if shard is not None:
            number, shards = shard
            # Splits are named by shard numbers, which mean other records once the data set has been uploaded again.
            if stream.num_shards != shards:
                raise RopewalkError(
                    f"{spec.path} had {shards} shards when reading began, but has {stream.num_shards} now: the "
                    "dataset has changed on the Hub; run again"
                )
            # Contiguous, so that shard after shard gives the records in the data set's own order.
            stream = stream.shard(num_shards=shards, index=number, contiguous=True)
            place = f"{spec.path}:shard {number}"
        with _failures(f"cannot load {spec.path}"):
            records = iter(stream)
        row = 0
        # No for loop, so that an error in reading a row can name the row.
        while True:
            with _failures(f"{place}: reading failed at row {row}"):
                record = next(records, None)
            if record is None:
                return
            yield Record(record_documents(record, spec, stem, f"{place}:row {row}", padded=True))
            row += 1


def count_shards(spec: SourceSpec) -> int:
    """Number of shards (usually files) of a dataset's split.

    Raises:
        RopewalkError: as in :func:`read_hugging_face`.
    """
    with TemporaryDirectory(prefix="ropewalk-") as cache:
        return int(_stream(spec, cache).num_shards)


def hugging_face_identity(repository: str, config: str | None) -> str:
    """Digest of a dataset's files and configuration, by which ``datasets`` keys its own cache.

    Raises:
        RopewalkError: as in :func:`read_hugging_face`.
    """
    import datasets

    with (
        TemporaryDirectory(prefix="ropewalk-") as cache,
        _failures(f"cannot load hf:{repository}"),
    ):
        return str(datasets.load_dataset_builder(repository, config, cache_dir=cache).hash)


def _stream(spec: SourceSpec, cache: str) -> Any:
    import datasets

    repository, config, split = parse_hugging_face(spec.path)
    with _failures(f"cannot load {spec.path}"):
        return datasets.load_dataset(repository, config, split=split, streaming=True, cache_dir=cache)


@contextmanager
def _failures(what: str) -> Iterator[None]:
    import datasets
    import pyarrow
    import zstandard

    failures: tuple[type[BaseException], ...] = (
        datasets.exceptions.DatasetsError,
        OSError,
        EOFError,
        StopIteration,  # datasets raises it if a compressed file ends before its first record
        zlib.error,
        zstandard.ZstdError,
        ValueError,
        RuntimeError,
        pyarrow.ArrowException,
        *http_errors(),
    )
    try:
        yield
    except failures as error:
        lines = str(error).strip().splitlines()
        if isinstance(error, StopIteration):
            lines = ["a compressed file ends before its first record"]
        raise RopewalkError(f"{what}: {lines[0] if lines else type(error).__name__}") from error


SECONDS = 5.0
"""Seconds to wait for any response of the Hub."""


def hub_reachable(seconds: float = SECONDS) -> bool:
    """Whether the Hub responds, with any status; False in the user's offline mode.

    Args:
        seconds: timeout.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=seconds):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return True
    except urllib.error.URLError as error:
        # The Hub client may use other certificates than Python; let it decide by itself.
        return isinstance(error.reason, ssl.SSLError)
    except OSError:
        return False


@contextmanager
def offline() -> Iterator[None]:
    """Within the context, the Hub's libraries use only their local caches, and fail at once for anything missing."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    # Both libraries read the environment variable when they are imported, which is too early.
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
