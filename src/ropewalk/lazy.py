"""Names of a package that are imported on first use, so that importing the package costs next to nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str], packages: Collection[str] = ()
) -> Callable[[str], Any]:
    """A module-level ``__getattr__`` (PEP 562).

    Args:
        package: the package's ``__name__``.
        homes: dotted module below the package by the name that it defines; ``module:name`` where it is called otherwise
            there.
        packages: of the package's own packages, those that are imported when they are asked for.
    """

    def getattribute(name: str) -> Any:
        if name in packages:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, _, own_name = homes[name].partition(":")
        return getattr(import_module(f"{package}.{home}"), own_name or name)

    return getattribute


def make_callable(package: str, home: str) -> None:
    """Let a package be called as the function that bears its name: ``ropewalk.search(...)``.

    A package and its main function may share a name; whichever of the two an import binds can be called and has the
    package's attributes.

    Args:
        package: the package's ``__name__``; its last part is the function's name.
        home: module below the package that defines the function.
    """

    class Room(ModuleType):
        """A package that passes a call on to its main function."""

        def __call__(self, *arguments: Any, **named: Any) -> Any:
            function = getattr(import_module(f"{package}.{home}"), package.rsplit(".", 1)[-1])
            return function(*arguments, **named)

    # Python looks __call__ up on the type, so the class of the module is replaced.
    sys.modules[package].__class__ = Room
