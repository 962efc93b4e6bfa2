"""Linear scaling: the frequencies are transformers' own, and those of positions divided by the factor."""

from hypothesis import given

from ropewalk.rope import Linear
from tests.rope.rope_cases import (
    FLOAT32_ORACLE,
    FLOAT64_ORACLE,
    assert_close,
    examples,
    linears,
    oracle,
    transformers_in_float64,
)


@examples
@given(linears)
def test_linear_equals_transformers(method: Linear) -> None:
    parameters = {"factor": method.factor}
    assert_close(method.frequencies().inv_freq, oracle(method, parameters)[0], FLOAT32_ORACLE)
    with transformers_in_float64():
        assert_close(method.frequencies().inv_freq, oracle(method, parameters)[0], FLOAT64_ORACLE)
