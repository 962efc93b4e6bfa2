"""Agreement of judges, against scikit-learn's published example and by hand."""

import pytest

from ropewalk.evaluation.agreement import agreement


@pytest.mark.parametrize(
    ("pairs", "equal", "kappa"),
    [
        # Cohen's classic table of 50: 20 both yes, 15 both no, 5 and 10 apart; 0.70 observed, 0.50 by chance.
        ([("y", "y")] * 20 + [("y", "n")] * 5 + [("n", "y")] * 10 + [("n", "n")] * 15, 70, 0.4),
        ([("y", "y")] * 3, 100, 1),
        ([("y", "y"), ("n", "n")], 100, 1),
        ([("y", "n"), ("n", "y")], 0, -1),
        ([("y", "y"), ("y", "n")], 50, 0),
    ],
)
def test_agreement(pairs: list[tuple[str, str]], equal: float, kappa: float) -> None:
    found = agreement(pairs)
    assert found == {"n": len(pairs), "equal": equal, "kappa": pytest.approx(kappa)}
