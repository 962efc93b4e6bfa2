"""The one exception that a user of ropewalk meets: bad input, said in one sentence."""


class RopewalkError(ValueError):
    """Bad input or an impossible request; the message is one sentence that names the offending value.

    The command line prints the message and exits with status 2; a library caller catches it as a
    ``ValueError``.
    """


class EngineError(RopewalkError):
    """An attention engine cannot honour a layout, a dtype or a device; the message names one that can."""


class RunFailure(RopewalkError):
    """A run that began well and cannot go on (a loss that is no number, say); exit status 1."""


class Echo(RopewalkError):
    """What rank 0 raised and says, told to the other processes of a run: they end in silence, with its status.

    Attributes:
        failed: whether it was a :class:`RunFailure`.
    """

    def __init__(self, message: str, failed: bool = False) -> None:
        super().__init__(message)
        self.failed = failed
