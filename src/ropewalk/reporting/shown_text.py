"""Make untrusted text safe to show: names in files, model answers, and messages of servers."""

from __future__ import annotations

import re
import textwrap
import unicodedata
from typing import TYPE_CHECKING

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from rich.console import Console

_JOINERS = "\u200c\u200d"
"""Format characters that scripts and emoji need. All others are invisible or change the reading direction."""
_PLAIN = re.compile(r"[ -~]*")
_HARMLESS = re.compile(r"[ -~\n\t]*")


def between_words(text: str, console: Console) -> str:
    """A sentence with lines as wide as a terminal that end between words; unchanged for files and pipes.

    rich would cut a word that is longer than a line, such as a path.
    """
    if not console.is_terminal:
        return text
    return textwrap.fill(text, max(2, console.width), break_long_words=False, break_on_hyphens=False)


def harmless(text: str) -> str:
    """Replace control, invisible and direction-changing characters with their codes. Keeps line breaks and tabs.

    Without this, untrusted text could send commands to a terminal or hide parts of itself. Use :func:`shown` for text
    on one line.
    """
    # Most text is plain ASCII, which needs no loop over its characters.
    if _HARMLESS.fullmatch(text):
        return text
    return "".join(each if each in "\n\t" else _picture(each) for each in text)


def shown(text: str, most: int = 300) -> str:
    """Convert text to one line that is safe to print and shows every character.

    A newline becomes ``↵``. Other control characters, such as the escape that starts terminal commands, and invisible
    characters become their codes, such as ``\\x1b`` and ``\\u202e``. The result must still be escaped for HTML.

    Args:
        text: any text.
        most: number of characters to keep. A longer text loses its middle, and the result says how many characters
            were left out.

    Raises:
        RopewalkError: if ``most`` is less than 2.
    """
    if most < 2:
        raise RopewalkError(f"the number of characters to show must be 2 or more, got {most}")
    if len(text) <= most:
        return _visible(text)
    # Cut first, so that a huge text costs no more than a short one.
    head, tail = text[: most - most // 2], text[-(most // 2) :]
    return f"{_visible(head)} … ({len(text) - most:,} characters left out) … {_visible(tail)}"


def _visible(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else "".join(map(_picture, text))


def _picture(character: str) -> str:
    if character == "\n":
        return "↵"
    # Includes lone surrogates ("Cs"), which JSON allows but UTF-8 cannot encode.
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS
    if not hidden:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
