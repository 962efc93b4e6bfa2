"""Stream datasets from the Hugging Face Hub (or a local folder) shard by shard, without running their code."""

from __future__ import annotations

import ssl
import sys
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

import zstandard

from ropewalk.data.read.documents import Record
from ropewalk.data.read.files import HUGGING_FACE
from ropewalk.data.read.records import record_documents
from ropewalk.data.settings import SourceSpec
from ropewalk.errors import RopewalkError


def parse_hugging_face(path: str) -> tuple[str, str | None, str]:
    """``hf:owner/name[:config][@split]`` as (repository, config, split).

    Raises:
        RopewalkError: if the repository, the configuration or the split is empty.
    """
    repository, at, split = path.removeprefix(HUGGING_FACE).partition("@")
    repository, colon, config = repository.partition(":")
    if not repository or (at and not split) or (colon and not config):
        raise RopewalkError(f"{path!r} is not a dataset name; write hf:owner/name[:config][@split]")
    return repository, config or None, split or "train"


def hugging_face_stem(path: str) -> str:
    """The source name of a dataset's documents where neither the user nor a record gives one."""
    return parse_hugging_face(path)[0].rstrip("/").rsplit("/", 1)[-1]


def read_hugging_face(
    spec: SourceSpec, shard: tuple[int, int] | None = None, skip: int = 0
) -> Iterator[Record]:
    """Records of a dataset, streamed; no code of the dataset's repository is run.

    ``datasets`` decompresses the files, and takes a zstd file that is cut off between two blocks, at the end
    of a line, for a complete one; the readers of files do not.

    Args:
        spec: the dataset (``hf:owner/name``, or a local folder that ``datasets`` can load) and its fields.
        shard: (number, of how many) reads one shard alone; all of them one after the other are the dataset.
        skip: records at the beginning that are passed over.

    Raises:
        RopewalkError: if the dataset, configuration or split is not there, the hub cannot be reached, or
            the dataset no longer has that many shards.
    """
    stem = hugging_face_stem(spec.path)
    # Streaming stores no data, but datasets leaves lock files where its cache would be.
    with TemporaryDirectory(prefix="ropewalk-") as cache:
        stream = _stream(spec, cache)
        place = spec.path
        if shard is not None:
            number, shards = shard
            if stream.num_shards != shards:
                raise RopewalkError(
                    f"{spec.path} has {stream.num_shards} shards, but had {shards} before; run again"
                )
            stream = stream.shard(num_shards=shards, index=number, contiguous=True)
            place = f"{spec.path}:shard {number}"
        with _failures(f"cannot load {spec.path}"):
            records = iter(stream.skip(skip) if skip else stream)
        row = skip
        while True:
            with _failures(f"{place}: reading failed at row {row}"):
                record = next(records, None)
            if record is None:
                return
            yield Record(record_documents(record, spec, stem, f"{place}:row {row}"))
            row += 1


def count_shards(spec: SourceSpec) -> int:
    """How many shards (files, as a rule) a dataset's split is kept in.

    Raises:
        RopewalkError: as read_hugging_face.
    """
    with TemporaryDirectory(prefix="ropewalk-") as cache:
        return int(_stream(spec, cache).num_shards)


def hugging_face_identity(repository: str, config: str | None) -> str:
    """A digest of a dataset's files and configuration, as ``datasets`` keys its own cache.

    Raises:
        RopewalkError: as read_hugging_face.
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

    # The hub's client of version 1 and later lets the errors of httpx through; they are no OSError.
    httpx = sys.modules.get("httpx")
    failures: tuple[type[BaseException], ...] = (
        datasets.exceptions.DatasetsError,
        OSError,
        EOFError,
        StopIteration,  # datasets lets one out where a compressed file ends before its first record
        zlib.error,
        zstandard.ZstdError,
        ValueError,
        RuntimeError,
        pyarrow.ArrowException,
        *((httpx.HTTPError,) if httpx else ()),
    )
    try:
        yield
    except failures as error:
        lines = str(error).strip().splitlines()
        raise RopewalkError(f"{what}: {lines[0] if lines else type(error).__name__}") from error


SECONDS = 5.0
"""How long the hub may take to say anything at all."""


def hub_reachable(seconds: float = SECONDS) -> bool:
    """Whether the hub answers, whatever it says; False too where the user asked for offline mode.

    Args:
        seconds: how long to wait.
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
    """While open, the hub's libraries use what they have kept on disk, and fail at once where it is not there."""
    import datasets
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
