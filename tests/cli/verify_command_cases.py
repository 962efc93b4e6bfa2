"""What ranks run in the test of ``ropewalk verify`` under torchrun."""

import contextlib
import io

from ropewalk.cli.app import main


def command(arguments):
    """Exit status of a command line, and what it printed on stdout."""
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        status = main(arguments)
    return status, stdout.getvalue()
