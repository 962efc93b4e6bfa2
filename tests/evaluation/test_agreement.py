"""Agreement of judges, against scikit-learn's published example and by hand."""

import pytest

from ropewalk.evaluation.agreement import agreement


@pytest.mark.parametrize(
    ("pairs", "equal", "kappa"),
    [
        # Cohen's classic table of 50: 20 both yes, 15 both no, 5 and 10 apart; 0.70 observed, 0.50 by chance.
        ([(1.0, 1.0)] * 20 + [(1.0, 0.0)] * 5 + [(0.0, 1.0)] * 10 + [(0.0, 0.0)] * 15, 70, 0.4),
        ([(1.0, 1.0)] * 3, 100, 1),
        ([(1.0, 1.0), (0.0, 0.0)], 100, 1),
        ([(1.0, 0.0), (0.0, 1.0)], 0, -1),
        ([(1.0, 1.0), (1.0, 0.0)], 50, 0),
        # Grades between, and verdicts that both find unclear.
        ([(0.5, 0.5), (None, None), (1.0, 0.5), (0.0, 0.0)], 75, 2 / 3),
    ],
)
def test_agreement(pairs: list[tuple[float | None, float | None]], equal: float, kappa: float) -> None:
    found = agreement(pairs)
    assert found == {"n": len(pairs), "equal": equal, "kappa": pytest.approx(kappa)}
