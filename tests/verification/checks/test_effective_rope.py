"""RoPE as it is loaded: the precision casts parameters alone."""

from dataclasses import replace

from ropewalk.verification.checks.effective_rope import rope_as_loaded
from tests.verification.verification_cases import OTHER_FAULTS


def test_the_precision_casts_parameters_alone(case, monkeypatch):
    """ropewalk's own module has no buffer to round; that of transformers keeps its frequencies, as in a run."""
    stock = replace(case, setup=replace(case.setup, exact_rope=False), precision="bfloat16")
    assert rope_as_loaded(stock).passed
    assert rope_as_loaded(replace(case, precision="bfloat16")).passed
    OTHER_FAULTS["whole model cast"](monkeypatch)
    rounded = rope_as_loaded(stock)
    assert rounded.passed is False
    assert "inv_freq is rounded to bfloat16" in rounded.note
