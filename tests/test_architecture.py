"""The arrows between rooms, what each may import, and that importing is quick and needs no GPU."""

import ast
import re
import subprocess
import sys
from functools import cache
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from ropewalk.cli.app import SUMMARIES
from tests.packages import DEPENDENCIES, FULL
from tests.places import ROOT

PACKAGE = ROOT / "src" / "ropewalk"
ROOTS = {"errors", "fused", "lazy", "versions", "io"}
ALLOWED = {
    "io": set(),
    "rope": set(),
    "attention": set(),
    "parallel": {"attention"},
    "testing": {"attention", "parallel"},
    "recipes": set(),
    "runs": {"parallel"},
    "data": {"attention", "parallel", "runs"},
    "models": {"attention", "parallel", "rope"},
    "compatibility": {"models", "rope"},
    "evaluation": {"attention", "data", "models", "parallel", "compatibility", "rope", "runs"},
    "search": {"attention", "data", "evaluation", "models", "parallel", "compatibility", "rope", "runs"},
    "planning": {"attention", "data", "models", "parallel", "compatibility", "rope"},
    "audit": {"attention", "data", "evaluation", "models", "parallel", "rope"},
    "training": {
        "attention",
        "data",
        "evaluation",
        "models",
        "parallel",
        "planning",
        "compatibility",
        "recipes",
        "rope",
        "runs",
        "search",
    },
    "dry_run": {"recipes", "attention", "data", "models", "parallel", "planning", "rope", "training"},
    "experiments": {"evaluation", "parallel", "rope", "runs", "training"},
    "verification": {
        "attention",
        "data",
        "evaluation",
        "models",
        "parallel",
        "rope",
        "training",
    },
    "reporting": {
        "recipes",
        "audit",
        "data",
        "dry_run",
        "evaluation",
        "experiments",
        "models",
        "planning",
        "compatibility",
        "rope",
        "search",
        "training",
        "verification",
    },
}
PURE = {"rope", "attention", "parallel"}
TRACKERS_AND_HARNESS = {
    PACKAGE / "training" / "metrics.py",
    PACKAGE / "evaluation" / "tasks" / "lm_eval" / "model.py",
}
"""accelerate's trackers, and transformers' progress bars, which are to be silent while lm_eval runs."""
LIBRARIES_OF_PURE_ROOMS = {"torch", "numpy"}


@cache
def imports(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """A module's import statements, function bodies included."""
    return [
        each
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.Import | ast.ImportFrom)
    ]


def imports_of(path: Path) -> set[str]:
    """Dotted names of everything a module imports, function bodies included."""
    names = set()
    for node in imports(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif node.module:
            names.add(node.module)
    return names


def rooms_and_modules():
    """Each module with its name and its room; a module at the root is its own room."""
    for path in sorted(PACKAGE.rglob("*.py")):
        inside = path.relative_to(PACKAGE)
        yield path, str(inside), inside.parts[0]


def test_arrows_point_one_way():
    """The command line and the package's root may import every room."""
    upward = {}
    for path, name, room in rooms_and_modules():
        inner = {n.split(".")[1] for n in imports_of(path) if n.startswith("ropewalk.")}
        if room in ALLOWED and (found := inner - {room} - ROOTS - ALLOWED[room]):
            upward[name] = found
    assert upward == {}


def test_pure_rooms_import_torch_and_numpy_alone():
    others = {}
    for path, name, room in rooms_and_modules():
        outer = {n.split(".")[0] for n in imports_of(path)} - {"ropewalk"} - set(sys.stdlib_module_names)
        if room in PURE and (found := outer - LIBRARIES_OF_PURE_ROOMS):
            others[name] = found
    assert others == {}


def test_only_models_import_what_transformers_hides():
    hidden = {}
    for path, name, room in rooms_and_modules():
        found = {n for n in imports_of(path) if n.startswith(("transformers.", "accelerate."))}
        if found and room != "models" and path not in TRACKERS_AND_HARNESS:
            hidden[name] = found
    assert hidden == {}


def loaded_after(statement: str) -> set[str]:
    program = f"import sys\n{statement}\nprint(' '.join(m for m in sys.modules if '.' not in m))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_importing_ropewalk_loads_no_heavy_library():
    assert not loaded_after("import ropewalk") & {"torch", "transformers", "numpy", "datasets", "matplotlib"}


def test_one_piece_needs_torch_alone():
    loaded = loaded_after("from ropewalk import PackedLayout, attend; import ropewalk.rope")
    assert not loaded & {"transformers", "datasets", "pydantic", "cyclopts", "matplotlib", "triton"}


def test_help_needs_no_heavy_library():
    commands = (
        "[['extend'], ['search'], ['eval'], ['data', 'pack'], ['audit'], ['verify'], ['rope', 'probe']]"
    )
    loaded = loaded_after(
        f"from ropewalk.cli.app import main\nfor command in {commands}: main([*command, '--help'])"
    )
    assert not loaded & {"torch", "transformers", "datasets", "matplotlib"}


DISTRIBUTIONS = {"yaml": "pyyaml", "PIL": "pillow"}
"""Packages that are imported by another name than they are installed by."""


def test_every_imported_package_is_declared():
    wanted = [*DEPENDENCIES, *chain(*FULL["optional-dependencies"].values())]
    declared = {re.split(r"[\[<>=~! ]", each)[0].lower().replace("-", "_") for each in wanted}
    imported = set().union(*(imports_of(path) for path in PACKAGE.rglob("*.py")))
    outer = {n.split(".")[0] for n in imported} - {"ropewalk"} - set(sys.stdlib_module_names)
    assert {DISTRIBUTIONS.get(n, n).lower() for n in outer} <= declared


def graph() -> dict[str, set[str]]:
    """Which module imports which, function bodies included, but for the package's front, which names all rooms."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    del names["ropewalk"]
    edges: dict[str, set[str]] = {name: set() for name in names}
    for name, path in names.items():
        for node in imports(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                found = {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
                edges[name] |= (found & names.keys()) - {name}
    # A package's front names what lies behind it; whoever imports it may be one of those.
    fronts = {name for name, path in names.items() if path.name == "__init__.py"}
    return {name: found - fronts for name, found in edges.items() if name not in fronts}


def circles(edges: dict[str, set[str]]) -> list[str]:
    """Modules that lie on a circle: what is left when those that import nothing that is left go, again and again."""
    edges = {name: found & edges.keys() for name, found in edges.items()}
    for _ in range(2):
        while gone := {name for name, found in edges.items() if not found & edges.keys()}:
            edges = {name: found - gone for name, found in edges.items() if name not in gone}
        turned: dict[str, set[str]] = {name: set() for name in edges}
        for name, found in edges.items():
            for other in found:
                turned[other].add(name)
        edges = turned
    return sorted(edges)


def test_no_circle_of_files():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"c"}}) == ["b", "c"]
    assert circles(graph()) == []


SUPPORT = {"app", "binding", "output", "progress"}
"""Modules of the command line that are no command."""


def test_each_command_is_the_module_of_its_name():
    commands = {path.stem for path in (PACKAGE / "cli").glob("*.py")} - SUPPORT - {"__init__"}
    assert commands == {name.replace("-", "_") for name in SUMMARIES}


def test_a_command_imports_no_other():
    for name, found in graph().items():
        if name.startswith("ropewalk.cli.") and name.split(".")[2] not in SUPPORT:
            others = {each.split(".")[2] for each in found if each.startswith("ropewalk.cli.")}
            assert others <= SUPPORT, name


def test_no_room_below_reporting_imports_it():
    assert all("reporting" not in allowed for allowed in ALLOWED.values())


def test_the_arrows_between_rooms_make_no_circle():
    assert circles(ALLOWED) == []


HERE = {"", "benchmarks", "recorded", "scripts"}
"""Folders of tests that belong to no room."""


def test_tests_lie_where_their_modules_do():
    """``tests/x/test_y.py``, or ``test_y_aspect.py``, for ``src/ropewalk/x/y.py`` or the room ``y``."""
    astray = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        inside = path.relative_to(ROOT / "tests")
        folder = PACKAGE / inside.parent
        stem = path.stem.removeprefix("test_")
        there = {p.stem for p in folder.glob("*.py")} | {p.parent.name for p in folder.glob("*/__init__.py")}
        beside = any(stem == name or stem.startswith(f"{name}_") for name in there)
        if inside.parent.as_posix().removeprefix(".") not in HERE and not beside:
            astray.append(str(inside))
    assert astray == []


def test_the_lowest_versions_that_are_tested_are_those_that_are_allowed():
    extras = FULL["optional-dependencies"]
    lines = [*DEPENDENCIES, *chain.from_iterable(extras[name] for name in ("lm-eval", "dev"))]
    declared = [each for line in lines if (each := Requirement(line)).name != FULL["name"]]
    pinned = {
        canonicalize_name(each.name): each.specifier
        for line in (ROOT / "constraints-lowest.txt").read_text().splitlines()
        if not line.startswith("#") and (each := Requirement(line))
    }
    for requirement in declared:
        (floor,) = requirement.specifier
        (pin,) = pinned[canonicalize_name(requirement.name)]
        assert (floor.operator, pin.operator) == (">=", "==")
        assert Version(pin.version) == Version(floor.version), requirement.name


WITHOUT_TESTS_OF_ITS_NAME = {
    "attention/choices.py": "names alone; tests/data/test_settings.py holds settings to them",
    "keywords.py": "written by scripts/job_keywords.py; tests/test_docs.py asks whether it is up to date",
    "data/tokens/render_process.py": "the process behind render.py; tests/data/tokens/test_render.py runs it",
    "parallel/ring/traffic.py": "formulas; tests/planning/sizing/test_traffic.py holds them to a ring's plans",
    "planning/settings.py": "declarations; tests/cli asks for each",
    "verification/settings.py": "declarations; tests/cli/test_verify.py asks for each",
}
"""Modules whose tests lie elsewhere, and why."""


STATE_OF_RUNS = {
    "ropewalk.io.lock": {"locked"},
    "ropewalk.io.json_lines": {"append_line", "read_lines"},
    "ropewalk.runs.identity": {"differences"},
}
"""What only `runs` uses: whoever takes a lock, keeps a log or compares identities asks whether a run may go on."""
STILL_BY_HAND = {
    "cli/export.py",
    "models/checkpoint/export.py",
    "training/export_step.py",
    "training/metrics.py",
}
"""Modules that still do; none may join them."""


def test_one_room_owns_the_state_of_runs():
    by_hand = set()
    for path, name, room in rooms_and_modules():
        if room in ("io", "runs"):
            continue
        for node in imports(path):
            if isinstance(node, ast.ImportFrom) and node.module in STATE_OF_RUNS:
                used = {alias.name for alias in node.names} & STATE_OF_RUNS[node.module]
                by_hand |= {name} if used else set()
            elif isinstance(node, ast.Import):
                by_hand |= {name} if {alias.name for alias in node.names} & STATE_OF_RUNS.keys() else set()
    assert by_hand == STILL_BY_HAND


def test_each_module_has_tests_of_its_name():
    """``tests/x/test_y.py`` for ``src/ropewalk/x/y.py``, beside which ``test_y_aspect.py`` may lie."""
    without = {
        name
        for path, name, _ in rooms_and_modules()
        if not path.name.startswith("__")
        and not (ROOT / "tests" / name).with_name(f"test_{path.name}").exists()
    }
    assert without == WITHOUT_TESTS_OF_ITS_NAME.keys()
