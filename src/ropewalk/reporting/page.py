"""One self-contained HTML page from a template: no script, no request, figures inside."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ropewalk.errors import RopewalkError
from ropewalk.io.files import write_text
from ropewalk.reporting.shown_text import harmless
from ropewalk.reporting.tables import ResultTable

MEDIA_TYPES = {".png": "image/png", ".svg": "image/svg+xml"}


@dataclass(frozen=True)
class Picture:
    """A picture in a file.

    Attributes:
        path: ``.png`` or ``.svg``.
        text: what it shows, for readers who do not see it; the words of the file's name where it is empty.
    """

    path: Path
    text: str = ""


@dataclass(frozen=True)
class Examples:
    """Some of many: single cases, to be folded away below a heading.

    Attributes:
        title: what they are examples of, and of how many.
        entries: for each its facts by name, shown as text.
    """

    title: str
    entries: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Page:
    """What a page says, all of it plain text.

    Attributes:
        title: heading of the page.
        facts: by name, in the order to be read.
        pictures: put inside the page.
        tables: in order.
        examples: behind the tables.
        details: texts to fold away by their headings: the recipe, the versions.
    """

    title: str
    facts: Mapping[str, object] = field(default_factory=dict)
    pictures: Sequence[Picture] = ()
    tables: Sequence[ResultTable] = ()
    examples: Sequence[Examples] = ()
    details: Mapping[str, str] = field(default_factory=dict)


def write_page(page: Page, path: Path) -> None:
    """Write a page, whole or not at all.

    Raises:
        RopewalkError: if a picture cannot be read or is of another format, or the page cannot be written.
    """
    # Every value passes through ``finalize``, and is escaped after it.
    environment = Environment(
        loader=PackageLoader("ropewalk.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        keep_trailing_newline=True,
    )
    pictures = [_embedded(each) for each in page.pictures]
    write_text(path, environment.get_template("page.html.j2").render(page=page, pictures=pictures))


def _finalize(value: Any) -> Any:
    """Text without what could hide or turn it; what the template itself made stays."""
    return value if hasattr(value, "__html__") else harmless(str(value))


def _embedded(picture: Picture) -> dict[str, str]:
    path = picture.path
    if path.suffix not in MEDIA_TYPES:
        raise RopewalkError(f"a page shows .png and .svg figures, got {path.name}")
    try:
        content = base64.b64encode(path.read_bytes()).decode("ascii")
    except OSError as error:
        raise RopewalkError(f"cannot read the figure {path}: {error.strerror}") from error
    text = picture.text or path.stem.replace("_", " ").replace("-", " ")
    return {"media_type": MEDIA_TYPES[path.suffix], "content": content, "text": text}
