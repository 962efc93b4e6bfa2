"""Text that would command a terminal, and what is printed of it."""

import io
import unicodedata
from typing import Any

from hypothesis import strategies as st

from ropewalk.cli.output import Terminal

EVIL = "\x1b[2J\x1b]0;owned\x07\x1b]8;;http://evil\x1b\\ \x9b31m\u202eevil\u2066 [red]x[/red] :bomb: \udcff"
ANY = st.text(st.characters(codec=None) | st.sampled_from("\x1b\x07\x9b\x9d\r\n\u202e\u2028[]:"), max_size=30)


def acting(printed: str) -> list[str]:
    """Characters that a terminal acts on, or that hide or turn text."""
    kinds, allowed = ("Cc", "Cf", "Cs", "Zl", "Zp"), "\n\u200c\u200d"
    return [each for each in printed if unicodedata.category(each) in kinds and each not in allowed]


def printed_by(show: Any, **options: Any) -> str:
    out = io.StringIO()
    show(Terminal(file=out, **{"width": 200, **options}))
    return out.getvalue()
