"""What is published: the metadata of the package, and the workflow that builds it from a tag."""

import subprocess
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from ropewalk.versions import FULL as FULL_IMPORTS
from ropewalk.versions import VERSION
from tests.packages import ADDED, CORE, FULL, settings_of
from tests.places import ROOT


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
    targets = settings_of(".")["tool"]["hatch"]["build"]["targets"]
    assert targets["sdist"]["exclude"] == ["/.*", "/full"]
    urls = CORE["urls"]
    assert {"Repository", "Documentation", "Changelog", "Issues"} <= urls.keys()
    assert all(url.startswith("https://") for url in urls.values())


def test_the_citation_has_the_version_licence_and_address_of_the_package() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert found["cff-version"] == "1.2.0"
    assert found["authors"] == [{"name": "The ropewalk authors"}]
    package = (CORE["version"], CORE["license"], CORE["urls"]["Repository"])
    assert (str(found["version"]), found["license"], found["repository-code"]) == package
    assert {"message", "title"} <= found.keys()


def test_ropewalk_is_ropewalk_core_of_the_same_version_and_more() -> None:
    assert (CORE["name"], FULL["name"]) == ("ropewalk-core", "ropewalk")
    assert CORE["version"] == FULL["version"] == VERSION
    assert f"{CORE['name']}=={VERSION}" in FULL["dependencies"]
    # What is said in both is the same.
    same = ("requires-python", "license", "keywords", "classifiers", "urls")
    assert [CORE[key] for key in same] == [FULL[key] for key in same]
    assert "optional-dependencies" not in CORE
    assert "scripts" not in FULL
    assert settings_of("full")["tool"]["hatch"]["build"]["targets"]["wheel"] == {"bypass-selection": True}
    # Nobody who lacks one of them is told that something else is wrong.
    assert {Requirement(line).name for line in ADDED} == {*FULL_IMPORTS}


def test_no_file_of_the_repository_is_ignored_because_packages_leave_out_what_git_ignores() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("a source package has no list of the repository's files")
    command = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == []


def test_every_step_of_the_workflow_is_one_action_or_a_script_that_bash_reads(release: Any) -> None:
    for name, job in release["jobs"].items():
        assert (
            {"runs-on", "steps"} <= job.keys() <= {"needs", "runs-on", "environment", "permissions", "steps"}
        )
        assert job.get("needs", name) in release["jobs"]
        for step in job["steps"]:
            assert len(step.keys() & {"uses", "run"}) == 1
            assert step.keys() <= {"name", "uses", "with", "run"}
            # A step with `run` has no inputs.
            assert not step.keys() >= {"run", "with"}
            read = subprocess.run(["bash", "-n"], input=step.get("run", ""), text=True, capture_output=True)
            assert (read.returncode, read.stderr) == (0, "")
