"""A small model, as transformers has it and attached, and its output head."""

from typing import Any

import pytest

from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.load import attach
from tests.evaluation.evaluation_cases import tiny_llama


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_llama()
    attach(model)
    return model


@pytest.fixture(scope="module")
def head(model: Any) -> OutputHead:
    return OutputHead.of(model)


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny_llama()
