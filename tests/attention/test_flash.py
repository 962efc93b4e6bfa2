"""FlashAttention 3 and 4 are run where they are installed, and 2 again afterwards."""

import importlib.machinery
import sys
import types

import pytest
from torch.nn.attention import (
    _registry,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from ropewalk import EngineError
from ropewalk.attention.flash import _MAJORS, active_flash, describe_flash, flash_activated, installed_flash


class Handle:
    def __init__(self, removed, name):
        self.removed, self.name = removed, name

    def remove(self):
        self.removed.append(self.name)


@pytest.fixture
def removed():
    """torch's own registrations give way to ones that only say when they are removed."""
    before = dict(_registry._FLASH_ATTENTION_IMPLS)
    names = []
    for name in ("FA3", "FA4"):
        register_flash_attention_impl(name, register_fn=lambda name=name: Handle(names, name))
    yield names
    _registry._FLASH_ATTENTION_IMPLS.clear()
    _registry._FLASH_ATTENTION_IMPLS.update(before)


def test_torch_has_the_implementations_by_these_names():
    assert set(list_flash_attention_impls()) >= set(_MAJORS)


def test_an_implementation_runs_within_its_block(removed):
    assert active_flash() == "FA2"
    with flash_activated("FA4"):
        assert current_flash_attention_impl() == active_flash() == "FA4"
        with flash_activated("FA2"):
            assert current_flash_attention_impl() is None
            assert removed == ["FA4"]
        assert active_flash() == "FA4"
    assert active_flash() == "FA2"
    assert removed == ["FA4", "FA4"]


def test_what_the_user_has_activated_is_active_again(removed, monkeypatch):
    activate_flash_attention_impl("FA3")
    try:
        with pytest.raises(InterruptedError), flash_activated("FA4"):
            raise InterruptedError
        assert active_flash() == "FA3"
        monkeypatch.setattr(
            _registry, "_FLASH_ATTENTION_IMPLS", {**_registry._FLASH_ATTENTION_IMPLS, "FA4": broken}
        )
        with pytest.raises(
            EngineError, match="FlashAttention 4 is installed, but cannot be imported: no driver"
        ):
            flash_activated("FA4").__enter__()
        assert active_flash() == "FA3"
    finally:
        restore_flash_attention_impl()


def broken():
    raise OSError("no driver")


def test_without_its_package_an_implementation_is_refused_by_name():
    with pytest.raises(EngineError, match="FlashAttention 4 is installed, but cannot be imported: No module"):
        flash_activated("FA4").__enter__()
    assert active_flash() == "FA2"


def test_only_installed_ones_that_suit_the_gpu_are_candidates(monkeypatch):
    assert installed_flash(9) == ["FA2"]
    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
    assert describe_flash(10) == (
        "engine varlen is verified with FlashAttention 2; a run with engine: auto also measures FlashAttention 4"
    )
    assert describe_flash(8) == "engine varlen is verified with FlashAttention 2"
    assert [installed_flash(major) for major in (8, 9, 10, 12)] == [
        ["FA2"],
        ["FA2", "FA3", "FA4"],
        ["FA2", "FA4"],
        ["FA2"],
    ]
