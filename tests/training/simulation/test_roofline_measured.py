"""Planned time and memory beside steps that were measured on a GPU."""

import pytest

from tests.training.simulation.measured_cases import MEASURED, planned


@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED)
def test_planned_time_and_memory_are_those_that_were_measured(aside, tmp_path, name):
    run, seconds, peak = MEASURED[name]
    found_seconds, found_peak = aside(planned, tmp_path, *run)
    print(f"{name}: time {found_seconds / seconds:.3f}, peak {found_peak / peak:.3f} of the measured")
    assert found_seconds == pytest.approx(seconds, rel=0.15)
    # Norms and attention with an anchor hold less since the steps were measured.
    assert 0.88 * peak < found_peak < 1.06 * peak
