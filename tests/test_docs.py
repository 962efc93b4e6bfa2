"""The documentation says what is: its code runs, its recipes parse, its tables are up to date."""

import re
import runpy
import subprocess
import sys

import pytest

from ropewalk.training.recipe.file import parse_recipe
from tests.places import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "ARCHITECTURE.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
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
    "name", ["recipe_reference.py", "base_table.py", "scaling_table.py", "supported_models.py"]
)
def test_tables_are_up_to_date(name, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, "--check"])
    try:
        runpy.run_path(str(ROOT / "scripts" / name), run_name="__main__")
    except SystemExit as ended:
        # It says what to run where a table is not as it should be.
        if ended.code:
            raise
