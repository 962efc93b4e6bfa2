"""Where people run it: the image, the lock file, the conda recipe, and the job files of examples/.

Their ropewalk commands are read by the program's own parser. Nothing here starts Docker, Slurm, Ray, a
cloud or conda.
"""

import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from torch.distributed.run import get_args_parser

from ropewalk.cli.app import program
from ropewalk.training.recipe.file import parse_recipe
from tests.packages import ADDED, CORE, DEPENDENCIES, FULL
from tests.places import ROOT

EXAMPLES = ROOT / "examples"
RECIPE = "model: m\noutput: o\ndata: {sources: [d]}\nstages: [{context: 64k, steps: 9}]\n"
PINNED = {
    canonicalize_name(name): pin
    for name, _, pin in (line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    if pin
}


def reads(arguments: list[str]) -> None:
    """Fail unless the program has such a command with such options, and recipes have the keys that are set."""
    program().parse_args(arguments, print_error=False, exit_on_error=False)
    overrides = [value for name, value in pairwise(arguments) if name == "--set"]
    parse_recipe(RECIPE, "test", overrides)


def test_a_wrong_option_or_key_is_seen():
    for wrong in (["--resumed"], ["--set", "outputs=x"]):
        with pytest.raises(Exception, match=r"resumed|outputs"):
            reads(["extend", "recipe.yaml", *wrong])


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """A folder of programs that stand for others, which come first in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def add(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)

    return add


def bash(script: str | Path, folder: Path, *arguments: str, **environment: str) -> int:
    command = ["bash", str(script), *arguments] if isinstance(script, Path) else ["bash", "-c", script]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}).returncode


class TestSlurm:
    @pytest.fixture
    def submit(self, stubs, tmp_path):
        """The job on two nodes of two tasks, each of which writes down what it was started with."""
        log = tmp_path / "log"
        stubs(
            "scontrol",
            f'[ "$1" = show ] && printf "node1\\nnode2\\n" || echo "scontrol $*" >> {log}',
        )
        stubs(
            "srun",
            "export SLURM_NTASKS=4 SLURM_NTASKS_PER_NODE=2; worst=0; for task in 0 1 2 3; do\n"
            'SLURM_PROCID=$task SLURM_LOCALID=$((task % 2)) "$@" || worst=$?; done; exit $worst',
        )
        where = "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $MASTER_ADDR:$MASTER_PORT"
        stubs("ropewalk", f'echo "{where} ropewalk $*" >> {log}; exit $STATUS')

        def submitted(status: int) -> list[str]:
            log.unlink(missing_ok=True)
            slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "7", "STATUS": str(status)}
            assert bash(EXAMPLES / "slurm.sh", tmp_path, "recipe.yaml", "out put", **slurm) == status
            return log.read_text().splitlines()

        return submitted

    def test_each_task_is_a_rank_of_one_run(self, submit):
        lines = submit(0)
        assert [line.split(" ropewalk ")[0] for line in lines] == [
            f"{rank}/4 {rank % 2}/2 node1:29500" for rank in range(4)
        ]
        (command,) = {line.split(" ropewalk ")[1] for line in lines}
        assert command == "extend recipe.yaml --set output=out put"
        reads(["extend", "recipe.yaml", "--set", "output=out put"])

    def test_a_stopped_run_is_queued_again_and_resumes(self, submit, tmp_path):
        assert submit(75)[-1] == "scontrol requeue 7"
        (tmp_path / "out put").mkdir()
        (tmp_path / "out put" / "recipe.yaml").touch()
        assert submit(75)[0].endswith(" --resume")
        reads(["extend", "recipe.yaml", "--resume"])

    @pytest.mark.parametrize("status", [1, 2])
    def test_a_failed_run_is_not_queued_again(self, submit, status):
        assert not any("requeue" in line for line in submit(status))

    def test_options_are_slurms_and_the_recipe_is_asked_for(self, tmp_path):
        options = re.findall(r"^#SBATCH --([a-z-]+)", (EXAMPLES / "slurm.sh").read_text(), re.MULTILINE)
        # sbatch of Slurm 23.11.
        assert {*options} <= {
            *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal"),
            *("requeue", "output"),
        }
        assert bash(EXAMPLES / "slurm.sh", tmp_path) == 1
        # What is said to change for one machine is what the script sets.
        page = (ROOT / "docs" / "how-to" / "containers-and-clusters.md").read_text()
        assert "sbatch --nodes=1 slurm.sh recipe.yaml" in page
        assert {*re.findall(r"`--([a-z-]+-per-node)`", page), "nodes"} <= {*options}


class TestSkyPilot:
    task: ClassVar[Any] = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())

    def test_keys_are_those_of_a_task(self):
        # SkyPilot 0.14.1 reads the file (sky.Task.from_yaml); these are the keys that it knows of those used.
        assert set(self.task) == {"name", "resources", "workdir", "file_mounts", "setup", "run"}
        assert set(self.task["resources"]) == {"accelerators", "use_spot", "disk_size"}
        assert bash(f"pip() {{ [ \"$*\" = 'install ropewalk' ]; }}; {self.task['setup']}", ROOT) == 0

    def test_the_machine_after_a_preemption_resumes_from_the_copy(self, stubs, tmp_path):
        (mount,) = self.task["file_mounts"]
        stubs("torchrun", f'printf "%s\\n" "$@" > {tmp_path}/log')
        for there in (False, True):
            if there:
                (tmp_path / "copies" / "run").mkdir(parents=True)
                (tmp_path / "copies" / "run" / "recipe.yaml").touch()
            here = self.task["run"].replace(f"[ -e {mount}", f"[ -e {tmp_path}/copies")
            assert bash(here, tmp_path, SKYPILOT_NUM_GPUS_PER_NODE="8") == 0
            launcher, command = (tmp_path / "log").read_text().split("-m\nropewalk\n")
            assert launcher.split() == ["--standalone", "--nproc-per-node", "8"]
            reads(command.splitlines())
            assert ("--resume" in command, f"file://{mount}/run" in command) == (there, True)


class TestImage:
    """The Dockerfile, but for its base image and Debian's packages."""

    def of(self, word: str) -> list[str]:
        return [rest for name, rest in self.steps() if name == word]

    def steps(self) -> list[tuple[str, str]]:
        text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
        lines = re.sub(r"\\\n", "", text).split("\n")
        return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines) if word]

    def test_python_is_one_that_the_package_supports_and_ci_tests(self):
        (base,) = self.of("FROM")
        python = re.fullmatch(r"python:(3\.\d+)-slim-[a-z]+", base)[1]
        assert python in SpecifierSet(CORE["requires-python"])
        assert f"Programming Language :: Python :: {python}" in CORE["classifiers"]

    def test_what_it_copies_is_there_and_in_the_context(self):
        sources = [source for rest in self.of("COPY") for source in rest.split()[:-1]]
        assert [source for source in sources if not (ROOT / source).exists()] == []
        rules = [
            line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"
        ]
        # Everything is left out but what a rule brings back.
        assert rules[0] == "*"
        back = {line[1:] for line in rules if line.startswith("!")}
        assert {source.removeprefix("./") for source in sources} == back
        assert not any(fnmatch(each, line) for each in ("src", "full") for line in rules[1:])

    def test_it_has_what_building_the_package_reads(self):
        copied = " ".join(self.of("COPY")).split()
        assert {"pyproject.toml", "./src", "./full", CORE["readme"], *CORE["license-files"]} <= {*copied}

    def test_it_runs_the_program_as_a_user_without_rights(self):
        words = [word for word, _ in self.steps()]
        assert (self.of("USER"), self.of("ENTRYPOINT")) == (["ropewalk"], ['["ropewalk"]'])
        assert max(n for n, word in enumerate(words) if word == "RUN") < words.index("USER")
        assert "ropewalk" in CORE["scripts"]

    @pytest.mark.parametrize("number", range(3))
    def test_bash_reads_each_command(self, number):
        assert subprocess.run(["bash", "-n"], input=self.of("RUN")[number], text=True, check=True).args

    @pytest.mark.slow  # pip asks every installed package what it needs
    def test_pip_has_nothing_to_add_to_an_environment_with_these_versions(self):
        """Its command for what the package needs, without an index: what is installed agrees with every pin."""
        if version("torch").partition("+")[0] != PINNED["torch"]:
            pytest.skip("this environment has other versions than those of constraints.txt")
        (line,) = [rest for rest in self.of("RUN") if rest.startswith("pip install")]
        *options, core, target = shlex.split(line)[2:]
        assert core == "."
        extras = Requirement(f"ropewalk{target.removeprefix('./full')}").extras
        assert (options, extras) == (
            ["--no-cache-dir", "--constraint", "constraints.txt"],
            {"ray", "lm-eval", "tensorboard"},
        )
        wanted = [*DEPENDENCIES, *(each for name in extras for each in extra(name))]
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-index", *options, *wanted]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, "Would install" in done.stdout) == (0, False), done.stdout + done.stderr


def extra(name: str) -> list[str]:
    """What an extra brings, which may name another of the package's own."""
    found = []
    for line in FULL["optional-dependencies"][name]:
        wanted = Requirement(line)
        if wanted.name == FULL["name"]:
            found += [each for other in wanted.extras for each in extra(other)]
        else:
            found.append(line)
    return found


class TestLock:
    lock: ClassVar[Any] = tomllib.loads((ROOT / "uv.lock").read_text())
    UNLIKE: ClassVar = {
        "fsspec": "inspect_ai needs 2026.6.0 or earlier",
        "pillow": "trackio has no version for pillow 13",
        "pymdown-extensions": "13 needs Python 3.11.5",
    }
    """Packages of other versions than in constraints.txt, with the reason."""

    def test_it_locks_what_the_package_and_its_extras_ask_for(self):
        core, own = (
            {each["name"]: each for each in self.lock["package"]}[each["name"]] for each in (CORE, FULL)
        )
        assert (core["version"], core["source"]) == (CORE["version"], {"editable": "."})
        assert (own["version"], own["source"]) == (FULL["version"], {"editable": "full"})
        assert self.lock["requires-python"] == CORE["requires-python"] == FULL["requires-python"]
        locked: dict[str, set[str]] = {}
        for each in self.lock["package"]:
            locked.setdefault(each["name"], set()).add(each.get("version", ""))
        extras = FULL["optional-dependencies"]
        assert set(own["optional-dependencies"]) == set(extras)
        for line in [*DEPENDENCIES, *(each for name in extras for each in extra(name))]:
            wanted = Requirement(line)
            found = locked[canonicalize_name(wanted.name)]
            assert all(wanted.specifier.contains(each, prereleases=True) for each in found), line
        asked = {
            canonicalize_name(each["name"]): each.get("specifier")
            for each in [*core["metadata"]["requires-dist"], *own["metadata"]["requires-dist"]]
        }
        for line in [*CORE["dependencies"], *ADDED]:
            assert asked[canonicalize_name(Requirement(line).name)] == str(Requirement(line).specifier)

    def test_versions_are_those_that_ci_tests(self):
        found = {
            each["name"]: each["version"]
            for each in self.lock["package"]
            if each["name"] in PINNED and each["version"] != PINNED[each["name"]]
        }
        assert set(found) == set(self.UNLIKE)

    def test_packages_come_from_the_public_index_alone(self):
        def addresses(value: Any) -> Iterator[str]:
            if isinstance(value, dict | list):
                for each in value.values() if isinstance(value, dict) else value:
                    yield from addresses(each)
            elif isinstance(value, str) and "://" in value:
                yield value

        hosts = {address.split("/")[2] for address in addresses(self.lock)}
        assert hosts == {"pypi.org", "files.pythonhosted.org"}
        for each in self.lock["package"]:
            files = [*each.get("wheels", ()), *([each["sdist"]] if "sdist" in each else [])]
            assert all(file["hash"].startswith("sha256:") for file in files)
            assert bool(files) == (each["name"] not in (CORE["name"], FULL["name"]))

    def test_torch_brings_cuda_on_linux_and_scipy_is_for_development(self):
        packages = {each["name"]: each for each in self.lock["package"]}
        assert any(each["name"] == "nvidia-cudnn-cu13" for each in packages["torch"]["dependencies"])
        seen, waiting = set(), [FULL["name"]]
        while waiting:
            if (name := waiting.pop()) not in seen:
                seen.add(name)
                waiting += [each["name"] for each in packages[name].get("dependencies", ())]
        assert "torch" in seen
        assert "scipy" not in seen


CONDA = {"torch": "pytorch", "matplotlib": "matplotlib-base"}
"""Packages that conda-forge has under another name; matplotlib-base leaves out Qt."""


def test_the_conda_recipe_asks_for_what_the_package_asks_for():
    recipe = yaml.safe_load((ROOT / "conda/recipe.yaml").read_text())
    wanted = [Requirement(line) for line in DEPENDENCIES]
    expected = {f"{CONDA.get(each.name, each.name)} {each.specifier}" for each in wanted}
    run = recipe["requirements"]["run"]
    assert set(run) == expected | {f"python {CORE['requires-python']}"}
    assert len(set(run)) == len(run)
    assert recipe["context"]["version"] == CORE["version"]
    ((name, place),) = CORE["scripts"].items()
    assert recipe["build"]["python"]["entry_points"] == [f"{name} = {place}"]
    assert recipe["about"]["license"] == CORE["license"]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    assert {"hatchling >=1.25"} == {each.replace(">=", " >=") for each in build}
    assert {"pip", *(each.replace(">=", " >=") for each in build)} < {*recipe["requirements"]["host"]}


def test_classifiers_name_the_python_and_the_system_that_ci_runs():
    assert CORE["classifiers"] == FULL["classifiers"]
    said = [each for each in CORE["classifiers"] if re.search(r"Python :: 3\.|Operating System", each)]
    assert said == ["Programming Language :: Python :: 3.11", "Operating System :: POSIX :: Linux"]


@pytest.mark.slow  # three interpreters import torch
def test_accelerate_launch_starts_the_processes_of_a_run(tmp_path):
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    (tmp_path / "joins.py").write_text(
        "from ropewalk.parallel.world import joined\n"
        "with joined('cpu') as world:\n"
        "    print(f'rank {world.rank} of {world.size}, {world.local_rank} of {world.local_size}', flush=True)\n"
    )
    done = subprocess.run([*launcher, tmp_path / "joins.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Two processes may write onto one line.
    said = sorted(re.findall(r"rank \d of \d, \d of \d", done.stdout))
    assert said == ["rank 0 of 2, 0 of 2", "rank 1 of 2, 1 of 2"]


class Ray:
    """As much of Ray as the job uses; tasks run where they are asked for, one after the other."""

    def __init__(self, reserved: list[dict[str, int]]) -> None:
        self.placed: list[int] = []
        self.util = SimpleNamespace(get_node_ip_address=lambda: "10.0.0.1")
        self.reserved = reserved

    def init(self) -> None: ...

    def get(self, value: Any) -> Any:
        return value

    def group(self, bundles: list[dict[str, int]], strategy: str) -> Any:
        assert strategy == "STRICT_SPREAD"
        self.reserved += bundles
        return SimpleNamespace(ready=lambda: None)

    def remote(self, function: Callable[..., Any]) -> Any:
        def options(num_cpus: int, num_gpus: int, max_retries: int, scheduling_strategy: Any) -> Any:
            node = scheduling_strategy.placement_group_bundle_index
            # A task that asks for more than its bundle would wait for ever.
            assert {"CPU": num_cpus, "GPU": num_gpus} == {"GPU": 0, **self.reserved[node]}
            self.placed.append(node)
            return SimpleNamespace(remote=function)

        return SimpleNamespace(options=options)


@pytest.mark.parametrize(("gpus", "processes"), [(8, 8), (0, 2)])
def test_the_ray_job_starts_one_torchrun_on_each_node_for_one_run(gpus, processes, monkeypatch):
    job = runpy.run_path(str(EXAMPLES / "ray_job.py"))
    main, ray, started = job["main"], Ray([]), []

    def run(command: list[str]) -> SimpleNamespace:
        started.append(command)
        return SimpleNamespace(returncode=len(started) - 1)

    monkeypatch.setitem(main.__globals__, "ray", ray)
    monkeypatch.setitem(main.__globals__, "placement_group", ray.group)
    monkeypatch.setattr(subprocess, "run", run)
    options = ["--gpus", str(gpus), *(["--processes", "2"] if not gpus else [])]
    monkeypatch.setattr(
        sys, "argv", ["ray_job.py", "--nodes", "2", *options, "extend", "recipe.yaml", "--resume"]
    )
    # The worst status is the job's.
    assert main() == 1
    # The address is that of the first node.
    assert ray.placed == [0, 0, 1]
    launches = []
    for command in started:
        split = command.index("ropewalk")
        reads(command[split + 1 :])
        parsed = get_args_parser().parse_args([*command[3:split], "ropewalk"])
        launches.append(
            (parsed.node_rank, parsed.nnodes, parsed.nproc_per_node, parsed.master_addr, parsed.module)
        )
    assert launches == [(node, "2", str(processes), "10.0.0.1", True) for node in range(2)]
    assert len({part for command in started for part in command if "--master-port" in part}) == 1
