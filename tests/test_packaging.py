"""What is published: the metadata of the package, and the workflow that builds it from a tag."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def release() -> Any:
    return yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())


def test_only_a_tag_publishes_and_only_the_publishing_job_may(release: Any) -> None:
    # YAML reads the key `on` as true.
    assert release[True] == {"push": {"tags": ["v*"]}}
    jobs = release["jobs"]
    assert release["permissions"] == {"contents": "read"}
    assert {name for name, job in jobs.items() if "permissions" in job} == {"publish"}
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert (jobs["publish"]["needs"], jobs["publish"]["environment"]) == ("build", "pypi")


def test_what_is_published_was_installed_and_run_first(release: Any) -> None:
    commands = [step.get("run", "") for step in release["jobs"]["build"]["steps"]]
    at = {
        word: next(n for n, each in enumerate(commands) if word in each)
        for word in ("make wheel", "-m build")
    }
    assert at["make wheel"] < at["-m build"]
    assert "wheel:" in (ROOT / "Makefile").read_text()
    # Nothing but actions of known publishers, each at a stated version.
    used = [step["uses"] for job in release["jobs"].values() for step in job["steps"] if "uses" in step]
    assert all(each.split("/")[0] in ("actions", "pypa") and "@" in each for each in used)


def test_the_source_package_leaves_out_settings_of_development() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"] == ["/.*"]
    urls = settings["project"]["urls"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= urls.keys()
    assert all(url.startswith("https://") for url in urls.values())
