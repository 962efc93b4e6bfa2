"""Write self-contained HTML pages from templates: a page loads nothing, and runs no script.

Text from elsewhere is escaped. Should any of it become markup nevertheless, the content security policy of the template
keeps it from running scripts and from asking another machine for anything.
"""

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
    """An image file with its text alternative and its caption.

    Attributes:
        path: path of a ``.png`` or ``.svg`` file.
        text: text alternative for readers who cannot see the image. If empty, the file's name is used.
        caption: text below the image.
        svg: what a page embeds instead of the file's own content, if it is not empty: the figure without its caption.
    """

    path: Path
    text: str = ""
    caption: str = ""
    svg: bytes = b""


@dataclass(frozen=True)
class Examples:
    """A selection of individual cases, collapsed below a heading.

    Attributes:
        title: task of the examples, their number, and the number of all cases.
        entries: facts by name for each example, shown as text.
    """

    title: str
    entries: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Page:
    """Content of a page. All text is plain text.

    Attributes:
        title: heading of the page.
        lead: the conclusion, in a sentence or two below the heading.
        facts: facts by name, in reading order.
        pictures: images to embed.
        links: names of files beside the page, by the text that leads to them.
        first: tables shown before the figures.
        reload_seconds: time after which the page reloads itself; 0 for never.
        tables: tables shown after the figures.
        examples: examples shown after the tables.
        details: collapsed texts by heading, such as the recipe and the versions.
    """

    title: str
    facts: Mapping[str, object] = field(default_factory=dict)
    pictures: Sequence[Picture] = ()
    tables: Sequence[ResultTable] = ()
    examples: Sequence[Examples] = ()
    details: Mapping[str, str] = field(default_factory=dict)
    lead: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    first: Sequence[ResultTable] = ()
    reload_seconds: int = 0


def write_page(page: Page, path: Path) -> None:
    """Write a page atomically.

    Raises:
        RopewalkError: if an image cannot be read or is neither PNG nor SVG, or the page cannot be written.
    """
    pictures = [_embedded(each) for each in page.pictures]
    write_text(path, render("page.html.j2", page=page, pictures=pictures))


def render(template: str, **values: Any) -> str:
    """Fill in one of the templates of this package; all values are plain text, which is escaped."""
    # Autoescaping runs after ``finalize``, so no value reaches the page unescaped.
    environment = Environment(
        loader=PackageLoader("ropewalk.reporting"),
        autoescape=True,
        # A name that a template misspells is an error instead of an empty text.
        undefined=StrictUndefined,
        finalize=_finalize,
        keep_trailing_newline=True,
    )
    return environment.get_template(template).render(**values)


def _finalize(value: Any) -> Any:
    """Make invisible and direction-changing characters visible. Markup from the template itself is unchanged."""
    # Objects with __html__ are markup that the template itself has made.
    return value if hasattr(value, "__html__") else harmless(str(value))


def _embedded(picture: Picture) -> dict[str, str]:
    path = picture.path
    if path.suffix not in MEDIA_TYPES:
        raise RopewalkError(f"a page can embed .png and .svg figures, got {path.name}")
    try:
        content = base64.b64encode(picture.svg or path.read_bytes()).decode("ascii")
    except OSError as error:
        raise RopewalkError(f"cannot read the figure {path}: {error.strerror}") from error
    text = picture.text or path.stem.replace("_", " ").replace("-", " ")
    kind = ".svg" if picture.svg else path.suffix
    return {"media_type": MEDIA_TYPES[kind], "content": content, "text": text, "caption": picture.caption}
