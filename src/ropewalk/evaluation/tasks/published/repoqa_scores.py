"""RepoQA's score: which of a repository's ten described functions an answer is most like, and how much.

Source: evalplus/repoqa at ae876de, ``compute_score.py``, ``metric.py`` and ``utility.py`` (Apache-2.0).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from ropewalk.evaluation.samples import NO_DETAILS

LEAST_SIMILARITY = 0.8
"""BLEU from which on a function counts as repeated."""
_BLOCK = re.compile(r"^```(?:\w+)?\s*\n(.*?)(?=^```)```", re.DOTALL | re.MULTILINE)


class Grammar(NamedTuple):
    """A language for tree-sitter: its package, the function there that returns it, and the nodes of functions."""

    package: str
    function: str
    nodes: str


GRAMMARS: Mapping[str, Grammar] = {
    "python": Grammar("tree_sitter_python", "language", "function_definition"),
    "cpp": Grammar("tree_sitter_cpp", "language", "function_definition"),
    "java": Grammar("tree_sitter_java", "language", "method_declaration"),
    "typescript": Grammar("tree_sitter_typescript", "language_typescript", "function_declaration"),
    "rust": Grammar("tree_sitter_rust", "language", "function_item"),
    "go": Grammar("tree_sitter_go", "language", "function_declaration"),
}


def missing_packages() -> str | None:
    """Return which packages the score needs and does not find, and how to install them, or None."""
    needed = ["nltk", "tree_sitter", *(grammar.package for grammar in GRAMMARS.values())]
    absent = [name.replace("_", "-") for name in needed if find_spec(name) is None]
    return f"it needs {', '.join(absent)}; run pip install ropewalk[repoqa]" if absent else None


def repoqa(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the answer is most like the right function, and at least as much as ``LEAST_SIMILARITY``, else 0."""
    name, likeness = most_alike(answer, details)
    return float(name == references[0] and likeness >= LEAST_SIMILARITY)


def most_like(answer: str, references: Sequence[str], details: Mapping[str, Any] = NO_DETAILS) -> float:
    """1 if the answer is most like the right function, however little, else 0 (RepoQA's threshold 0)."""
    return float(most_alike(answer, details)[0] == references[0])


def most_alike(answer: str, details: Mapping[str, Any]) -> tuple[str | None, float]:
    """The name of the function that an answer is most like, and its BLEU; None if it is like none.

    Args:
        answer: what a model says.
        details: those of the sample: ``language``, and ``functions``, pairs of name and code.
    """
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    said = re.split(r"\s+", first_function(answer, details["language"]).strip())
    smooth = SmoothingFunction().method4
    best: tuple[str | None, float] = None, 0.0
    for name, code in details["functions"]:
        likeness = sentence_bleu([re.split(r"\s+", code.strip())], said, smoothing_function=smooth)
        if likeness > best[1]:
            best = name, float(likeness)
    return best


def first_function(answer: str, language: str) -> str:
    """The first function of the answer's code blocks, else the first block, else the answer."""
    blocks = _BLOCK.findall(answer.strip())
    if not blocks:
        return answer.strip()
    grammar = GRAMMARS[language]
    for block in blocks:
        code = block.encode("utf-8", "surrogatepass")
        for node in _nodes(_parser(language).parse(code).root_node):
            if node.type == grammar.nodes and _is_named(node, language):
                return str(code[node.start_byte : node.end_byte].decode("utf-8", "replace"))
    return str(blocks[0])


def _is_named(node: Any, language: str) -> bool:
    if language != "cpp":
        name = node.child_by_field_name("name")
        return name is not None and bool(name.is_named)
    # Neither members of classes nor functions that return pointers, as published.
    declared = node.child_by_field_name("declarator")
    if declared is None or declared.type != "function_declarator":
        return False
    name = declared.child_by_field_name("declarator")
    return name is not None and name.type == "identifier"


def _nodes(root: Any) -> Iterator[Any]:
    """All nodes in the order of the text, each before those inside it."""
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.children)


@cache
def _parser(language: str) -> Any:
    from tree_sitter import Language, Parser

    grammar = GRAMMARS[language]
    return Parser(Language(getattr(import_module(grammar.package), grammar.function)()))
