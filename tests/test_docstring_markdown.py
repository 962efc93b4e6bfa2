"""scripts/docstring_markdown.py: what mkdocstrings reads of a docstring."""

import runpy

import pytest

from tests.places import ROOT


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("see :class:`Locality`", "see `Locality`"),
        ("see :func:`~ropewalk.parallel.joined`", "see `joined`"),
        ("see :func:`ropewalk.parallel.joined`", "see `ropewalk.parallel.joined`"),
        ("One.\n\nExample:\n    >>> 1", "One.\n\nExamples:\n    >>> 1"),
        ("For example: ``x``", "For example: ``x``"),
    ],
)
def test_a_docstring_is_markdown(docstring, markdown):
    pytest.importorskip("griffe", reason="comes with the extra docs")
    script = runpy.run_path(str(ROOT / "scripts" / "docstring_markdown.py"))
    assert script["as_markdown"](docstring) == markdown
