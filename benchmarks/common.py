"""What every benchmark needs: its options, the machine's description and a result file."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import ropewalk

RESULTS = Path(__file__).parent / "results"


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's own description."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def parsed(
    parser: argparse.ArgumentParser, small: Mapping[str, Any], arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """The options of a benchmark, with the two that all have: ``--out`` and ``--small``.

    Args:
        parser: with the options of this benchmark.
        small: the defaults that ``--small`` puts in place of the usual ones. A small run takes seconds and shows that
            the benchmark runs; its figures mean nothing, and go to a temporary folder.
        arguments: of the command line; None for this process's own.
    """
    parser.add_argument("--out", help="result file; default: one in benchmarks/results")
    parser.add_argument(
        "--small", action="store_true", help="sizes that take seconds: only shows that it runs"
    )
    if parser.parse_known_args(arguments)[0].small:
        parser.set_defaults(**small)
    options = parser.parse_args(arguments)
    if options.small and options.out is None:
        options.out = str(Path(tempfile.mkdtemp(prefix="ropewalk-benchmark-")) / "result.json")
    return options


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options that a result depends on."""
    return {name: value for name, value in vars(options).items() if name not in ("out", "small")}


def in_own_process(module: str, arguments: Sequence[str], small: bool = False) -> Any:
    """The JSON that ``python -m module`` prints last, from a process of its own: its peak memory is that of one job.

    A small run calls the module's ``main`` in this process, because an interpreter takes longer to start than the job.
    """
    if small:
        with redirect_stdout(io.StringIO()) as said:
            importlib.import_module(module).main(arguments)
        return json.loads(said.getvalue().splitlines()[-1])
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def program_says(code: str, arguments: Sequence[object], small: bool = False, **environment: str) -> str:
    """What Python code prints in a process of its own.

    That of a small run is a fork of a server that has imported the libraries, which takes an interpreter most of its
    time.
    """
    given = [str(each) for each in arguments]
    if small:
        from tests.programs import run_program

        done = run_program(code, *given, environment=environment)
    else:
        whole = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
        command = [sys.executable, "-c", code, *given]
        done = subprocess.run(command, capture_output=True, text=True, env=whole)
    if done.returncode:
        raise SystemExit(done.stderr)
    return str(done.stdout)


def machine() -> dict[str, Any]:
    """The machine and versions that a figure belongs to."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name() if cuda else _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ropewalk": ropewalk.__version__,
    }


def write(name: str, result: Mapping[str, Any], options: argparse.Namespace, told: bool = True) -> Path:
    """Write one result file and, if ``told``, say where."""
    path = Path(options.out) if options.out else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"benchmark": name, "machine": machine()} | ({"small": True} if options.small else {})
    path.write_text(json.dumps({**head, **result}, indent=2) + "\n")
    if told:
        print(f"written {path}")
    return path


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
