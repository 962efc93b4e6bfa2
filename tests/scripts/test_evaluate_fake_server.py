"""The check that `make wheel` makes of ropewalk-core by itself."""

import sys
from pathlib import Path

from scripts.evaluate_fake_server import evaluate


def test_a_program_evaluates_the_server() -> None:
    assert evaluate(str(Path(sys.executable).with_name("ropewalk"))) == ["passkey"]
