"""The documentation says what is: its code runs, its recipes parse, its tables are up to date."""

import json
import pkgutil
import re
import runpy
import subprocess
import sys

import pytest

import ropewalk
from ropewalk.training.recipe.file import parse_recipe
from tests.places import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

SLOW = ("python.md", "extending.md")


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


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "@register" in code:
        # The table of RoPE methods would keep the example's for all tests that follow in this process.
        subprocess.run([sys.executable, "-c", code], check=True)
    else:
        exec(compile(code, "documentation", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("text", blocks("yaml"))
def test_yaml_blocks_are_recipes(text):
    assert parse_recipe(text, "documentation").stages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_files_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize(
    "name",
    [
        "base_table.py",
        "cli_reference.py",
        "draw_pictures.py",
        "file_reference.py",
        "recipe_reference.py",
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
    jobs = {"audit": "ropewalk.audit.audit", "search": "ropewalk.search.search"}
    public = {jobs.get(name, f"ropewalk.{name}") for name in ropewalk.__all__} - {"ropewalk.__version__"}
    assert public <= set(documented())


ARTIFACTS = ROOT / "tests" / "compatibility" / "artifacts"


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
