"""Which implementation of FlashAttention torch runs: 2, which it brings, or 3 or 4 where their packages are installed.

torch's operators for FlashAttention, those of ``varlen`` and of SDPA, run the implementation that is active.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from ropewalk.errors import EngineError

Flash = Literal["FA2", "FA3", "FA4"]
"""FlashAttention 2, 3 and 4, by torch's names."""

_PACKAGES: dict[Flash, str] = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}
_MAJORS: dict[Flash, tuple[int, ...]] = {"FA3": (9,), "FA4": (9, 10)}
"""Major compute capabilities of the GPUs that torch lets each implementation run on."""


def active_flash() -> Flash:
    """The implementation that is active."""
    return current_flash_attention_impl() or "FA2"  # type: ignore[return-value]


def installed_flash(major: int) -> list[Flash]:
    """Implementations whose packages are installed, and which support a GPU of this major compute capability."""
    return [
        "FA2",
        *(name for name, package in _PACKAGES.items() if major in _MAJORS[name] and _there(package)),
    ]


def describe_flash(major: int) -> str:
    """One sentence on the active implementation, and on others that ``engine: auto`` measures on such a GPU."""
    others = [f"FlashAttention {each[2:]}" for each in installed_flash(major) if each != active_flash()]
    also = f"; a run with engine: auto also measures {' and '.join(others)}" if others else ""
    return f"engine varlen is verified with FlashAttention {active_flash()[2:]}{also}"


def _there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        # Raised for a package within one that is not installed.
        return False


@contextmanager
def flash_activated(name: Flash) -> Iterator[None]:
    """Run an implementation within the block, and the one before after it.

    Raises:
        EngineError: if it is installed but cannot be imported.
    """
    before = active_flash()
    try:
        _activate(name)
        yield
    finally:
        _activate(before)


def _activate(name: Flash) -> None:
    if name == active_flash():
        return
    if name == "FA2":
        restore_flash_attention_impl()
        return
    try:
        activate_flash_attention_impl(name)
    # What its package raises where a part of it is missing or does not suit the driver.
    except (ImportError, RuntimeError, OSError) as error:
        raise EngineError(
            f"FlashAttention {name[2:]} is installed, but cannot be imported: {error}; reinstall it, or uninstall it"
        ) from error
