"""A loop over chunks takes by a few of them what it takes whole."""

import pytest

from tests.marks import slow_after
from tests.training.simulation.recurrent import loop_cases as cases
from tests.training.simulation.recurrent.loop_cases import CHUNK

CALLS = [
    ("weighted", 17 * CHUNK - 10, False),
    ("weighted", 13 * CHUNK, True),
    ("delta", 13 * CHUNK - 10, True),
    ("delta", 13 * CHUNK - 10, False),
]


@pytest.mark.parametrize(("rule", "tokens", "checkpointed"), slow_after(3, CALLS))
def test_memory_operations_and_bytes_are_those_of_the_whole_loop(aside, rule, tokens, checkpointed):
    """Also bytes moved, which grow with the square of the chunks where gradients of slices are added up."""
    whole, few = aside(cases.both, tokens, rule, checkpointed)
    assert few == whole
