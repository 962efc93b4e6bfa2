"""Let a ropewalk evaluate a server that gives one answer to everything: python scripts/evaluate_fake_server.py PROGRAM.

Needs nothing but Python, so that the environment of the program may hold ropewalk-core and nothing else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Lists one model, and answers each prompt with "none"."""

    def do_GET(self) -> None:
        self._send({"data": [{"id": "fake"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._send({"choices": [{"text": "none", "finish_reason": "stop"}]})

    def _send(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


def evaluate(program: str) -> list[str]:
    """Evaluate the server with a program, and return the tasks that it ran."""
    what = ["--suite", "passkey", "--lengths", "256", "--samples", "2"]
    with TemporaryDirectory() as folder, HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        out = Path(folder) / "out"
        given = [
            "eval",
            "embedded",
            "--server",
            f"http://127.0.0.1:{server.server_port}/v1",
            *what,
            "--out",
            out,
        ]
        subprocess.run([program, *map(str, given)], check=True, stdout=subprocess.DEVNULL)
        found = json.loads((out / "results.json").read_text())["results"]
        assert (out / "report.html").stat().st_size
        server.shutdown()
    return [each["task"] for each in found if each["status"] == "ok"]


if __name__ == "__main__":
    print(f"{sys.argv[1]} evaluated a server: {', '.join(evaluate(sys.argv[1]))}")
