"""Text that somebody else wrote, made fit to be shown: names in files, what a model answered, a server said."""

from __future__ import annotations

import re
import unicodedata

from ropewalk.errors import RopewalkError

_JOINERS = "\u200c\u200d"
"""Format characters that scripts and emoji need; the others are invisible or turn the reading direction."""
_PLAIN = re.compile(r"[ -~]*")
_HARMLESS = re.compile(r"[ -~\n\t]*")


def harmless(text: str) -> str:
    """Text in which nothing commands a terminal, or hides or turns what is read; line breaks and tabs stay.

    Other control characters and what is invisible become their codes, as in :func:`shown`, for which one line is
    meant.
    """
    if _HARMLESS.fullmatch(text):
        return text
    return "".join(each if each in "\n\t" else _picture(each) for each in text)


def shown(text: str, most: int = 300) -> str:
    """One line that is safe to print and says what the text holds, control characters included.

    A newline becomes ``↵``; other control characters, such as the escape that begins a terminal's commands, and
    what is invisible become their codes, as ``\\x1b`` and ``\\u202e``. The result still has to be escaped for HTML,
    as any text.

    Args:
        text: anything.
        most: characters that are kept; of a longer text the middle is left out, and the result says how many
            characters that were.

    Raises:
        RopewalkError: if ``most`` is less than 2.
    """
    if most < 2:
        raise RopewalkError(f"the characters to show must be 2 or more, got {most}")
    if len(text) <= most:
        return _visible(text)
    # Cut before it is made visible: the work does not grow with the text.
    head, tail = text[: most - most // 2], text[-(most // 2) :]
    return f"{_visible(head)} … ({len(text) - most:,} characters left out) … {_visible(tail)}"


def _visible(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else "".join(map(_picture, text))


def _picture(character: str) -> str:
    if character == "\n":
        return "↵"
    # Lone surrogates, too, which JSON may hold and UTF-8 cannot.
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp") and character not in _JOINERS
    if not hidden:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
