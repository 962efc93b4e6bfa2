"""For the site's Python API: docstrings as the Markdown that mkdocstrings reads, which loads this (zensical.toml).

Roles (``:class:`~a.b.C```) become the name as code, and an ``Example:`` the section that griffe knows as ``Examples:``.
"""

from __future__ import annotations

import re

from griffe import Extension, Object

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):`(~?)([^`]+)`")


EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


def as_markdown(docstring: str) -> str:
    """The text with each role as code, of a dotted name after ``~`` the last part alone."""
    text = ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", docstring)
    return EXAMPLE.sub("Examples:", text)


class DocstringMarkdown(Extension):
    """Rewrites each docstring as it is collected."""

    def on_instance(self, *, obj: Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)
