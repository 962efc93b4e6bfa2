"""``ropewalk data`` through the program's own main."""

import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from unittest.mock import patch

from ropewalk.cli.app import main
from ropewalk.errors import RopewalkError


def call(*arguments: object, columns: int = 120) -> tuple[str, str]:
    """What a command prints on stdout and on stderr.

    Raises:
        RopewalkError: with the sentence on stderr, where it refuses.
    """
    out, err = StringIO(), StringIO()
    with patch.dict(os.environ, {"COLUMNS": str(columns)}), redirect_stdout(out), redirect_stderr(err):
        status = main(["data", *map(str, arguments)])
    if status == 2:
        raise RopewalkError(err.getvalue().removeprefix("error: ").rstrip("\n"))
    assert status == 0, err.getvalue()
    return out.getvalue(), err.getvalue()
