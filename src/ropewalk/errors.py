"""The exceptions that users of ropewalk see: invalid input, described in one sentence."""


class RopewalkError(ValueError):
    """Invalid input or an impossible request; the message is one sentence that names the offending value.

    The command line prints the message and exits with status 2; a library caller catches it as a
    ``ValueError``.
    """


class EngineError(RopewalkError):
    """An attention engine does not support a layout, dtype or device; the message names an engine that does."""


class RunFailure(RopewalkError):
    """A run started well but cannot continue, for example because the loss is NaN; exit status 1."""


class Echo(RopewalkError):
    """An error that rank 0 raised and prints; the other processes end silently with its exit status.

    Attributes:
        failed: whether the error was a :class:`RunFailure`.
    """

    def __init__(self, message: str, failed: bool = False) -> None:
        super().__init__(message)
        self.failed = failed
