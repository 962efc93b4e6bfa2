"""What results say of the software is what is installed."""

import platform
from importlib.metadata import version

import ropewalk
from ropewalk.versions import LIBRARIES, VERSION, older_transformers, software_versions
from tests.packages import CORE
from tests.versions import pretend_transformers


def test_the_version_is_the_packages_own():
    assert ropewalk.__version__ == VERSION == CORE["version"]


def test_versions_are_those_of_what_is_installed():
    found = software_versions()
    assert list(found) == ["ropewalk", "python", *LIBRARIES]
    assert found["ropewalk"] == VERSION
    assert found["python"] == platform.python_version()
    assert {name: found[name] for name in LIBRARIES} == {name: version(name) for name in LIBRARIES}


def test_what_is_changed_in_one_result_does_not_reach_the_next():
    software_versions()["torch"] = "another"
    assert software_versions()["torch"] == version("torch")


def test_versions_of_transformers_compare_as_numbers(monkeypatch):
    for installed, asked, older in (
        ("5.9.3", "5.10", True),
        ("5.22.0.dev0", "5.22", False),
        ("5.22.1", "5.22.9", False),
        ("6.0.0", "5.22", False),
        ("5.17.0", "5.22", True),
    ):
        pretend_transformers(monkeypatch, installed)
        assert older_transformers(asked) == (installed if older else None)
