"""Arrays on disk hold what arrays in memory hold, and rows planned through them are the same."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ropewalk.data import MixtureSettings, PackingSettings, ValidationSettings, disk_arrays
from ropewalk.data.disk_arrays import DiskArrays, chunks
from ropewalk.errors import RopewalkError
from tests.data.rows.rows_cases import job, tree


@given(st.integers(0, 50), st.integers(1, 9))
def test_chunks_cover_everything_once(length: int, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_arrays, "CHUNK", size)
        numbers = np.arange(length)
        parts = [numbers[part] for part in chunks(length)]
    assert [number for part in parts for number in part.tolist()] == list(range(length))
    assert all(0 < len(part) <= size for part in parts)


def test_arrays_move_to_disk_when_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_arrays, "MEMORY_BYTES", 100)
    monkeypatch.setattr(disk_arrays, "_MAPPED_BYTES", 4096)
    monkeypatch.setattr(disk_arrays, "CHUNK", 7)
    arrays = DiskArrays(tmp_path / "arrays")
    given = [np.arange(n, dtype=kind) for n in (10, 3, 0, 700, 5) for kind in (np.int64, np.int32, np.uint64)]
    kept = [arrays.keep(values) for values in given]
    assert kept[0] is given[0]
    assert not np.shares_memory(kept[-1], given[-1])
    for values, copy in zip(given, kept, strict=True):
        assert copy.dtype == values.dtype
        assert copy.tolist() == values.tolist()
    index = np.array([699, 0, 5, 5, 8, 1, 2, 3, 4, 100])
    assert arrays.take(kept[9], index).tolist() == index.tolist()
    assert arrays.take(kept[9], slice(2, 4)).tolist() == [2, 3]
    # The files have no names, so nothing is left, however the process ends.
    assert list((tmp_path / "arrays").iterdir()) == []


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_arrays, "MEMORY_BYTES", 0)
    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(RopewalkError, match=rf"cannot write {tmp_path}: No space left on device"):
        DiskArrays(tmp_path).empty(3, np.int64)


@pytest.mark.parametrize("packing", ["sequential", "best_fit"])
@pytest.mark.parametrize("mixed", [False, True])
def test_rows_planned_through_the_disk_are_the_same(
    corpus_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    packing: str,
    mixed: bool,
) -> None:
    settings = PackingSettings(context=64, pattern="anchor", packing=packing)
    mixture = MixtureSettings(weights={"a": 2.0}) if mixed else MixtureSettings()
    work = job(
        corpus_folder, tokenizer, settings, validation=ValidationSettings(documents=5), mixture=mixture
    )
    work.pack(tmp_path / "memory")
    monkeypatch.setattr(disk_arrays, "MEMORY_BYTES", 0)
    monkeypatch.setattr(disk_arrays, "_MAPPED_BYTES", 4096)
    monkeypatch.setattr(disk_arrays, "CHUNK", 7)
    monkeypatch.setattr("ropewalk.data.rows.plan._CHUNK", 11)
    monkeypatch.setattr("ropewalk.data.statistics.RANGE_DOCUMENTS", 13)
    work.pack(tmp_path / "disk")
    assert tree(tmp_path / "disk") == tree(tmp_path / "memory")
