"""What the tests of backends share."""

from pathlib import Path

import pytest

from tests.completion_server import (
    few_certificates,
)


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    few_certificates(monkeypatch, tmp_path)
