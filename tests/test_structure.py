"""The measures of scripts/structure.py, each on a made-up package whose figures are known."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "structure.py"
ORDER = [["cli"], ["train"], ["io"]]
FILES = {
    "__init__.py": "",
    "cli/__init__.py": "",
    "cli/run.py": (
        "import argparse\nimport typer\nfrom typer import Option as O\nfrom shop.cli import show\n\n\n"
        "def run(a: int = O(1), b: int = typer.Option(2), c=0, d=0, e=0, f=0, g=0):\n"
        "    argparse.ArgumentParser().add_argument('--x')\n"
    ),
    "cli/show.py": '"""What is\n\nshown."""\n\nX = 1  # one\n',
    "train/__init__.py": "from shop.train.plan import Plan as Plan\n",
    "train/plan.py": (
        "from dataclasses import dataclass\n\n\n@dataclass\nclass Plan:\n"
        "    a: int\n    b: int\n    c: int\n    d: int\n\n\nclass Longer(Plan):\n    e: int\n"
    ),
    "train/recipe.py": (
        "from pydantic import BaseModel\n\n\nclass Strict(BaseModel):\n    pass\n\n\nclass Recipe(Strict):\n"
        "    a: int\n    b: int\n    c: int\n    d: int\n    e: int\n"
    ),
    "train/loop.py": (
        "from __future__ import annotations\n\nfrom typing import TYPE_CHECKING\n\nfrom . import show\n\n"
        "if TYPE_CHECKING:\n    from .step import Step\n\n\n"
        "class Loop:\n    def go(self, a, b, c, d, e, f, g, *more, **others):\n"
        "        from shop.train.show import table\n\n    def stop(self, a, b, c, d, e, f): ...\n"
    ),
    "train/step.py": "from shop.train.loop import Loop\n\n\nclass Step: ...\n\n\ndef _hidden(): ...\n",
    "train/show.py": "def table(): ...\n",
    "io/__init__.py": "",
    "io/files.py": "from shop.train import Plan\n\n\nclass Step: ...\n",
}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made_up") / "shop"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return runpy.run_path(str(SCRIPT))["measure"](folder, ORDER)


def test_lines_are_counted_with_and_without_docstrings_and_comments(measured):
    assert measured["figures"]["lines"] == sum(text.count("\n") for text in FILES.values())
    assert measured["rooms"]["cli"] == {"files": 3, "lines": 13, "lines_of_code": 7}


def test_options_are_found_under_any_name_that_they_are_imported_by(measured):
    assert measured["lists"]["cli_declarations"] == {"typer.Option": 2, "add_argument": 1}


def test_long_signatures_leave_self_and_the_rest_out_and_commands_apart(measured):
    assert measured["lists"]["long_signatures"] == ["shop.train.loop:go (7)"]
    assert measured["lists"]["long_signatures_of_commands"] == ["shop.cli.run:run (7)"]


def test_classes_with_the_same_fields_are_a_pair_unless_one_inherits_from_the_other(measured):
    (pair,) = measured["lists"]["mirrored_classes"]
    assert (pair["a"], pair["b"]) == ("shop.train.plan.Plan", "shop.train.recipe.Recipe")
    assert (pair["kinds"], pair["shared"]) == ("dataclass, pydantic", ["a", "b", "c", "d"])


def test_names_that_occur_twice_are_told_with_their_places(measured):
    assert measured["lists"]["repeated_class_names"] == {"Step": ["shop.io.files", "shop.train.step"]}
    assert measured["lists"]["repeated_module_names"] == {"show": ["shop.cli.show", "shop.train.show"]}


def test_a_thin_neighbour_has_one_importer_of_its_folder(measured):
    # plan is imported by its package's table of names and, through it, from another room.
    assert measured["lists"]["thin_neighbours"] == [
        "shop.cli.show <- shop.cli.run",
        "shop.train.loop <- shop.train.step",
        "shop.train.show <- shop.train.loop",
        "shop.train.step <- shop.train.loop",
    ]


def test_circles_count_imports_in_functions_and_for_type_checkers_once_with_and_once_without(measured):
    assert measured["lists"]["circles"] == [["shop.train.loop", "shop.train.step"]]
    assert measured["lists"]["circles_at_import"] == []


def test_an_import_of_a_higher_room_is_an_arrow_upward(measured):
    assert measured["lists"]["arrows_upward"] == ["shop.io.files -> shop.train"]


def test_public_names_are_definitions_and_what_all_lists(measured):
    # run; Plan, Longer; Strict, Recipe; Loop; Step; table; Step. A package's front names Plan once more.
    assert measured["figures"]["public_definitions"] == 9
    assert measured["figures"]["public_names"] == 10


def test_folders_and_modules_are_judged_by_size(measured):
    assert measured["figures"]["folders_above_12_files"] == 0
    assert measured["figures"]["modules_above_900_lines"] == 0
    assert measured["figures"]["modules_below_60_lines"] == 8
