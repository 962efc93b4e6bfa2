"""What one comparison found: no number is within a budget, and the counts are those of the checks."""

import math

from ropewalk.verification import Check, Outcome


def test_no_number_is_within_a_budget():
    for error in (math.nan, math.inf, 1.1):
        assert Outcome.within(error, 1.0, "good", "bad") == Outcome(error, 1.0, False, "bad") or math.isnan(
            error
        )
        assert not Outcome.within(error, 1.0, "good", "bad").passed
    assert Outcome.within(1.0, 1.0, "good", "bad").passed
    assert Check(math.inf, 0.0, False, name="", compared="", seconds=0.0).to_json()["error"] is None
