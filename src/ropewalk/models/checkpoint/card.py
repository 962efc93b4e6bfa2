"""Model cards: their metadata, and which of them this program wrote and nobody has edited."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import yaml

CARD = "README.md"

_FRONT_MATTER = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)
_OWN = re.compile(r"<!-- ropewalk ([0-9a-f]{64}) -->\n?\Z")


def card_metadata(text: str) -> dict[str, Any]:
    """Metadata at the beginning of a model card; empty if there is none, or it cannot be read."""
    found = _FRONT_MATTER.match(text)
    if found is None:
        return {}
    try:
        values = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def signed_card(text: str) -> str:
    """A card with a digest of its text in the last line, which :func:`is_own_card` compares."""
    return f"{text}\n<!-- ropewalk {hashlib.sha256(text.encode()).hexdigest()} -->\n"


def is_own_card(path: Path) -> bool:
    """Whether a file is a card that this program wrote and nobody has edited."""
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    found = _OWN.search(text)
    if found is None:
        return False
    return hashlib.sha256(text[: found.start()].removesuffix("\n").encode()).hexdigest() == found[1]
