"""Names of a package are imported when they are asked for, and a room may be called as its own door."""

import ast
import importlib
import pkgutil
import sys

import pytest

import ropewalk
from ropewalk.lazy import make_callable

FRONT = """
from typing import TYPE_CHECKING
from ropewalk.lazy import on_first_use
if TYPE_CHECKING:
    from pathlib import Path
    from lazy_case.home import VALUE as VALUE
    from lazy_case.inner.inner import inner as inner
else:
    __getattr__, __dir__ = on_first_use(__name__)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two modules, of which nothing is imported yet."""
    folder = tmp_path / "lazy_case"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text(FRONT)
    (folder / "inner" / "__init__.py").write_text("KIND = 'a package'\n")
    (folder / "inner" / "inner.py").write_text("def inner(): ...\n")
    (folder / "home.py").write_text(
        "VALUE = object()\ndef lazy_case(*given, **named):\n    return given, named\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import lazy_case

    yield lazy_case
    for name in [each for each in sys.modules if each.split(".")[0] == "lazy_case"]:
        del sys.modules[name]


def test_a_name_is_imported_from_its_home_when_it_is_asked_for(package):
    assert "lazy_case.home" not in sys.modules
    value = package.VALUE
    assert value is sys.modules["lazy_case.home"].VALUE
    assert "lazy_case.inner" not in sys.modules


def test_a_package_below_goes_before_the_function_of_its_name(package):
    assert package.inner.KIND == "a package"
    from lazy_case import inner

    assert inner.KIND == "a package"


def test_an_unknown_name_is_an_attribute_error_as_of_any_module(package):
    with pytest.raises(AttributeError, match="module 'lazy_case' has no attribute 'VALEU'"):
        _ = package.VALEU
    assert hasattr(package, "VALUE")
    # Imported for annotations alone: only `name as name` is public.
    assert not hasattr(package, "Path")


def test_public_names_are_listed_and_taken_by_a_star(package):
    assert {"VALUE", "inner", "__name__"} <= set(dir(package))
    assert "lazy_case.home" not in sys.modules
    namespace = {}
    exec("from lazy_case import *", namespace)
    assert {"VALUE", "inner"} == namespace.keys() - {"__builtins__"}


def fronts():
    """Each package of ropewalk with the public names that its ``__init__`` imports from elsewhere."""
    found = {"ropewalk": ropewalk.__spec__}
    found |= {
        m.name: m.module_finder.find_spec(m.name)
        for m in pkgutil.walk_packages(ropewalk.__path__, "ropewalk.")
        if m.ispkg
    }
    listed = []
    for name, spec in found.items():
        tree = ast.parse(spec.loader.get_source(name))
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        public = {a.name: node.module for node in imports for a in node.names if a.asname == a.name}
        if public:
            listed.append((name, public))
    return listed


@pytest.mark.parametrize(("name", "public"), fronts())
def test_what_type_checkers_read_is_what_a_program_gets(name, public):
    front = importlib.import_module(name)
    for each, home in public.items():
        value, got = getattr(importlib.import_module(home), each), getattr(front, each)
        # A room that is called as its own door stands for its function; a module of the name would hide it.
        assert got is value or (got is sys.modules[f"{name}.{each}"] and callable(got))


def test_a_room_is_called_as_its_door_and_looked_into_as_a_package(package):
    make_callable("lazy_case", "lazy_case.home")
    assert "lazy_case.home" not in sys.modules
    assert package(1, b=2) == ((1,), {"b": 2})
    assert package.__name__ == "lazy_case"
