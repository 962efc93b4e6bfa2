"""Run every command with ``--json`` on fixed inputs and keep what it says; compare two such runs.

    python scripts/command_outputs.py run OUT [--tree CHECKOUT] [--only NAME ...] [--programs]
    python scripts/command_outputs.py compare A B
    python scripts/command_outputs.py keep OUT      (makes what the tests in tests/recorded compare with anew)

``run`` calls ``python -m ropewalk`` of any checkout, with the cases of ``tests/recorded/commands.yaml`` and
``refusals.yaml`` and the inputs beside them, without a network. OUT then holds ``commands.json``: of each step its exit
status, the JSON on stdout, and the files that the case names; and ``refusals.json``: of each bad input its exit status
and the last line on stderr. ``compare`` prints every difference with its command and its place in the JSON, refusals
apart, and ends with status 1 if there is any.

What two runs of the same code differ in is left out by :data:`EXCLUDED` and :func:`normalised`, and by nothing else:
floats are kept in full.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import math
import multiprocessing
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CASES = ROOT / "tests" / "recorded"
CONFIGS = ROOT / "tests" / "configs"

ARTIFACTS = CASES / "artifacts"

EXCLUDED = {
    "seconds": "wall time",
    "tokens_per_second": "wall time",
    "flops_per_second": "wall time",
    "checkpoint_wait": "wall time",
    "rows_wait": "wall time",
    "forward_backward": "wall time",
    "optimizer_update": "wall time",
    "peak_process_memory": "memory",
    "process_memory": "memory",
    "date": "wall time",
    "versions": "versions of software",
}
"""JSON keys whose value is replaced by ``<why>``, wherever they stand; that the key is there is still compared."""

LIBRARIES = (
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict_loader",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "datasets",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "pydantic.json_schema",
    "cma",
)
"""Imported once, before steps are forked: most need them, and they take longer than the step itself."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "COLUMNS": "100",
    "TZ": "UTC",
}
"""One thread, so that sums are taken in one order; no network; no bars."""

LEFT_OUT = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    "PYTHONDONTWRITEBYTECODE",
)
"""Variables that a step does not inherit: a launcher's, and what would compile each module for each step."""
PARTS = ("commands", "artifacts", "refusals")
"""Files of cases, and of what comes out: each is compared for itself."""

LONG = 8
"""A list of more numbers than this is condensed where outputs are kept."""

SECONDS = 280
"""That a step may take."""


@dataclass(frozen=True)
class Step:
    """One call of the program.

    Attributes:
        name: unique in its scenario.
        arguments: of ``ropewalk``.
        files: patterns below the scenario's folder; what they match is kept beside stdout.
    """

    name: str
    arguments: tuple[str, ...]
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scenario:
    """Steps that run one after the other in one folder, where later ones find what earlier ones wrote."""

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Difference:
    """Of two values at one place; :data:`ABSENT` stands for a value that one side does not have."""

    place: str
    first: Any
    second: Any

    def __str__(self) -> str:
        return f"{self.place}: {_short(self.first)} != {_short(self.second)}"


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


def scenarios(path: Path) -> list[Scenario]:
    """Read cases; a step with ``for`` stands for one step an item, which replaces ``{}`` in it."""
    found = []
    for name, given in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        steps = []
        for each in given["steps"]:
            files = tuple(each.get("files", ()))
            for item in map(str, each.get("for", [""])):
                line = each["run"].replace("{}", item)
                steps.append(Step(each["name"].replace("{}", item), tuple(shlex.split(line)), files))
        if len({step.name for step in steps}) != len(steps):
            raise ValueError(f"{path}: two steps of {name} have one name")
        found.append(Scenario(name, tuple(steps)))
    return found


OF_A_FACTOR_TABLE = {"factors", "rope"}
"""Keys below which ``sha256`` is the digest of a factor table's file, which holds the wall time of its search."""


def normalised(value: Any, folders: Mapping[str, str], key: str = "") -> Any:
    """A JSON value without what differs between two runs of the same code.

    Args:
        value: of JSON.
        folders: what stands for absolute paths, by path; the work folder and the checkout.
        key: that the value stands under.
    """
    if key in EXCLUDED:
        return f"<{EXCLUDED[key]}>"
    if isinstance(value, dict):
        if key in OF_A_FACTOR_TABLE and "sha256" in value:
            value = {**value, "sha256": "<digest of a file with a wall time>"}
        return {_text(k, folders): normalised(v, folders, k) for k, v in value.items()}
    if isinstance(value, list):
        return [normalised(each, folders) for each in value]
    return _text(value, folders) if isinstance(value, str) else value


def _text(text: str, folders: Mapping[str, str]) -> str:
    for path, name in folders.items():
        text = text.replace(path, name)
    return text


def differences(
    first: Any, second: Any, tolerance: float = 0.0, smallest: float = 0.0, place: str = "$"
) -> Iterator[Difference]:
    """Where two JSON values differ. Types, keys, lengths, strings and integers must be equal.

    Args:
        first, second: the values.
        tolerance: relative, of floats; 0 wants them equal to the last bit.
        smallest: floats that differ by no more than this are equal too.
        place: of the values, for the messages.
    """
    if isinstance(first, dict) and isinstance(second, dict):
        for key in [*first, *(key for key in second if key not in first)]:
            sides = first.get(key, ABSENT), second.get(key, ABSENT)
            yield from differences(*sides, tolerance, smallest, f"{place}.{key}")
    elif isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        for index, sides in enumerate(zip(first, second, strict=True)):
            yield from differences(*sides, tolerance, smallest, f"{place}[{index}]")
    elif not _equal(first, second, tolerance, smallest):
        yield Difference(place, first, second)


def _equal(first: Any, second: Any, tolerance: float, smallest: float) -> bool:
    if type(first) is not type(second):
        return False
    if isinstance(first, float) and not (math.isnan(first) and math.isnan(second)):
        return math.isclose(first, second, rel_tol=tolerance, abs_tol=smallest)
    return isinstance(first, float) or first == second


def condensed(value: Any) -> Any:
    """For the outputs that are kept with the tests: a long list of numbers becomes its length, ends and sums.

    A long list of objects with the same keys becomes a table of columns first. The sum and the sum by place
    catch a value that changed and two that changed places.
    """
    if isinstance(value, dict):
        return {key: condensed(each) for key, each in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > LONG and all(type(each) in (int, float) for each in value):
        by_place = math.fsum(place * each for place, each in enumerate(value, start=1))
        return {
            "numbers": len(value),
            "first": value[0],
            "last": value[-1],
            "sum": math.fsum(value),
            "sum by place": by_place,
        }
    if len(value) > LONG and all(isinstance(each, dict) and each.keys() == value[0].keys() for each in value):
        return {"rows": len(value), **{key: condensed([each[key] for each in value]) for key in value[0]}}
    return [condensed(each) for each in value]


def run_scenarios(
    chosen: Sequence[Scenario], tree: Path, programs: bool = False, refusals: bool = False
) -> dict[str, dict[str, Any]]:
    """Run cases on a checkout, in a temporary folder.

    Args:
        chosen: the cases.
        tree: checkout whose ``src/ropewalk`` is run.
        programs: start a fresh interpreter for each step instead of a fork that has imported what steps before needed.
        refusals: keep the last line on stderr instead of stdout and files.

    Returns:
        By scenario and step, what the step said.
    """
    tree = tree.resolve()
    if not (tree / "src" / "ropewalk" / "__main__.py").is_file():
        raise SystemExit(f"{tree} is no checkout of ropewalk")
    # Before the libraries are imported, which read some of it once: threads, and whether there is a network.
    os.environ.update(ENVIRONMENT)
    if not programs:
        sys.path.insert(0, str(tree / "src"))
        _import(LIBRARIES)
    said: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="command-outputs-") as temporary:
        work = Path(temporary).resolve()
        shutil.copytree(CASES / "inputs", work / "inputs")
        shutil.copytree(CONFIGS, work / "inputs" / "configs")
        folders = {str(work): "$WORK", str(tree): "$TREE"}
        for scenario in chosen:
            folder = work / scenario.name
            folder.mkdir()
            if scenario.name == ARTIFACTS.name:
                shutil.copytree(ARTIFACTS, folder / ARTIFACTS.name)
            said[scenario.name] = {}
            for step in scenario.steps:
                began = time.monotonic()
                status, stdout, stderr = _call(step.arguments, folder, tree, programs)
                print(f"{time.monotonic() - began:6.2f} s  {scenario.name}: {step.name}", file=sys.stderr)
                if refusals:
                    lines = [_text(line, folders) for line in stderr.splitlines()]
                    outcome = {"status": status, "stdout": stdout, "sentence": lines[-1] if lines else ""}
                else:
                    outcome = {"status": status, "json": normalised(_parsed(stdout, stderr), folders)}
                    if step.files:
                        outcome["files"] = normalised(_files(folder, step.files), folders)
                said[scenario.name][step.name] = {"run": shlex.join(step.arguments), **outcome}
    return said


def _import(names: Sequence[str]) -> None:
    """Import modules into this process, so that the steps after this one find them."""
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


def _call(arguments: Sequence[str], folder: Path, tree: Path, programs: bool) -> tuple[int, str, str]:
    environment = {key: value for key, value in os.environ.items() if key not in LEFT_OUT}
    environment |= ENVIRONMENT | {
        "PYTHONPATH": str(tree / "src"),
        "XDG_CACHE_HOME": str(folder.parent / "cache"),
        "TMPDIR": str(folder.parent),
    }
    if programs:
        done = subprocess.run(
            [sys.executable, "-m", "ropewalk", *arguments],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
        return done.returncode, done.stdout, done.stderr
    with tempfile.TemporaryDirectory() as printed:
        out, errors, modules = (Path(printed) / name for name in ("out", "errors", "modules"))
        given = (list(arguments), str(folder), environment, str(out), str(errors), str(modules))
        process = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=given)
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise SystemExit(f"ropewalk {shlex.join(arguments)} took more than {SECONDS} seconds")
        # Absent if the step was killed.
        if modules.exists() and (new := set(modules.read_text().split()) - sys.modules.keys()):
            _import(sorted(new))
        return process.exitcode, out.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8")


def _in_a_fork(
    arguments: list[str], folder: str, environment: dict[str, str], out: str, errors: str, modules: str
) -> None:
    """What ``python -m ropewalk`` does, in a process that has imported libraries and run nothing of ropewalk."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    for descriptor, path in ((1, out), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    os.chdir(folder)
    sys.argv = ["ropewalk", *arguments]
    sys.dont_write_bytecode = False
    # Files of a comparison need not outlive a power cut.
    os.fsync = lambda file: None  # type: ignore[assignment]
    try:
        runpy.run_module("ropewalk", run_name="__main__", alter_sys=True)
    finally:
        # For the steps that come after.
        Path(modules).write_text("\n".join(name for name in sys.modules if name.startswith("ropewalk.")))


def _parsed(stdout: str, stderr: str) -> Any:
    try:
        return json.loads(stdout)
    except ValueError:
        return {"stdout": stdout, "last line on stderr": (stderr.splitlines() or [""])[-1]}


def _files(folder: Path, patterns: Sequence[str]) -> dict[str, Any]:
    """What files hold: JSON, lines of JSON and YAML parsed, text as lines, of any other the SHA-256."""
    found: dict[str, Any] = {}
    for pattern in patterns:
        paths = sorted(path for path in folder.glob(pattern) if path.is_file())
        if not paths:
            found[pattern] = "no such file"
        for path in paths:
            found[path.relative_to(folder).as_posix()] = _contents(path)
    return found


def _contents(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if path.suffix == ".yaml":
        # The order of keys means nothing.
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.suffix in (".md", ".txt"):
        return path.read_text(encoding="utf-8").splitlines()
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _run(options: argparse.Namespace) -> int:
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in PARTS if options.part is None else [options.part]:
        cases = scenarios(CASES / f"{name}.yaml")
        if options.only:
            cases = [case for case in cases if case.name in options.only]
        said = run_scenarios(cases, Path(options.tree), options.programs, name == "refusals")
        write(out / f"{name}.json", said)
        print(f"{sum(map(len, said.values()))} {name} in {out / f'{name}.json'}")
    return 0


def write(path: Path, said: Mapping[str, Mapping[str, Any]]) -> None:
    """Write outcomes, one line a step, so that versions of the file can be compared by eye."""
    parts = []
    for scenario, steps in said.items():
        lines = ",\n".join(
            f"{json.dumps(k)}: {json.dumps(v, separators=(',', ':'))}" for k, v in steps.items()
        )
        parts.append(f"{json.dumps(scenario)}: {{\n{lines}\n}}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _compare(options: argparse.Namespace) -> int:
    total = 0
    for name in PARTS:
        first, second = (
            json.loads((Path(folder) / f"{name}.json").read_text(encoding="utf-8"))
            for folder in (options.first, options.second)
        )
        found = list(differences(first, second, options.tolerance))
        total += len(found)
        print(f"{name}: {sum(map(len, first.values()))} steps, {len(found)} differences")
        for difference in found:
            print(f"  {difference}")
    return 1 if total else 0


def _keep(options: argparse.Namespace) -> int:
    for name in PARTS:
        said = json.loads((Path(options.out) / f"{name}.json").read_text(encoding="utf-8"))
        write(kept(name), condensed(said))
        print(kept(name))
    return 0


def read_kept(part: str) -> dict[str, dict[str, Any]]:
    """What a part is to say, condensed."""
    said: dict[str, dict[str, Any]] = json.loads(kept(part).read_text(encoding="utf-8"))
    return said


def kept(part: str) -> Path:
    """Where the tests find what a part is to say."""
    return CASES / "outputs" / f"{part}.json"


def main() -> int:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(required=True)
    run = commands.add_parser("run", help="run all cases and write what they say into a folder")
    run.add_argument("out", help="folder for commands.json and refusals.json")
    run.add_argument("--tree", default=str(ROOT), help="checkout to run; this one if not given")
    run.add_argument("--part", choices=PARTS, help="one file of cases; all if not given")
    run.add_argument("--only", nargs="+", default=[], help="names of scenarios")
    run.add_argument("--programs", action="store_true", help="a fresh interpreter for each step: slow")
    run.set_defaults(function=_run)
    compare = commands.add_parser("compare", help="print where two runs differ")
    compare.add_argument("first")
    compare.add_argument("second")
    compare.add_argument(
        "--tolerance", type=float, default=0.0, help="relative, of floats; none if not given"
    )
    compare.set_defaults(function=_compare)
    keep = commands.add_parser("keep", help="keep a run's outputs as what the tests compare with")
    keep.add_argument("out", help="folder of a run of all cases")
    keep.set_defaults(function=_keep)
    options = parser.parse_args()
    return int(options.function(options))


if __name__ == "__main__":
    sys.exit(main())
