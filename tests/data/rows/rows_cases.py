"""Packing runs of one small corpus, whole and interrupted."""

from pathlib import Path

import pytest

from ropewalk.data import PackedRows, PackingSettings, SourceSpec
from tests.data.cases import Job

SETTINGS = PackingSettings(context=64, pattern="anchor", positions="reset")


def prepare(
    corpus: Path, tokenizer: object, settings: PackingSettings = SETTINGS, **options: object
) -> PackedRows:
    options.setdefault("cache_dir", corpus.parent / "packed")
    cache, runs = options.pop("cache_dir"), {"workers", "progress"}
    run = {name: options.pop(name) for name in runs & options.keys()}
    return Job.of([SourceSpec(path=str(corpus))], tokenizer, settings, **options).prepare(cache, **run)


SHARD_SETTINGS = PackingSettings(context=64, pattern="anchor")


def interrupted(work: Job, folder: Path, files: int = 1, **options: object) -> Path:
    """The folder of a run that ends when it has written so many files of rows."""
    reports = 0

    def end(*_: int) -> None:
        nonlocal reports
        reports += 1
        if reports == files:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work.pack(folder, written=end, **options)
    return folder


def imbalance(account: dict[str, int]) -> tuple[int, int]:
    """Left minus right side of the two equations of an account of tokens."""
    left_out = ("validation", "withheld", "unread", "dropped", "own_bos")
    own = (
        account["tokens_in"]
        + account["repeated"]
        + account.get("synthetic", 0)
        - sum(account[key] for key in left_out)
    )
    added = sum(account[key] for key in ("bos", "eos", "tags", "padding"))
    return own - account["own"], own + added - account["tokens_packed"] - account["tokens_remainder"]


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def job(
    corpus_folder: Path, tokenizer: object, packing: PackingSettings = SHARD_SETTINGS, **options: object
) -> Job:
    return Job.of([SourceSpec(path=str(corpus_folder))], tokenizer, packing, **options)
