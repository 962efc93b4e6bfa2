"""Render chat templates. A template is a program of whoever published the model, so it runs in a process with limits.

The limits grow with the conversation: a template of a published model takes milliseconds and writes each message about
once. That process ends with this one, or with the first template that exceeds a limit.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError

SECONDS = 10
"""Processor time that one rendering may take, and as much again for each 10 MB of the conversation."""

CHARACTERS = 1 << 24
"""Characters that the renderings of a conversation may have, and 64 for each of its bytes."""

MEMORY = 1 << 30
"""Bytes of memory that a rendering may take (on Linux), and 64 for each byte of the conversation."""


def render(
    template: str,
    variables: Mapping[str, Any],
    messages: Sequence[Any],
    stops: Sequence[tuple[int, bool]],
    tools: Sequence[Any] | None = None,
) -> list[str]:
    """Render the beginnings of a conversation with a chat template, as transformers does.

    Args:
        template: the Jinja template.
        variables: further variables of the template, as JSON values.
        messages: the conversation, as JSON values.
        stops: for each rendering, the number of messages, and whether a generation prompt follows them.
        tools: JSON schemas of tools; None for none.

    Returns:
        One text for each of ``stops``.

    Raises:
        RopewalkError: if the template fails or exceeds a limit, as "line 3: division by zero".
    """
    request = json.dumps(
        [template, dict(variables), list(messages), list(stops), tools, SECONDS, CHARACTERS, MEMORY]
    ).encode()
    with _lock:
        answer = _process().ask(request)
    if "fault" in answer:
        raise RopewalkError(answer["fault"])
    texts: list[str] = answer["texts"]
    return texts


class _Process:
    """The process that renders, as the parent sees it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            # Without the working directory among the places of modules.
            [sys.executable, "-P", str(Path(__file__).with_name("render_process.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Advice of transformers on missing libraries, and tracebacks of what is reported as one sentence.
            stderr=subprocess.DEVNULL,
        )

    def ask(self, request: bytes) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        line = b""
        try:
            process.stdin.write(request + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            # It ended before it had read everything.
            pass
        finally:
            if not line:
                # Also after Ctrl-C, so that a late answer is never taken for that of the next request.
                process.kill()
                self.close()
                _started.cache_clear()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if process.returncode == -signal.SIGPROF:
            return {"fault": f"it does not end within {SECONDS} seconds of processor time"}
        return {"fault": f"it ends the process that renders it (exit status {process.returncode})"}

    def close(self) -> None:
        """End the process, which ends by itself when nothing more can arrive."""
        atexit.unregister(self.close)
        # After a fork, the child holds copies of the pipes, but the process is not its own.
        if self.owner != os.getpid():
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


_lock = threading.Lock()


def _process() -> _Process:
    """The process that renders for this one; a forked child needs another, because two cannot share its pipes."""
    found = _started()
    if found.owner != os.getpid():
        _started.cache_clear()
        found = _started()
    return found


@cache
def _started() -> _Process:
    found = _Process()
    atexit.register(found.close)
    return found
