"""The documentation says what is: its code runs, its recipes parse, its tables are up to date."""

import ast
import json
import os
import pkgutil
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import ropewalk
from ropewalk.training.recipe.file import load_recipe, parse_recipe
from tests.completion_server import free_port
from tests.places import ROOT
from tests.programs import IN_A_FOLDER, run_program
from tests.smollm2_packages import write_packages

PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

SLOW = ("audit-a-checkpoint.md", "extending.md", "python.md", "train-with-transformers.md")


def blocks(language: str) -> list:
    fence = re.compile(rf"^```{language}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    found = [
        (page.name, number, text)
        for page in PAGES
        for number, text in enumerate(fence.findall(page.read_text()))
    ]
    return [
        pytest.param(text, id=f"{name}-{number}", marks=[pytest.mark.slow] * (name in SLOW))
        for name, number, text in found
    ]


# TRL 1.16 sets the older name of an option that transformers 5.23 renamed.
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "@register" in code:
        # The table of RoPE methods would keep the example's for all tests that follow in this process.
        done = run_program(f"import os, sys\nos.chdir(sys.argv[1])\n{code}", tmp_path)
        assert done.returncode == 0, done.stderr
    else:
        exec(compile(code, "documentation", "exec"), {"__name__": "__main__"})


CHECKERS = {
    # What libraries hand on without saying so is theirs: trl's own examples import it.
    "pyright": (
        "pyrightconfig.json",
        '{"typeCheckingMode": "standard", "reportPrivateImportUsage": false}',
        ["--pythonpath", sys.executable],
    ),
    # Without pydantic's plugin, as users run it.
    "mypy": (
        "mypy.ini",
        "[mypy]\nignore_missing_imports = True\n"
        "[mypy-torch.*,transformers.*,datasets.*,accelerate.*,trl.*,numpy.*]\nfollow_imports = skip\n",
        ["."],
    ),
}
"""Type checkers with the name and the text of their settings, and their arguments."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CHECKERS)
def test_type_checkers_accept_the_python_blocks(name, tmp_path):
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    checker = shutil.which(name, path=path)
    if checker is None:
        pytest.skip(f"{name} is not installed; it is in the extra dev")
    for block in blocks("python"):
        (tmp_path / f"{block.id.replace('-', '_').replace('.', '_')}.py").write_text(block.values[0])
    file, settings, arguments = CHECKERS[name]
    (tmp_path / file).write_text(settings)
    done = subprocess.run([checker, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_recipes(text):
    assert parse_recipe(text, "documentation").stages


@pytest.mark.parametrize("text", blocks("yml"))
def test_sweeps_start_ropewalk_with_keys_of_a_recipe(text, tmp_path):
    sweep = yaml.safe_load(text)
    # The agent of W&B writes each parameter as name=value.
    first = {name: each.get("values", [each.get("min")])[0] for name, each in sweep["parameters"].items()}
    values = [f"{name}={value}" for name, value in first.items()]
    words = [
        word for each in sweep["command"] for word in (values if each == "${args_no_hyphens}" else [each])
    ]
    (tmp_path / "ropewalk").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ropewalk").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "WANDB_RUN_ID": "abc"}
    done = subprocess.run(words, env=path, capture_output=True, text=True, check=True)
    command, recipe, *options = done.stdout.splitlines()
    assert (command, recipe, options[:2]) == ("extend", "recipe.yaml", ["--set", "output=sweep/abc"])
    assert options[2:] == [f"--set={each}" for each in values]
    settings = [options[1], *(each.removeprefix("--set=") for each in options[2:])]
    parsed = load_recipe("llama-64k", settings)
    assert parsed.output == "sweep/abc"
    assert parsed.stages[0].learning_rate == first["stages.0.learning_rate"]


def session(page: Path) -> list[tuple[str, list[str]]]:
    """The commands of a page's console blocks, each with its output."""
    commands: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            if line.startswith("$ "):
                commands.append((line[2:], []))
            else:
                commands[-1][1].append(line)
    return commands


def shape(line: str) -> str:
    """A line of output without its numbers, which depend on the machine and on Python's own documents."""
    # Which scores the conclusion names, and in which order, depends on the numbers.
    line = re.sub(r"^(After the context was extended [^,]*,[^,]*tokens,).*", r"\1", line)
    line = re.sub(r"(\d) [MG]B\b", r"\1 GB", line)
    return " ".join(re.sub(r"[<+-]?\d[\d.,]*[kM]?", "0", line).replace(" yes", " no").split())


FEWER = {
    "[embedded] ": "[{path: embedded, max_documents: 100}] ",
    "steps: 20": "steps: 4",
    "stages.0.steps=40": "stages.0.steps=6",
    "rows_per_step: 8": "rows_per_step: 2",
    "rows: 8, samples: 10": "rows: 2, samples: 2",
    "--suite perplexity,passkey": "--suite perplexity,passkey --rows 2 --samples 2",
    "--budget 60": "--budget 20",
    "--samples 5": "--samples 2",
}
"""What takes the time of a page's session; its lines have the same form with less."""


def with_fewer(text: str) -> str:
    for much, little in FEWER.items():
        text = text.replace(much, little)
    return text


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("page", [page for page in PAGES if session(page)], ids=lambda page: page.name)
def test_console_blocks_run_in_one_folder_and_print_lines_of_the_same_form(page, tmp_path):
    recipes = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for recipe in recipes[:1]:
        (tmp_path / "recipe.yaml").write_text(with_fewer(recipe))
    if page.name == "extend-a-real-model.md":
        pytest.importorskip("gguf", reason="needs the gguf package")
        shutil.copy(ROOT / "examples" / "smollm2.py", tmp_path)
        write_packages(tmp_path, times=1100)
    for name, text in re.findall(
        r'^```\w+ title="(.*?)"\n(.*?)^```', page.read_text(), re.DOTALL | re.MULTILINE
    ):
        (tmp_path / name).write_text(text)
    environment = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "110",
        "HF_HUB_OFFLINE": "1",
    }
    port = str(free_port())
    with shell(tmp_path, environment) as entered:
        for command, shown in session(page):
            here = command.replace("8765", port)
            if not command.startswith("ropewalk "):
                entered(here)
                continue
            # In a process that need not import the libraries, which takes longer than most commands.
            arguments = shlex.split(with_fewer(here))[1:]
            done = run_program(IN_A_FOLDER, tmp_path, *arguments, environment=environment)
            output = done.stdout + done.stderr
            assert done.returncode == 0, f"{command}\n{output}"
            printed = {shape(line) for line in output.splitlines()}
            assert [line for line in shown if line != "..." and shape(line) not in printed] == [], (
                f"{command} prints other lines; copy them to {page.name}:\n{output}"
            )


@contextmanager
def shell(folder: Path, environment: Mapping[str, str]) -> Iterator[Callable[[str], None]]:
    """One bash for several commands, of which each must succeed; what still runs in its background ends with it."""
    # What it runs must not read what it reads, and may end without the end of a line.
    script = r"""
        exec 3<&0 < /dev/null
        while IFS= read -r command <&3; do eval "$command"; printf '\n@@@ %s\n' $?; done
        kill $(jobs -p) 2> /dev/null
    """
    with subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as bash:
        assert bash.stdin is not None
        assert bash.stdout is not None

        def entered(command: str) -> None:
            bash.stdin.write(f"{command}\n")
            bash.stdin.flush()
            lines = []
            for line in bash.stdout:
                if line.startswith("@@@"):
                    assert line.split()[1] == "0", f"{command}\n{''.join(lines)}"
                    return
                lines.append(line)
            raise AssertionError(f"{command} ended the shell")

        try:
            yield entered
        finally:
            bash.stdin.close()


REPOSITORY = re.compile(
    r"https://(?:github\.com/ropewalk/ropewalk/blob|raw\.githubusercontent\.com/ropewalk/ropewalk)/main/"
)
LINK = re.compile(r"\]\(([^)\s]+)\)|<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"")


def links(text: str) -> list[str]:
    return [markdown or html for markdown, html in LINK.findall(text)]


def local(page: Path, target: str) -> Path | None:
    """The file that a link names, in the checkout; None for another site's address or the page itself."""
    path, inside = REPOSITORY.subn("", target)
    if not inside and re.match(r"[a-z]+:|#", target):
        return None
    return (ROOT if inside else page.parent) / path.partition("#")[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page):
    files = [local(page, target) for target in links(page.read_text())]
    assert [file for file in files if file and not file.exists()] == []


def test_the_readme_has_whole_addresses_since_package_indexes_show_it_without_the_checkout():
    text = (ROOT / "README.md").read_text()
    assert [target for target in links(text) if not target.startswith("https://")] == []
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert pictures
    # The address of a file's page is no picture.
    assert [target for target in pictures if "/blob/" in target] == []


@pytest.mark.parametrize(
    ("target", "place"),
    [
        ("https://github.com/ropewalk/ropewalk/blob/main/docs/theory.md#rules", "docs/theory.md"),
        (
            "https://raw.githubusercontent.com/ropewalk/ropewalk/main/docs/images/demo.png",
            "docs/images/demo.png",
        ),
        ("theory.md", "docs/theory.md"),
        ("https://github.com/ropewalk/other/blob/main/x.md", None),
        ("#rules", None),
    ],
)
def test_an_address_in_the_repository_is_looked_for_in_the_checkout(target, place):
    assert local(ROOT / "docs" / "page.md", target) == (ROOT / place if place else None)


@pytest.mark.parametrize(
    "name",
    [
        "base_table.py",
        "cli_reference.py",
        "draw_pictures.py",
        "file_reference.py",
        "job_keywords.py",
        "published_bases.py",
        "readers_page.py",
        "recipe_reference.py",
        "shipped_recipes.py",
        "scaling_table.py",
        "supported_models.py",
    ],
)
def test_tables_are_up_to_date(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--check"])
    try:
        runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
    except SystemExit as ended:
        # It says what to run where a table is not as it should be.
        if ended.code:
            raise


def documented() -> list[str]:
    """Names that docs/api.md makes of docstrings."""
    return re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("name", documented())
def test_what_the_python_api_shows_can_be_imported_by_its_name(name):
    assert pkgutil.resolve_name(name).__doc__


def test_the_python_api_shows_every_public_name_of_the_package():
    jobs = {"audit": "ropewalk.jobs.audit", "search": "ropewalk.jobs.search"}
    public = {jobs.get(name, f"ropewalk.{name}") for name in ropewalk.__all__} - {"ropewalk.__version__"}
    assert public <= set(documented())


ARTIFACTS = ROOT / "tests" / "recorded" / "artifacts"


@pytest.mark.parametrize(
    ("heading", "written"),
    [
        ("### A line of metrics.jsonl", ARTIFACTS / "run" / "metrics.jsonl"),
        ("## Packed rows", ARTIFACTS / "rows" / "manifest.json"),
    ],
)
def test_keys_of_written_files_stand_in_the_page_of_files(heading, written):
    """Those tables that no class declares; scripts/file_reference.py makes the others."""
    section = (ROOT / "docs" / "files.md").read_text().split(f"\n{heading}\n")[1].split("\n##")[0]
    text = written.read_text()
    keys = json.loads(text.splitlines()[0] if written.suffix == ".jsonl" else text)
    assert set(keys) <= set(re.findall(r"`(\w+)`", section))


@pytest.mark.parametrize("room", ["data", "evaluation", "models", "reporting", "training"])
def test_the_map_of_a_large_room_names_each_of_its_files(room):
    """Lines under ``Its files::``: names, two spaces, what they are for; a line that begins with spaces goes on."""
    folder = ROOT / "src" / "ropewalk" / room
    listed = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())).split("Its files::\n\n")[1]
    lines = [line.removeprefix("    ") for line in listed.splitlines()]
    names = [name for line in lines if line[0] != " " for name in line.split("  ")[0].split(", ")]
    there = {path.stem for path in folder.glob("*.py")} | {
        path.parent.name for path in folder.glob("*/__init__.py")
    }
    assert sorted(names) == sorted(there - {"__init__"})
