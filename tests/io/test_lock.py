"""A lock keeps a second process out and says who holds it; one that was left behind does no harm."""

from __future__ import annotations

import errno
import os
import platform
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.io.lock import locked

HOLD = (
    "import sys; from pathlib import Path\n"
    "from ropewalk.io.lock import locked\n"
    "with locked(Path(sys.argv[1])):\n"
    "    print('held', flush=True)\n"
    "    sys.stdin.read()\n"
)


def test_another_process_is_named_and_its_end_by_a_signal_frees_the_folder(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        said = f"process {holder.pid} on {platform.node()} is writing to {tmp_path}; wait until it is done, or give x"
        with pytest.raises(RopewalkError) as refused, locked(tmp_path, "give x"):
            pass
        assert str(refused.value) == said
        holder.kill()
    assert (tmp_path / ".lock").exists()
    with locked(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_may_wait_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    with ExitStack() as held:
        held.enter_context(locked(tmp_path))
        release = threading.Timer(0.2, held.close)
        release.start()
        with locked(tmp_path, wait=60):
            assert (tmp_path / ".lock").exists()
        release.join()
    assert list(tmp_path.iterdir()) == []


def test_a_second_lock_in_one_process_is_refused_too_and_leaves_the_first(tmp_path: Path) -> None:
    with locked(tmp_path):
        for _ in range(2):
            with pytest.raises(RopewalkError, match=f"process {os.getpid()} on"), locked(tmp_path):
                pass
    with locked(tmp_path):
        pass


def test_a_holder_that_has_not_written_its_name_yet_is_another_process(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / ".lock").write_text("")
        with pytest.raises(RopewalkError, match=r"^another process is writing to"), locked(tmp_path):
            pass


def test_files_of_a_folder_have_locks_of_their_own(tmp_path: Path) -> None:
    said = r"is writing to .*a\.jsonl; wait"
    with (
        locked(tmp_path, file="a.jsonl"),
        locked(tmp_path, file="b.jsonl"),
        locked(tmp_path),
        pytest.raises(RopewalkError, match=said),
        locked(tmp_path, file="a.jsonl"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_made_goes_again_if_nothing_came_into_it(tmp_path: Path) -> None:
    with locked(tmp_path / "empty"):
        pass
    with locked(tmp_path / "filled"):
        (tmp_path / "filled" / "file").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["filled", "file"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_without_locks_in_the_file_system_work_goes_on_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    fail_with(monkeypatch, code)
    with locked(tmp_path):
        assert f"the file system of {tmp_path} does not support locks" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_other_failures_to_lock_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(RopewalkError, match="is a file, but must be a folder; give another folder"),
        locked(tmp_path / "file"),
    ):
        pass
    fail_with(monkeypatch, errno.EIO)
    with pytest.raises(RopewalkError, match=r"cannot lock .*: Input/output error"), locked(tmp_path):
        pass


def fail_with(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("fcntl.flock", flock)


def test_paths_that_cannot_be_a_folder_are_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    missing = r"link is a link to .*nowhere, which does not exist; give another"
    with pytest.raises(RopewalkError, match=missing), locked(tmp_path / "link"):
        pass
    with pytest.raises(RopewalkError, match="File name too long"), locked(tmp_path / ("a" * 300)):
        pass


def test_an_object_store_is_no_folder(tmp_path, monkeypatch):
    """As a path its URL is a relative one, so that results would end up in a folder named ``s3:``."""
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(
            RopewalkError, match=r"^s3://bucket/run is a URL, but results can only be written to a folder"
        ),
        locked(Path("s3://bucket/run")),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
