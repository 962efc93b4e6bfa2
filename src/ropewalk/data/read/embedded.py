"""The embedded corpus and the embedded demo checkpoint: everything a first run needs, without a download.

The corpus is what every Python carries: the sources of its own standard library and its documentation
topics. It is real text in two domains with a long tail of long documents, and it differs a little from one
Python version to the next. The checkpoint is a one-million-parameter Llama of 256 tokens that
``scripts/train_demo_model.py`` trained on the training split.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

from ropewalk.data.read.documents import Document
from ropewalk.errors import RopewalkError

Split = Literal["train", "validation", "all"]

EMBEDDED = "embedded"
"""The word that names the demo checkpoint where a model is asked for."""

SOURCE_CODE = "python-source"
SOURCE_DOCS = "python-docs"

VALIDATION_PERCENT = 5

# Tests are as large as everything else together and full of tables and deliberately broken text; encodings
# is character tables; lib2to3 and distutils are gone from newer Pythons; pydoc_data is the other source;
# config-* is build output.
_SKIPPED_FOLDERS = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "distutils",
        "encodings",
        "idle_test",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


def embedded_documents(split: Split = "train") -> Iterator[Document]:
    """The standard library's source files, then its documentation topics, each as one document.

    Left out are test folders (as large as the rest together, and full of tables), ``encodings`` (character
    tables), packages that newer Pythons no longer have, files that this machine's build generated, and files
    that are empty or not UTF-8. A file or topic belongs to the validation split by the hash of its own name,
    about 5 % of the names, so it keeps its side in every Python version.

    Args:
        split: ``train``, ``validation``, or ``all`` for both.

    Yields:
        Documents with source ``python-source`` and origin ``stdlib/json/decoder.py``, in the order of their
        names, then source ``python-docs`` and origin ``pydoc_data/topics/lambda`` where this Python carries
        its documentation topics.

    Raises:
        RopewalkError: if the split is none of the three, or this Python has no standard library sources.
    """
    if split not in get_args(Split):
        raise RopewalkError(f"split is {split!r}; expected one of {', '.join(get_args(Split))}.")
    return (document for document in _all_documents() if split in ("all", embedded_split(document.origin)))


def embedded_split(origin: str) -> Literal["train", "validation"]:
    """The split that the name of an embedded document decides, whatever its text.

    Args:
        origin: the ``origin`` of an embedded document, e.g. ``stdlib/json/decoder.py``.

    Returns:
        ``validation`` for about 5 % of all names, else ``train``.
    """
    bucket = int.from_bytes(hashlib.sha256(origin.encode()).digest()[:8], "big") % 100
    return "validation" if bucket < VALIDATION_PERCENT else "train"


def demo_model_path() -> Path:
    """The folder of the embedded demo checkpoint, in the layout that ``save_pretrained`` writes.

    It loads with plain ``AutoModelForCausalLM`` and ``AutoTokenizer``, offline: a Llama of about one million
    parameters, trained at 256 tokens, meant to show and test length extension rather than to be any use as
    a language model.

    Raises:
        RopewalkError: if this installation lacks the folder.
    """
    path = Path(__file__).parents[1] / "demo_model"
    if not (path / "config.json").is_file():
        raise RopewalkError(
            "This installation has no demo checkpoint; the repository's scripts/train_demo_model.py makes it."
        )
    return path


def resolve_model(model: str) -> str:
    """A model as a user names it to what transformers loads: ``embedded`` is the demo checkpoint."""
    if model == EMBEDDED:
        return str(demo_model_path())
    return str(Path(model).expanduser()) if model.startswith("~") else model


def _all_documents() -> Iterator[Document]:
    yield from _source_documents(Path(sysconfig.get_paths()["stdlib"]))
    yield from _topic_documents()


def _source_documents(root: Path) -> Iterator[Document]:
    names = sorted(path.relative_to(root).as_posix() for path in _python_files(root))
    if not names:
        raise RopewalkError(
            "This Python has no standard library sources to read; give documents of your own, "
            "or use a Python that installs its library as .py files."
        )
    for name in names:
        try:
            text = (root / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield Document(text=text, source=SOURCE_CODE, origin=f"stdlib/{name}")


def _python_files(folder: Path) -> Iterator[Path]:
    for entry in folder.iterdir():
        if entry.name in _SKIPPED_FOLDERS or entry.name.startswith(_SKIPPED_PREFIXES):
            continue
        if entry.is_dir():
            yield from _python_files(entry)
        elif entry.suffix == ".py":
            yield entry


def _topic_documents() -> Iterator[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions package the documentation topics apart
        return
    for name, text in sorted(topics.items()):
        if text.strip():
            yield Document(text=text, source=SOURCE_DOCS, origin=f"pydoc_data/topics/{name}")
