"""Copy of a run at an fsspec URL (S3, GCS, another disk): its checkpoints and small files, from which it can resume.

Checkpoints are written to the run's folder first, where a rename makes them complete. Object stores have no rename:
here the record, which is copied last and deleted first, makes a checkpoint complete.
"""

from __future__ import annotations

import unicodedata
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.io.files import is_plain, new_folder, path_inside, replacing
from ropewalk.io.urls import MASK, credentials, masked, without
from ropewalk.training.checkpoint.files import CHECKPOINTS, RECORD, checkpoints_in, is_place, place_of

OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "abfs", "az", "adl", "oss", "oci", "tos"))
"""Protocols without folders: where one is to be made, their packages would make the bucket."""


class RemoteCopy:
    """Copy of a run at a URL.

    Args:
        url: ``protocol://...``, without a user or password: packages of fsspec read credentials from their own files
            and environment variables. Values of its query, such as a signature, are used and not shown.

    Raises:
        RopewalkError: if the URL has no protocol or contains credentials, or they are masked, or fsspec or its package
            for the protocol is missing.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.username or parts.password:
            # Without the URL, which would end up in logs.
            raise RopewalkError(
                f"the URL of checkpoints.copy_to (host {parts.hostname}) contains a user name or password; remove "
                "the credentials from the URL, and set them either in environment variables or in a configuration "
                "file of the storage"
            )
        if not parts.scheme:
            raise RopewalkError(
                "checkpoints.copy_to must be a URL with a protocol, such as s3://bucket/run or file:///mnt/run, got "
                f"{url.partition('?')[0]!r}"
            )
        if MASK in url:
            raise RopewalkError(
                f"checkpoints.copy_to is {url}, whose credentials were left out when the run stored its recipe; start "
                "the command with your own recipe, or give the whole URL with --set checkpoints.copy_to=URL"
            )
        # Imported here, since few runs need it.
        from fsspec.core import url_to_fs

        self.url = masked(url.rstrip("/"))
        """The URL without credentials, for messages."""
        self._credentials = credentials(url)
        try:
            self.files, self.root = url_to_fs(url.rstrip("/"))
        except (ImportError, ValueError) as error:
            raise RopewalkError(
                f"checkpoints.copy_to: cannot use {self.url}: {without(str(error), self._credentials)}"
            ) from error

    @contextmanager
    def _reached(self, kind: type[RopewalkError], what: str) -> Iterator[None]:
        try:
            yield
        except RopewalkError:
            raise
        # Each storage has errors of its own, which have no common base below Exception.
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise kind(f"cannot {what} {self.url}: {without(reason, self._credentials)}") from error

    def check(self) -> None:
        """Write and delete a small object, so that a missing right is found before training.

        Raises:
            RopewalkError: with the reason.
        """
        path = f"{self.root}/.ropewalk-{uuid.uuid4().hex}"
        with self._reached(RopewalkError, "write to"):
            self._make_folder(self.root)
            self.files.pipe_file(path, b"ropewalk")
            self.files.rm_file(path)

    def read(self, name: str) -> bytes | None:
        """Content of a file of the run; None if the copy has no such file."""
        with self._reached(RopewalkError, "read"):
            self.files.invalidate_cache()
            path = f"{self.root}/{name}"
            return bytes(self.files.cat_file(path)) if self.files.exists(path) else None

    def upload(self, run: Path, small: list[Path], checkpoint: Path) -> None:
        """Copy a complete checkpoint and the run's small files, and delete checkpoints that the run no longer keeps.

        Args:
            run: folder of the run.
            small: its other files.
            checkpoint: the checkpoint.

        Raises:
            RunFailure: if a file cannot be copied; the checkpoint in the run's folder is not affected.
        """
        target = f"{self.root}/{CHECKPOINTS}/{checkpoint.name}"
        with self._reached(RunFailure, f"copy {checkpoint} to"):
            # First, so that the log reaches at least as far as the checkpoint.
            for path in small:
                self._put(path, f"{self.root}/{path.relative_to(run).as_posix()}")
            self._delete(target)
            for path in sorted(checkpoint.iterdir(), key=lambda path: (path.name == RECORD, path.name)):
                self._put(path, f"{target}/{path.name}")
            kept = {path.name for path in checkpoints_in(checkpoint.parent)}
            for name in self._names():
                if name not in kept:
                    self._delete(f"{self.root}/{CHECKPOINTS}/{name}")

    def _put(self, path: Path, target: str) -> None:
        self._make_folder(target.rsplit("/", 1)[0])
        self.files.put_file(str(path), target)

    def _get(self, source: str, path: Path) -> None:
        # Here too: the block of a new folder or file would take an OSError of the storage for one of its own disk.
        with self._reached(RopewalkError, "read"):
            self.files.get_file(source, str(path))

    def _make_folder(self, path: str) -> None:
        if urlsplit(self.url).scheme not in OBJECT_STORES:
            self.files.makedirs(path, exist_ok=True)

    def _delete(self, target: str) -> None:
        if not self.files.exists(target):
            return
        if self.files.exists(f"{target}/{RECORD}"):
            self.files.rm_file(f"{target}/{RECORD}")
        self.files.rm(target, recursive=True)

    def _names(self) -> list[str]:
        """Names of checkpoints, complete or not."""
        folder = f"{self.root}/{CHECKPOINTS}"
        self.files.invalidate_cache()
        if not self.files.exists(folder):
            return []
        there = (str(each).rstrip("/").rsplit("/", 1)[-1] for each in self.files.ls(folder, detail=False))
        return sorted((name for name in there if is_place(name)), key=lambda name: place_of(Path(name)))

    def restore(self, run: Path, last: str) -> list[str]:
        """Copy a run into an empty folder.

        Args:
            run: the folder.
            last: name of the file whose presence says that the folder contains a run; it is copied last.

        Returns:
            Names of the checkpoints, the earliest first; empty if there is no copy of a run.

        Raises:
            RopewalkError: if a file cannot be copied, or the copy has no complete checkpoint.
        """
        with self._reached(RopewalkError, "read"):
            self.files.invalidate_cache()
            if not self.files.exists(f"{self.root}/{last}"):
                return []
            names = [
                name
                for name in self._names()
                if self.files.exists(f"{self.root}/{CHECKPOINTS}/{name}/{RECORD}")
            ]
            if not names:
                raise RopewalkError(
                    f"{self.url} contains a run without a complete checkpoint, so there is nothing to resume; leave "
                    "out --resume, and set checkpoints.copy_to to another URL"
                )
            # Before anything is written, so that a copy that is refused leaves nothing.
            places = self._places(run)
            for name in names:
                with new_folder(run / CHECKPOINTS / name) as partial:
                    for key, path in places.items():
                        if path.parent == run / CHECKPOINTS / name:
                            self._get(key, partial / path.name)
            small = {key: path for key, path in places.items() if _is_small(path.relative_to(run))}
            for key, path in sorted(small.items(), key=lambda each: each[1] == run / last):
                with replacing(path) as temporary:
                    self._get(key, temporary)
            return names

    def _places(self, run: Path) -> dict[str, Path]:
        """Path in the run's folder of each file of the copy, by its key."""
        places: dict[str, Path] = {}
        for key in map(str, self.files.find(self.root)):
            name = key.removeprefix(f"{self.root.rstrip('/')}/")
            # Consoles of object stores mark a folder by an empty object.
            if key.endswith("/"):
                continue
            path = path_inside(run, name)
            if path is None:
                linked = all(is_plain(part) for part in name.split("/"))
                raise RopewalkError(
                    f"{self.url} contains the file {name!r}, which ropewalk would copy outside the run's folder; "
                    + (f"remove the link from {run}" if linked else "delete this file from the copy")
                )
            places[key] = path
        # An object store tells names apart that are one on some disks, and lets a file have the name of a folder.
        taken = {_folded(folder) for path in places.values() for folder in path.relative_to(run).parents}
        for path in places.values():
            place = path.relative_to(run)
            if _folded(place) in taken:
                raise RopewalkError(
                    f"{self.url} contains the file {str(place)!r} beside a file or folder of the same name; delete "
                    "this file from the copy"
                )
            taken.add(_folded(place))
        return places


def _folded(name: Path) -> str:
    """A name without what some disks do not distinguish: case, and how letters with accents are encoded."""
    return unicodedata.normalize("NFC", str(name)).casefold()


def _is_small(name: Path) -> bool:
    """Whether a file is none of a checkpoint, and not hidden: a copy never contains the run's lock."""
    return name.parts[0] != CHECKPOINTS and not any(part.startswith(".") for part in name.parts)
