"""Settings of a mixture: they are read as people write them, presets fill them in, and contradictions are refused."""

import math
import re
from typing import Any

import pytest
from pydantic import ValidationError

from ropewalk.data.mixture.settings import MixtureSettings
from tests.data.cases import refusal


@pytest.mark.parametrize(
    ("changed", "as_is"),
    [
        ({}, True),
        ({"seed": 3, "max_epochs": 2, "shortage": "cap"}, True),
        ({"shuffle": True}, False),
        ({"tokens": 5}, False),
        ({"weights": {}}, False),
        ({"shares": {"a": 1}}, False),
        ({"length_shares": [(0, 1)]}, False),
        ({"long_from": 5, "long_factor": 2}, False),
    ],
)
def test_as_is_means_that_nothing_is_asked_for(changed: dict[str, Any], as_is: bool) -> None:
    assert MixtureSettings(**changed).as_is is as_is


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": {"a": -1}}, r"^weights\.a must be 0 or more, got -1$"),
        ({"weights": {"a": 1e7}}, r"^weights\.a must be 1000000 or less, got 10000000\.0$"),
        ({"weights": {"a": math.nan}}, r"^weights\.a must be a finite number, got nan$"),
        ({"weights": {"a": True}}, r"^weights: 'a' must have a number, got True$"),
        ({"weights": "a=1,b"}, r"^weights must be name=number pairs separated by commas, got 'a=1,b'$"),
        ({"weights": "a=1,a=2"}, r"^weights: 'a' is given twice"),
        ({"shares": {"a": math.inf}}, r"^shares\.a must be a finite number, got inf$"),
        ({"shares": {"a": "x"}}, r"^shares\.a must be a number, got 'x'$"),
        ({"shares": {"a": 0}}, r"^shares must contain a share above 0"),
        ({"shares": {}}, r"^shares must contain a share above 0"),
        ({"weights": {"a": 1}, "shares": {"a": 1}}, r"weights or shares, not both"),
        ({"tokens": 0}, r"^tokens must be 1 or more, got 0$"),
        ({"tokens": 1.5}, r"^tokens must be a whole number, got 1\.5$"),
        ({"long_from": 0, "long_factor": 2}, r"^long_from must be 1 or more, got 0$"),
        ({"long_factor": 2}, r"got long_from None, long_factor 2"),
        ({"long_share": 0.5}, r"got long_from None, .* long_share 0\.5"),
        ({"long_from": 5}, r"long_from needs one of these"),
        ({"long_from": 5, "length_shares": ((0, 1),)}, r"long_from needs one of these"),
        ({"long_from": 5, "long_factor": 0}, r"^long_factor must be more than 0"),
        ({"long_from": 5, "long_factor": math.nan}, r"got nan"),
        ({"long_from": 5, "long_share": 0}, r"^long_share must be more than 0"),
        ({"long_from": 5, "long_share": 1.0}, r"^long_share must be less than 1"),
        ({"long_from": 5, "long_share": 1.1}, r"got 1\.1"),
        ({"long_from": 5, "long_share": 0.5, "long_factor": 2}, r"got long_factor and long_share"),
        ({"length_shares": ((0, 1),), "long_from": 5, "long_factor": 2}, r"and length_shares"),
        ({"length_shares": ()}, r"must start at length 0"),
        ({"length_shares": ((1, 1),)}, r"must start at length 0"),
        ({"length_shares": ((0, 1), (9, 1), (9, 1))}, r"increase, got first lengths \[0, 9, 9\]"),
        ({"length_shares": ((0, 1), (9, 1), (3, 1))}, r"increase, got first lengths \[0, 9, 3\]"),
        ({"length_shares": ((0, 0), (9, 0))}, r"must contain a share above 0"),
        ({"length_shares": ((0, -1), (9, 2))}, r"got -1"),
        ({"length_shares": ((0, 1, 2),)}, r"^length_shares\.0: .*at most 2"),
        ({"length_shares": "0=1,4x=2"}, r"^length_shares: '4x' is not a length"),
        ({"per": "document"}, r"unknown per 'document'; choose from source, corpus"),
        (
            {"per": "corpus", "weights": {"a": 1}},
            r"per corpus determines the sources' shares itself; remove weights",
        ),
        (
            {"per": "corpus", "shares": {"a": 1}},
            r"per corpus determines the sources' shares itself; remove shares",
        ),
        (
            {"per": "corpus"},
            r"per corpus needs long_factor, long_share or length_shares; add one of them or choose per source",
        ),
        (
            {"per": "corpus", "tokens": 5, "shuffle": True},
            r"per corpus needs long_factor, long_share or length_shares",
        ),
        ({"shortage": "pad"}, r"unknown shortage 'pad'"),
        ({"max_epochs": 0.5}, r"^max_epochs must be 1 or more, got 0\.5$"),
        ({"max_epochs": math.inf}, r"got inf"),
        ({"seed": -1}, r"^seed must be 0 or more, got -1$"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, Any], message: str) -> None:
    assert re.search(message, refusal(MixtureSettings, **values))


def test_settings_are_read_as_the_command_line_has_them() -> None:
    typed = MixtureSettings(shares="books=0.3, web=0.7", tokens="1M", length_shares="0=0.3,4k=0.3,32k=0.4")
    shares = ((0, 0.3), (4096, 0.3), (32768, 0.4))
    assert typed == MixtureSettings(shares={"books": 0.3, "web": 0.7}, tokens=2**20, length_shares=shares)


def test_a_preset_gives_the_settings_that_are_not_given() -> None:
    """34 % of the tokens from documents of 8k or more, without a fifth at either end of the gzip ratio."""
    own = {"long_from": 8192, "long_share": 0.34, "drop_gzip_low": 0.2, "drop_gzip_high": 0.2}
    preset = MixtureSettings(preset="olmo3")
    assert {name: getattr(preset, name) for name in own} == own
    # A resolved recipe has all of them, and gives the same mixture again.
    written = preset.model_dump(mode="json")
    assert {"preset": "olmo3", **own}.items() <= written.items()
    assert MixtureSettings.model_validate(written) == preset
    changed = MixtureSettings(preset="olmo3", long_from="4k", drop_gzip_high=0)
    assert (changed.long_from, changed.long_share, changed.drop_gzip_high) == (4096, 0.34, 0)
    with pytest.raises(ValidationError, match="give one of long_factor, long_share and length_shares"):
        MixtureSettings(preset="olmo3", long_factor=2)
    with pytest.raises(ValidationError, match="olmo3"):
        MixtureSettings.model_validate({"preset": "olmo4"})


def test_settings_of_later_versions_are_not_written_where_they_are_unset() -> None:
    later = {"preset", "drop_gzip_low", "drop_gzip_high"}
    assert MixtureSettings(shuffle=True).model_dump().keys().isdisjoint(later)
