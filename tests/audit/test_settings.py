"""The audit's settings: what means nothing is refused, and the second shift is never the far one."""

import pytest

from ropewalk.audit import AuditSettings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"shifts": ()}, "at least one shift"),
        ({"shifts": (0, 0)}, "only once"),
        ({"shifts": (16,)}, r"--shifts 16 leaves nothing .* such as --shifts 0,16"),
        ({"shifts": (0,), "delta2": 0}, "--shifts 0 leaves nothing .* such as --shifts 16,0"),
        ({"delta2": -1}, "got -1"),
        ({"dtypes": ("float64",)}, "'float64'"),
        ({"dtypes": ()}, "got none"),
        ({"dtypes": ("bfloat16", "bfloat16")}, "give each dtype only once"),
        ({"ablation_samples": 0}, "greater than or equal to 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(values, said):
    with pytest.raises(ValueError, match=said):
        AuditSettings(**values)


def test_the_far_shift_is_never_delta2():
    assert AuditSettings(shifts=(0, 16)).far == 0
    assert AuditSettings(shifts=(0, 16, 1000)).far == 1000
    assert AuditSettings(shifts=(0, 5), delta2=1000).far == 5
