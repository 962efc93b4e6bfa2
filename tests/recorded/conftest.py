"""Cases run in one process a call, outside of pytest's own, which imports the libraries once and forks."""

import json
import subprocess
import sys

import pytest

from tests.recorded.recorded_cases import SCRIPT


@pytest.fixture(scope="session")
def outputs_of(tmp_path_factory):
    """Run all scenarios of a part and give what they said."""

    def run(part: str):
        out = tmp_path_factory.mktemp("outputs")
        command = [sys.executable, str(SCRIPT), "run", str(out), "--part", part]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return json.loads((out / f"{part}.json").read_text(encoding="utf-8"))

    return run
