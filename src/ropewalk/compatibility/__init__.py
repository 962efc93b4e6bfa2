"""What other programs make of a checkpoint's RoPE: frequencies, attention factor, served length, and how to start them.

Each module restates from a program's source how it reads a config. The file and the version are named in it.
"""

from ropewalk.compatibility.reader import Checkpoint as Checkpoint, Reader as Reader
from ropewalk.compatibility.table import (
    READERS as READERS,
    Reading as Reading,
    cautions as cautions,
    readings as readings,
    refuse_wrong as refuse_wrong,
    sentences as sentences,
    wrong_servers as wrong_servers,
)
