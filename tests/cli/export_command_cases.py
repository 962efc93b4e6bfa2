"""What ranks run in the test of ``ropewalk eval --rope`` under torchrun."""

import contextlib
import io

from ropewalk.cli.app import main


def command(arguments: list[str]) -> tuple[int, str]:
    """Exit status and stdout of the program."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        status = main(arguments)
    return status, out.getvalue()
