"""Names of a package are imported when they are asked for, and a room may be called as its own door."""

import sys

import pytest

from ropewalk.lazy import lazy_names, make_callable


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two modules, of which nothing is imported yet."""
    folder = tmp_path / "lazy_case"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "inner" / "__init__.py").write_text("KIND = 'a package'\n")
    (folder / "home.py").write_text(
        "VALUE = object()\ndef lazy_case(*given, **named):\n    return given, named\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import lazy_case

    yield lazy_case
    for name in [each for each in sys.modules if each.split(".")[0] == "lazy_case"]:
        del sys.modules[name]


def test_a_name_is_imported_from_its_home_when_it_is_asked_for(package):
    find = lazy_names("lazy_case", {"VALUE": "home", "OTHER": "home:VALUE"}, {"inner"})
    assert "lazy_case.home" not in sys.modules
    value = find("VALUE")
    assert value is sys.modules["lazy_case.home"].VALUE
    assert find("OTHER") is value
    assert "lazy_case.inner" not in sys.modules
    assert find("inner").KIND == "a package"


def test_an_unknown_name_is_an_attribute_error_as_of_any_module(package):
    find = lazy_names("lazy_case", {"VALUE": "home"})
    with pytest.raises(AttributeError, match="module 'lazy_case' has no attribute 'VALEU'"):
        find("VALEU")
    assert not hasattr(package, "VALUE")
    package.__getattr__ = find
    assert hasattr(package, "VALUE")
    assert not hasattr(package, "VALEU")


def test_a_room_is_called_as_its_door_and_looked_into_as_a_package(package):
    make_callable("lazy_case", "home")
    assert "lazy_case.home" not in sys.modules
    assert package(1, b=2) == ((1,), {"b": 2})
    assert package.__name__ == "lazy_case"
