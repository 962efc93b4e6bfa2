"""Published files are fetched into the cache only if they are the ones that were meant."""

import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from ropewalk.errors import RunFailure
from ropewalk.evaluation.tasks import fetched_data
from ropewalk.evaluation.tasks.fetched_data import SOURCES, Source, fetch, fetch_all, fetched
from ropewalk.evaluation.tasks.haystack_sources import essay_words, essays_unavailable
from ropewalk.evaluation.tasks.ruler.qa import QuestionTask
from ropewalk.io.digests import FileDigest
from tests.evaluation.qa_cases import squad


class Files:
    """A server of files by path; a path that begins with /to/ leads to the address behind it."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                body = outer.files.get(self.path)
                leads = self.path.startswith("/to/")
                self.send_response(302 if leads else 404 if body is None else 200)
                if leads:
                    self.send_header("Location", self.path.removeprefix("/to/"))
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Files]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fetched_data, "SCHEMES", ("http",))
    made = Files()
    yield made
    made.server.shutdown()
    made.server.server_close()


def source(body: bytes, *addresses: str, name: str = "squad", texts: str | None = None) -> Source:
    wanted = FileDigest(len(body), hashlib.sha256(body).hexdigest())
    return Source(name, "a set", addresses, wanted, SOURCES[name].place, texts)


def test_a_file_is_fetched_once_and_found_by_its_task(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps(squad()).encode()
    files.files["/a"] = body
    one = source(body, f"{files.url}/gone", f"{files.url}/a")
    monkeypatch.setattr(fetched_data, "SOURCES", {**SOURCES, "squad": one})
    task = QuestionTask("qa_1", "squad")
    assert "run ropewalk eval fetch, or give its file with --squad" in str(task.unavailable())
    told: list[str] = []
    path = fetch(one, told.append)
    assert path.read_bytes() == body
    assert len(told) == 2
    assert fetch(one, told.append) == fetched("squad") == path
    assert files.asked == ["/gone", "/a"]
    assert task.unavailable() is None
    assert task.questions().questions


def test_another_file_is_refused_and_not_kept(files: Files) -> None:
    body = b"some bytes"
    one = source(body, f"{files.url}/a")
    for served, reason in (
        (b"same bytes", "it is not the published file: 10 bytes with SHA-256"),
        (body[:-1], "it is not the published file: 9 bytes"),
        (body + b"!", "it has more than the 10 bytes of the published file"),
        (body + bytes(1 << 20), "it has more than the 10 bytes"),
    ):
        files.files["/a"] = served
        with pytest.raises(RunFailure, match=reason):
            fetch(one)
        assert not list(fetched_data.cache_folder("benchmarks").glob("*"))


def test_only_https_is_asked_and_followed(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    files.files["/a"] = b"body"
    around = source(b"body", f"{files.url}/to/{files.url}/a")
    assert fetch(around).read_bytes() == b"body"
    fetched_data._place(around).unlink()
    # Now the address is of a scheme that is asked, and what it leads to is not.
    with pytest.raises(RunFailure, match="it leads to an address of https, not http"):
        fetch(source(b"body", f"{files.url}/to/https://127.0.0.1:9/a"))
    # urllib's own rule.
    with pytest.raises(RunFailure, match="HTTP 302"):
        fetch(source(b"body", f"{files.url}/to/file:///etc/passwd"))
    monkeypatch.setattr(fetched_data, "SCHEMES", ("https",))
    asked = len(files.asked)
    with pytest.raises(RunFailure, match="it leads to an address of http, not https"):
        fetch(around)
    assert len(files.asked) == asked
    assert {address.partition(":")[0] for each in SOURCES.values() for address in each.addresses} == {"https"}


def test_texts_of_an_archive_stay_in_their_folder(
    files: Files, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as whole:
        for name in ("p/e/b.txt", "p/e/a.txt", "p/e/x.py", "p/c.txt", "p/e/../../../../up.txt", "/p/e/d.txt"):
            whole.writestr(name, f"words of {name}")
    body = archive.getvalue()
    files.files["/z"] = body
    one = source(body, f"{files.url}/z", name="essays", texts="p/e")
    monkeypatch.setattr(fetched_data, "SOURCES", {**SOURCES, "essays": one})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "run ropewalk eval fetch" in str(essays_unavailable())
    place = fetch(one)
    assert sorted(path.name for path in place.iterdir()) == ["a.txt", "b.txt"]
    assert [path.name for path in place.parent.iterdir()] == [place.name]
    assert not (tmp_path / "up.txt").exists()
    assert essays_unavailable() is None
    assert essay_words()[:3] == ("words", "of", "p/e/a.txt")


def test_what_can_be_fetched_is_fetched_before_a_failure_is_told(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.files["/a"] = b"body"
    bad, good = source(b"none", f"{files.url}/none"), source(b"body", f"{files.url}/a", name="hotpotqa")
    monkeypatch.setattr(fetched_data, "SOURCES", {"squad": bad, "hotpotqa": good})
    with pytest.raises(RunFailure, match=r"a set cannot be fetched \(127.0.0.1: HTTP 404\); .* give --squad"):
        fetch_all()
    assert fetched("hotpotqa") is not None
    monkeypatch.setattr(fetched_data, "SOURCES", {"hotpotqa": good})
    assert fetch_all().to_json()["hotpotqa"]["sha256"] == good.file.sha256
    # Nobody is asked for what is there.
    off = replace(good, addresses=())
    assert fetch(off) == fetched("hotpotqa")
