"""Text that somebody else wrote, made fit to be shown: what a model answered, what a server said."""

from __future__ import annotations

import re
import unicodedata

from rich.markup import escape

from ropewalk.errors import RopewalkError

_JOINERS = "\u200c\u200d"
"""Format characters that scripts and emoji need; the others are invisible or turn the reading direction."""
_PLAIN = re.compile(r"[ -~]*")


def shown(text: str, most: int = 300, markup: bool = False) -> str:
    """One line that is safe to print and says what the text holds, control characters included.

    A newline becomes ``↵``; other control characters, such as the escape that begins a terminal's commands, and
    what is invisible become their codes, as ``\\x1b`` and ``\\u202e``. The result still has to be escaped for HTML,
    as any text.

    Args:
        text: anything.
        most: characters that are kept; of a longer text the middle is left out, and the result says how many
            characters that were.
        markup: also escape what rich takes for its markup. Not needed in ``rich.text.Text``.

    Raises:
        RopewalkError: if ``most`` is less than 2.
    """
    if most < 2:
        raise RopewalkError(f"the characters to show must be 2 or more, got {most}")
    if len(text) <= most:
        line = _visible(text)
    else:
        # Cut before it is made visible: the work does not grow with the text.
        head, tail = text[: most - most // 2], text[-(most // 2) :]
        line = f"{_visible(head)} … ({len(text) - most:,} characters left out) … {_visible(tail)}"
    return escape(line) if markup else line


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
