"""Names of a package that are imported on first use, so that importing the package costs next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

from ropewalk.versions import needs


def on_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__`` (PEP 562), whose table is the package's own imports.

    The package names what it hands on once, where type checkers and editors read it::

        if TYPE_CHECKING:
            from shop.orders import Order as Order
        else:
            __getattr__, __dir__ = on_first_use(__name__)

    Args:
        package: the package's ``__name__``. Each ``from ... import name as name`` under its ``if TYPE_CHECKING``, where
            a repeated name says that it is public (PEP 484), is carried out when the name is asked for.
    """

    @cache
    def homes() -> dict[str, str]:
        with open(str(sys.modules[package].__file__), encoding="utf-8") as source:
            return _homes(source.read())

    def getattribute(name: str) -> Any:
        if name == "__all__":
            return sorted(homes())
        if name.startswith("__") or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(homes()[name]), name)
        except ModuleNotFoundError as error:
            if (sentence := needs(f"{package}.{name}", error)) is None:
                raise
            raise ModuleNotFoundError(sentence, name=error.name) from error
        # A package below that bears the name is bound to it by its import, and can be called as it (make_callable).
        return sys.modules.get(f"{package}.{name}", value)

    return getattribute, lambda: sorted({*vars(sys.modules[package]), *homes()})


def _homes(source: str) -> dict[str, str]:
    """Dotted module by each public name that it gives a package."""
    # Only whoever asks a package for a name pays for the parser.
    import ast

    return {
        alias.name: str(statement.module)
        for block in ast.parse(source).body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname == alias.name
    }


def make_callable(package: str, home: str) -> None:
    """Let a package be called as the function that bears its name: ``ropewalk.search(...)``.

    A package and a function beside it may share a name; whichever of the two an import binds can be called and has
    the package's attributes.

    Args:
        package: the package's ``__name__``; its last part is the function's name.
        home: ``__name__`` of the module that defines the function.
    """

    class Room(ModuleType):
        """A package that passes a call on to the function of its name."""

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            function = getattr(import_module(home), package.rsplit(".", 1)[-1])
            return function(*arguments, **named)

    # Python looks __call__ up on the type, so the class of the module is replaced.
    sys.modules[package].__class__ = Room
