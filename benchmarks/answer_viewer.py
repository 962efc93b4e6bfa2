"""Time of the pages of `ropewalk eval view` in a browser, with many answers.

    python -m benchmarks.answer_viewer [--answers N]

Writes the pages for made-up answers of two models with excerpts of 2.6 kB, opens them from the disk in headless
Chromium, and times what a reader waits for: the first rows, each filter and order until the next frame, a sample, and a
search of all answers. Without Chromium, only the writing is timed.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.common import parsed, parser_of, settings_of, write
from ropewalk.evaluation.predictions import Prediction
from ropewalk.reporting.answers import write_answers
from ropewalk.training.answers import Answers

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TASKS, LENGTHS = 13, (4096, 8192, 16384, 32768, 65536)
PART = 865
"""Characters of each of the three parts of an excerpt."""
SIGN = "MEASURED "
MOST_SECONDS = 120

VISIT = """<!doctype html><body><script>(async () => {
  const frame = document.createElement("iframe"), seconds = {};
  const painted = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  const timed = async (name, act, so) => {
    const began = performance.now();
    await act();
    do { await painted(); } while (so && !so());
    seconds[name] = Math.max(seconds[name] ?? 0, (performance.now() - began) / 1000);
  };
  frame.style.cssText = "width: 1400px; height: 900px; border: 0";
  document.body.append(frame);
  const inside = () => frame.contentDocument, $ = id => inside().getElementById(id);
  const change = (id, value) => { $(id).value = value; $(id).dispatchEvent(new Event("input", { bubbles: true })); };
  await timed("first_rows", () => { frame.src = PAGE; }, () => inside()?.querySelector(".row .right, .row .wrong"));
  const rows = inside().querySelectorAll(".row").length, said = {};
  for (const [id, name] of [["task", "filter"], ["length", "filter"], ["depth", "filter"], ["difficulty", "filter"],
      ["verdict", "filter"], ["order", "order"]]) {
    for (const option of [...$(id).options].slice(0, 8)) await timed(name, () => change(id, option.value));
    said[id] = $("summary").textContent;
    change(id, "");
  }
  const found = () => !$("summary").textContent.includes("searching");
  await timed("sample", () => inside().querySelector(".row").click(), () => inside().querySelector("pre.whole"));
  await timed("search", () => change("words", "needle-in-one"), found);
  said.words = $("summary").textContent;
  await timed("search_again", () => change("words", "value"), found);
  const nodes = inside().querySelectorAll("*").length;
  console.log("SIGN" + JSON.stringify({ seconds, rows, nodes, said }));
})()</script></body>"""


def predictions(answers: int, seed: int) -> dict[Any, Prediction]:
    """Made-up answers: RULER's number of tasks, and as many samples of each as there are to be."""
    draw, filler = random.Random(seed), "The grass is green. The sky is blue. " * 30
    each = -(-answers // (TASKS * len(LENGTHS)))
    found: dict[Any, Prediction] = {}
    places = ((task, length, index) for task in range(TASKS) for length in LENGTHS for index in range(each))
    for task, length, index in list(places)[:answers]:
        value, start = str(draw.randrange(10**6, 10**7)), 2 * length
        middle = f"{filler[:400]} The number is {value}. {filler}"[:PART]
        parts = ((0, filler[:PART], ""), (start, middle, ""), (4 * length - PART, filler[:PART], ""))
        right = draw.random() < 0.7
        answer = (
            f" The value is {value if right else draw.randrange(10**6)}." + " And so on." * draw.randrange(15)
        )
        if len(found) == answers // 2:
            answer += " needle-in-one"
        details = {"depth": (index % 11) / 10, "difficulty": index % 4}
        own = Prediction(
            "ruler",
            f"task_{task}",
            length,
            index,
            "ab",
            answer,
            (value,),
            "all",
            float(right),
            length - 100,
            1,
            0.98,
            12,
            right,
            details,
            None,
            parts,
            4 * length,
        )
        found[own.key] = own
    return found


def measured(browser: str, page: Path, scratch: Path) -> dict[str, Any]:
    """What a browser says of the page."""
    visit = scratch / "visit.html"
    visit.write_text(VISIT.replace("PAGE", json.dumps(page.as_uri())).replace("SIGN", SIGN), encoding="utf-8")
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--no-first-run",
    ]
    options += [
        "--enable-logging=stderr",
        "--window-size=1500,1000",
        f"--user-data-dir={scratch / 'profile'}",
    ]
    with subprocess.Popen(
        [browser, *options, visit.as_uri()], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        timer = Timer(MOST_SECONDS, process.kill)
        timer.start()
        try:
            for line in process.stderr:
                if SIGN in line:
                    text = line.split(SIGN, 1)[1].rsplit('", source:', 1)[0]
                    found: dict[str, Any] = json.loads(text)
                    return found
        finally:
            timer.cancel()
            process.kill()
    raise SystemExit(f"{browser} did not show the page in {MOST_SECONDS} seconds")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--answers", type=int, default=100_000, help="number of answers of each of the two models"
    )
    options = parsed(parser, {"answers": 1200}, arguments)
    sides = [
        Answers(name, predictions(options.answers, seed)) for seed, name in enumerate(("before", "after"))
    ]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "pages"
        began = time.perf_counter()
        result = write_answers(out, "Answers", sides)
        seconds = time.perf_counter() - began
        sizes = {each.name: each.stat().st_size for each in (out / "data").iterdir()}
        assert (result.samples, result.paired) == (options.answers, options.answers)
        found: dict[str, Any] = {
            "settings": settings_of(options),
            "write_seconds": seconds,
            "index_bytes": sizes["index.js"],
            "bytes": sum(sizes.values()),
            "chunk_bytes": {
                kind: max(n for name, n in sizes.items() if kind in name) for kind in ("answers", "prompts")
            },
        }
        browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
        found["browser"] = None if browser is None else measured(browser, result.page, Path(folder))
    write("answer_viewer", found, options)


if __name__ == "__main__":
    main()
