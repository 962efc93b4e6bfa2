"""The search algorithms by name."""

from __future__ import annotations

from ropewalk.errors import RopewalkError
from ropewalk.search.algorithm import Algorithm
from ropewalk.search.covariance import covariance
from ropewalk.search.evolution import evolve
from ropewalk.search.settings import ALGORITHMS


def check_algorithm(name: str) -> None:
    """Raise for a name that :func:`algorithm_named` does not know."""
    if name not in ALGORITHMS:
        raise RopewalkError(f"unknown search algorithm {name!r}; choose one of {', '.join(ALGORITHMS)}")


def algorithm_named(name: str) -> Algorithm:
    """An algorithm with its published or measured settings."""
    check_algorithm(name)
    return covariance() if name == "cma-es" else evolve()
