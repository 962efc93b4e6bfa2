"""The exceptions that users of ropewalk see: invalid input, described in one sentence."""

import sys


class RopewalkError(ValueError):
    """Invalid input or an impossible request; the message is one sentence that names the offending value.

    The class is a subclass of ``ValueError``. The command line prints the message and exits with status 2.
    """

    status = 2
    """Exit status of the program."""

    known_to_all = False
    """Whether every rank of the run raises this error or its :class:`Echo`, so that none waits for another."""


class EngineError(RopewalkError):
    """An attention engine or a model does not support a request.

    If another engine supports the request, the message names that engine. The class is a subclass of
    :class:`RopewalkError`.
    """


class RunFailure(RopewalkError):
    """A run started well but cannot continue, for example because the loss is NaN; exit status 1."""

    status = 1


class Stopped(RopewalkError):
    """A signal stopped work that can be resumed; exit status 75, "try again" (``EX_TEMPFAIL`` of ``sysexits.h``)."""

    status = 75


class Echo(RopewalkError):
    """An error that rank 0 raised and prints; the other processes end silently with its exit status.

    Attributes:
        status: exit status of the error.
    """

    known_to_all = True

    def __init__(self, message: str, status: int = RopewalkError.status) -> None:
        super().__init__(message)
        self.status = status


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's class if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def http_errors() -> tuple[type[Exception], ...]:
    """Errors of the HTTP client of huggingface_hub, which is httpx or httpx2; a failed connection is no ``OSError``."""
    return tuple(sys.modules[name].HTTPError for name in ("httpx", "httpx2") if name in sys.modules)
