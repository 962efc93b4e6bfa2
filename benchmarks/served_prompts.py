"""Prompts a second that ``ropewalk eval --server`` gets answered, beside lm_eval's ``local-completions``.

    python -m benchmarks.served_prompts

A server of OpenAI's protocol in a process of its own answers passkey prompts with an embedded model, one after the
other, and then with a fixed text at once, which shows what the clients themselves take. Both clients send the same
prompts as token ids (checked by digest) with as many requests at a time, and must find the same number of keys. The
rate is that between the first request and the last answer, as the server sees it; the time of the whole command stands
beside. The bound is the rate of the model without a server, measured once at the end. On a machine with other work,
compare the clients of a round, not the rates of different rounds. Without its extra ``api``, lm_eval is left out, and
only ropewalk is measured.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Any

import torch

from benchmarks.common import parsed, parser_of, program_says, settings_of, write
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import resolve_model
from ropewalk.evaluation.backends.in_memory import InMemoryBackend
from ropewalk.evaluation.backends.protocol import GenerationRequest
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks.passkey import PasskeyTask
from ropewalk.models.load import load_model

MODEL = "embedded:retrieval"
NAME = "served"
FIXED = " 12345."
ROPEWALK = "from ropewalk.cli.app import run; run()"
LM_EVAL = "from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
NEEDED = ("lm_eval", "tenacity", "aiohttp", "requests")
TASK = """
task: passkey_prompts
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{key}}}}"
generation_kwargs:
  max_gen_toks: {most}
  until: []
  do_sample: false
filter_list:
  - name: first_integer
    filter:
      - function: regex
        regex_pattern: "([0-9]+)"
      - function: take_first
metric_list:
  - metric: exact_match
"""


class Answerer:
    """The model, one prompt at a time, or the fixed text; and what it has answered since it was last asked."""

    def __init__(self, with_model: bool, length: int) -> None:
        self.folder = resolve_model(MODEL)
        self.tokenizer = load_tokenizer(self.folder)
        self.length = length
        self.backend = InMemoryBackend(load_model(self.folder), self.tokenizer) if with_model else None
        self.lock = threading.Lock()
        self.begun: list[float] = []
        self.done: list[float] = []
        self.prompts: list[str] = []

    def answer(self, ids: Sequence[int], most: int) -> str:
        began = time.perf_counter()
        said = FIXED
        if self.backend is not None:
            with self.lock:
                (found,) = self.backend.answers([GenerationRequest(tuple(ids), most, self.length)])
            said = found.text
        # One token is what ropewalk asks for before the first prompt.
        if most > 1:
            with self.lock:
                self.begun.append(began)
                self.done.append(time.perf_counter())
                self.prompts.append(hashlib.sha256(str(list(ids)).encode()).hexdigest())
        return said

    def warm_up(self) -> None:
        """Compute once, which takes longer the first time."""
        text = "The grass is green. " * self.length
        self.answer(self.tokenizer(text)["input_ids"][: self.length // 2], 1)

    def served(self) -> dict[str, Any]:
        """The seconds from the first request to the last answer, and a digest of all prompts."""
        with self.lock:
            seconds = max(self.done) - min(self.begun)
            digest = hashlib.sha256("".join(sorted(self.prompts)).encode()).hexdigest()
            found = {"prompts": len(self.done), "seconds": seconds, "digest": digest}
            self.begun, self.done, self.prompts = [], [], []
        return found


def serve(with_model: bool, length: int, threads: int, port: Any) -> None:
    """Serve until the process or thread ends; the port is put into a queue."""
    torch.set_num_threads(threads)
    answerer = Answerer(with_model, length)
    answerer.warm_up()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # Otherwise, the headers wait for the client's acknowledgement.
        wbufsize = -1

        def do_GET(self) -> None:
            models = {"data": [{"id": NAME, "max_model_len": length + 1}]}
            self._send(answerer.served() if self.path == "/served" else models)

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt, most = asked["prompt"], asked["max_tokens"]
            prompts = [prompt] if isinstance(prompt[0], int) else prompt
            texts = [answerer.answer(ids, most) for ids in prompts]
            choices = [{"index": n, "text": text, "finish_reason": "stop"} for n, text in enumerate(texts)]
            usage = {"prompt_tokens": sum(map(len, prompts)), "completion_tokens": 1}
            self._send({"object": "text_completion", "choices": choices, "usage": usage})

        def _send(self, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    port.put(server.server_port)
    server.serve_forever()


@contextmanager
def running(with_model: bool, options: Any) -> Iterator[str]:
    """The address of a server, in a process of its own; in a thread if the run is small."""
    given = (with_model, options.length, options.server_threads)
    if options.small:
        port: Any = Queue()
        threading.Thread(target=serve, args=(*given, port), daemon=True).start()
        yield f"http://127.0.0.1:{port.get()}"
        return
    spawn = multiprocessing.get_context("spawn")
    port = spawn.Queue()
    process = spawn.Process(target=serve, args=(*given, port), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{port.get(timeout=300)}"
    finally:
        process.terminate()
        process.join()


def by_ropewalk(url: str, folder: Path, options: Any) -> int:
    """Right answers of ``ropewalk eval``."""
    given: list[object] = [
        "eval",
        resolve_model(MODEL),
        "--server",
        f"{url}/v1",
        "--suite",
        "passkey",
        "--json",
    ]
    given += ["--lengths", options.length, "--samples", options.prompts, "--concurrency", options.concurrency]
    given += ["--seed", options.seed, "--beyond-config", "--out", folder / "ropewalk"]
    given += ["--samples-dir", folder / "samples"]
    (found,) = json.loads(program_says(ROPEWALK, given, options.small))["results"]
    right: int = round(found["score"] * found["n"] / 100)
    return right


def by_lm_eval(url: str, folder: Path, options: Any) -> int:
    """Right answers of lm_eval to the prompts in the folder."""
    model = {
        "model": NAME,
        "base_url": f"{url}/v1/completions",
        "tokenizer": resolve_model(MODEL),
        "tokenizer_backend": "huggingface",
        "num_concurrent": options.concurrency,
        "max_length": options.length + 1,
    }
    arguments = ",".join(f"{name}={value}" for name, value in model.items())
    given: list[object] = [
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--tasks",
        "passkey_prompts",
    ]
    given += ["--include_path", folder, "--output_path", folder / "lm_eval", "--seed", options.seed]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "datasets")}
    program_says(LM_EVAL, given, options.small, **offline)
    (path,) = (folder / "lm_eval").rglob("results_*.json")
    score = json.loads(path.read_text())["results"]["passkey_prompts"]["exact_match,first_integer"]
    right: int = round(score * options.prompts)
    return right


def measured(client: Any, url: str, options: Any, samples: Sequence[Sample]) -> dict[str, Any]:
    """One run of a client: the server's view, and the seconds of the whole command."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # lm_eval's client adds no BOS.
        bos = load_tokenizer(resolve_model(MODEL)).bos_token
        lines = [{"prompt": f"{bos}{s.text}{s.answer_prefix}", "key": s.references[0]} for s in samples]
        (folder / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        task = TASK.format(data=folder / "prompts.jsonl", most=samples[0].max_new_tokens)
        (folder / "passkey_prompts.yaml").write_text(task)
        began = time.perf_counter()
        right = client(url, folder, options)
        command = time.perf_counter() - began
    with urllib.request.urlopen(f"{url}/served") as said:
        served = json.load(said)
    return {**served, "per_second": served["prompts"] / served["seconds"], "command": command, "right": right}


def bound(samples: Sequence[Sample], encoder: PromptEncoder, options: Any) -> float:
    """Answers a second of the model, one prompt after the other, without a server."""
    before = torch.get_num_threads()
    torch.set_num_threads(options.server_threads)
    answerer = Answerer(True, options.length)
    asked = [
        (encoder.encode(each.text, each.answer_prefix).input_ids, each.max_new_tokens) for each in samples
    ]
    answerer.warm_up()
    for each in asked:
        answerer.answer(*each)
    torch.set_num_threads(before)
    return len(asked) / float(answerer.served()["seconds"])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--server-threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each client, in turn")
    parser.add_argument("--seed", type=int, default=0)
    options = parsed(parser, {"prompts": 3, "rounds": 1, "concurrency": 2}, arguments)
    encoder = PromptEncoder(load_tokenizer(resolve_model(MODEL)))
    samples = list(PasskeyTask().samples(encoder, options.length, options.prompts, options.seed))
    missing = [name for name in NEEDED if find_spec(name) is None]
    clients = {"ropewalk": by_ropewalk} | ({} if missing else {"lm_eval": by_lm_eval})
    servers: dict[str, Any] = {}
    for kind in ("model", "instant"):
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in clients}
        with running(kind == "model", options) as url:
            for _ in range(options.rounds):
                for name, client in clients.items():
                    runs[name].append(measured(client, url, options, samples))
                    print(kind, name, runs[name][-1], flush=True)
        found = {name: median(run["per_second"] for run in own) for name, own in runs.items()}
        servers[kind] = {"per_second": found, "runs": runs}
        if not missing:
            ratios = [
                a["per_second"] / b["per_second"]
                for a, b in zip(runs["ropewalk"], runs["lm_eval"], strict=True)
            ]
            servers[kind]["ropewalk_by_lm_eval"] = {"median": median(ratios), "each": ratios}
            for key in ("digest", "right", "prompts"):
                if len({run[key] for own in runs.values() for run in own}) > 1:
                    raise SystemExit(f"the clients differ in {key}: {runs}")
    result = {
        **settings_of(options),
        "model": MODEL,
        "lm_eval": None if missing else version("lm_eval"),
        "missing": missing,
        "bound_per_second": bound(samples, encoder, options),
        "servers": servers,
    }
    write("served_prompts", result, options)


if __name__ == "__main__":
    main()
