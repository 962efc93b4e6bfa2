"""A small model whose attention is peaked, rows for it and a runner that reaches far."""

import pytest

from ropewalk.audit import AuditedModel, Runner
from tests.audit.audit_cases import FAR, LENGTH, sharp_llama, token_rows


@pytest.fixture(scope="module")
def audited_model():
    return AuditedModel.of(sharp_llama())


@pytest.fixture(scope="module")
def rows():
    return token_rows(3, LENGTH)


@pytest.fixture(scope="module")
def runner(audited_model):
    return Runner(audited_model, FAR + LENGTH)
