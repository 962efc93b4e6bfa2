"""What other programs make of a checkpoint's RoPE: frequencies, attention factor, served length, and how to start them.

Each module restates from a program's source how it reads a config. The file and the version are named in it.
"""

from ropewalk.readers.reader import Checkpoint, Reader
from ropewalk.readers.table import (
    READERS,
    Reading,
    cautions,
    readings,
    refuse_wrong,
    sentences,
    wrong_servers,
)

__all__ = [
    "READERS",
    "Checkpoint",
    "Reader",
    "Reading",
    "cautions",
    "readings",
    "refuse_wrong",
    "sentences",
    "wrong_servers",
]
