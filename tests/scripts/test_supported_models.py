"""The script that tries the families of transformers; the test of the pages compares its table."""

import pytest

from scripts import supported_models as script


@pytest.mark.slow  # two ranks start
def test_a_family_is_tried_again():
    found = script.tried(["llama"])
    assert {cell["status"] for cell in found["families"]["llama"].values()} == {"tested"}
    assert len(found["families"]) > 1
