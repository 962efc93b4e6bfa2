"""A run's pages in a browser: hostile text runs nothing, asks for nothing, breaks no layout; the search finds."""

import json
import queue
import re
import runpy
import socketserver
import subprocess
import threading
from pathlib import Path

import pytest

from ropewalk.evaluation.predictions import write_predictions
from ropewalk.evaluation.settings import ViewSettings
from ropewalk.reporting.answers import write_view
from ropewalk.reporting.page import Page, Picture, write_page
from ropewalk.reporting.tables import ResultTable
from tests.evaluation.test_excerpts import answered
from tests.places import ROOT

CHROMIUM = runpy.run_path(str(ROOT / "scripts" / "build_site.py"), run_name="build_site")["browser"]()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

VISIT = """<!doctype html><body><script>(async () => {
  const found = {}, ran = [];
  const pause = milliseconds => new Promise(done => setTimeout(done, milliseconds));
  const until = async so => { for (let tries = 0; tries < 50 && !so(); tries++) await pause(50); };
  addEventListener("message", event => ran.push(event.data));
  for (const width of [400, 1400]) for (const page of PAGES) {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width: ${width}px; height: 900px; border: 0`;
    frame.src = page;
    await new Promise(loaded => { frame.onload = loaded; document.body.append(frame); });
    const inside = frame.contentDocument, all = inside.querySelectorAll("details");
    for (const each of all) each.open = true;
    const seen = { width: inside.documentElement.scrollWidth, height: inside.documentElement.scrollHeight };
    const field = inside.querySelector("input[type=search]"), choice = inside.querySelector("#verdict");
    if (field) {
      const said = inside.querySelector("#summary");
      const say = async (words, verdict) => {
        field.value = words, choice.value = verdict;
        field.dispatchEvent(new Event("input", { bubbles: true }));
        await until(() => !said.textContent.includes("searching"));
        return parseInt(said.textContent);
      };
      seen.found = [];
      for (const [words, verdict] of [["", ""], ["42", ""], ["onerror", ""], ["nowhere to be found", ""],
          ["", "better"], ["", "worse"], ["xxx", "worse"], ["", "wrong 0"], ["", "changed"]])
        seen.found.push(await say(words, verdict));
      await say("", "");
      const press = key => inside.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
      for (const key of ["j", "j", "j", "k", "Enter"]) press(key);
      await until(() => inside.querySelector("#sample h2"));
      seen.opened = inside.querySelector("#sample h2")?.textContent;
      seen.marked = inside.querySelector("#sample mark")?.textContent;
      seen.rows = inside.querySelectorAll(".row").length;
      seen.width = inside.documentElement.scrollWidth;
    }
    await pause(200);
    found[`${page.split("/").pop()} ${width}`] = seen;
    frame.remove();
  }
  fetch("http://127.0.0.1:PORT/done", { method: "POST", mode: "no-cors", body: JSON.stringify({ found, ran }) });
})()</script></body>"""
"""Shows each page at two widths in a frame, opens all folds, and writes down what it saw and who sent a message."""


class Server(socketserver.ThreadingTCPServer):
    """Writes down what it is asked for, and what is sent to it."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Asked)
        self.port = self.server_address[1]
        self.asked: list[str] = []
        self.sent: queue.SimpleQueue[bytes] = queue.SimpleQueue()


class Asked(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        method, _, rest = self.rfile.readline().decode("ascii", "replace").partition(" ")
        if not rest:
            # Chromium opens connections ahead of need.
            return
        length = 0
        while (line := self.rfile.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        body = self.rfile.read(length)
        self.wfile.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        if method == "POST":
            self.server.sent.put(body)
        else:
            self.server.asked.append(rest.split(" ")[0])


@pytest.fixture
def server():
    with Server() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def evil(port: int, name: str) -> str:
    """Text that sends a message and asks the server for something where it is taken for markup."""
    return (
        f"</pre></details></script></style><script>parent.postMessage('script {name}', '*')</script>"
        f"<img src='http://127.0.0.1:{port}/{name}' onerror=\"parent.postMessage('image {name}', '*')\">"
        f"<link rel=stylesheet href='http://127.0.0.1:{port}/{name}.css'><iframe src='http://127.0.0.1:{port}/{name}-frame'>"
        f"</iframe><style>@import 'http://127.0.0.1:{port}/{name}-style';</style><form action='http://127.0.0.1:{port}/'>"
        "\u202eturned\x1b[31m\x00\ud800 {{{{ 7 * 7 }}}} " + "w" * 500
    )


def chromium(folder: Path, page: Path, *options: str) -> subprocess.Popen[bytes]:
    own = ("--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files")
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [CHROMIUM, *own, profile, *options, page.as_uri()]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def hostile_run(folder: Path, port: int) -> None:
    text = evil(port, "text")
    prompt = f"The key is 42. {text}" + "grass " * 3000
    huge = "x" * 1_000_000
    write_predictions(
        folder / "predictions-before.jsonl",
        [answered(prompt, index=0, answer=text, score=0.0), answered("a", index=1, answer=huge)],
    )
    write_predictions(
        folder / "predictions-after.jsonl",
        [answered(prompt, index=0), answered("key", index=1, answer=huge, score=0.0)],
    )
    write_view(ViewSettings(folder=folder))
    table = ResultTable(text, (text, "b"), ((text, "1"),), notes=(text,))
    (folder / "a.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>", encoding="utf-8")
    pictures = [Picture(folder / "a.svg", text, text)]
    page = Page(text, {text: text}, pictures, [table], details={text: text}, lead=text, first=[table])
    write_page(page, folder / "report.html")


def test_hostile_text_is_text_and_the_search_finds(tmp_path, server):
    hostile_run(tmp_path, server.port)
    pages = ["report.html", "answers/index.html"]
    raw, control = (
        evil(server.port, name).encode("utf-8", "replace").decode() for name in ("raw", "control")
    )
    for name in pages:
        # Were the text not escaped, the policy of the page would still stop it.
        page = (tmp_path / name).read_text(encoding="utf-8")
        (tmp_path / name).with_name(f"raw-{Path(name).name}").write_text(
            page.replace("</h1>", f"</h1>{raw}", 1), encoding="utf-8"
        )
    # Without a policy it does what it wants, which this test can see.
    (tmp_path / "control.html").write_text(f"<!doctype html><body>{control}", encoding="utf-8")
    visited = [*pages, "raw-report.html", "answers/raw-index.html", "control.html"]
    uris = json.dumps([(tmp_path / name).as_uri() for name in visited])
    visit = tmp_path / "visit.html"
    visit.write_text(VISIT.replace("PAGES", uris).replace("PORT", str(server.port)), encoding="utf-8")
    with chromium(tmp_path, visit, "--window-size=1500,1000") as process:
        try:
            result = json.loads(server.sent.get(timeout=60))
        except queue.Empty:
            pytest.skip("Chromium does not run here")
        finally:
            process.kill()
    assert {"script control", "image control"} <= set(result["ran"])
    assert "/control" in server.asked
    assert {each for each in result["ran"] if "control" not in each} == set()
    assert [each for each in server.asked if "control" not in each] == []
    for width in (400, 1400):
        for name in ("report.html", "index.html"):
            assert result["found"][f"{name} {width}"]["width"] <= width
        # A megabyte in one line makes no endless page.
        seen = result["found"][f"index.html {width}"]
        assert seen["height"] <= 900
        assert seen["found"] == [2, 2, 1, 0, 1, 1, 1, 1, 2]
        assert (seen["opened"], seen["rows"]) == ("passkey at 1,024 tokens, sample 0", 2)
        assert seen["marked"] == "42"


@pytest.mark.parametrize("name", ["report", "answers/index"])
def test_pages_are_printed(tmp_path, name):
    hostile_run(tmp_path, 1)
    printed = tmp_path / "printed.pdf"
    with chromium(tmp_path, tmp_path / f"{name}.html", f"--print-to-pdf={printed}") as process:
        process.wait(60)
    if not printed.is_file():
        pytest.skip("Chromium does not run here")
    content = printed.read_bytes()
    assert content.startswith(b"%PDF-")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", content)) < 20
