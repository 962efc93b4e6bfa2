"""Settings of the data room: they survive JSON, are read as people write them, and contradictions are refused."""

import json
import re
from typing import Any

import pytest
from pydantic import ValidationError

from ropewalk.attention.layout import PATTERNS, POSITIONS
from ropewalk.data.settings import InterleaveSettings, PackingSettings, WorkSettings
from ropewalk.io.settings import choices_in
from tests.data.cases import refusal


def test_interleaving_a_row_whose_bos_is_no_anchor_is_refused() -> None:
    refused = refusal(PackingSettings, context=8, pattern="full", bos="row", interleave=True)
    assert "interleaving would move the BOS" in refused


@pytest.mark.parametrize(
    "tag",
    [
        "{name}: ",
        "{source",
        "{}",
        "",
        "{source.x}",
        "{0}",
        "{source:d}",
        "{source:{x}}",
        "{source!z}",
        "{source!r}",
    ],
)
def test_a_tag_that_is_no_template_is_refused(tag: str) -> None:
    assert refusal(PackingSettings, context=8, tag=tag).startswith("tag: the tag ")


def test_settings_survive_json() -> None:
    settings = PackingSettings(
        context=8,
        tag="{source}: ",
        interleave=InterleaveSettings(min_length=2, max_length=5, parts=(2,), cut_points=(0.1, 0.5), seed=7),
    )
    assert PackingSettings(**json.loads(json.dumps(settings.model_dump()))) == settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 1}, "context must be 2 or more, got 1"),
        ({"pattern": "causal"}, "unknown pattern 'causal'"),
        ({"positions": "fresh"}, "unknown positions 'fresh'"),
        ({"bos": "yes", "pattern": "full"}, "unknown bos 'yes'"),
        ({"long_documents": "cut"}, "unknown long_documents 'cut'"),
        ({"bos": "none"}, "set bos to auto or row, got none"),
        ({"bos": "document"}, "set bos to auto or row, got document"),
    ],
)
def test_contradictory_settings_are_refused(options: dict, message: str) -> None:
    assert message in refusal(PackingSettings, **{"context": 8, **options})


def test_choices_are_those_of_the_layout() -> None:
    fields = PackingSettings.model_fields
    assert choices_in(fields["pattern"].annotation) == [*PATTERNS]
    assert choices_in(fields["positions"].annotation) == [*POSITIONS]


@pytest.mark.parametrize("shard", [(0, 0), (2, 2), (-1, 2), (1, 1)])
def test_no_such_shard(shard: tuple[int, int]) -> None:
    assert refusal(WorkSettings, shard=shard).startswith("shard must be i/n with i from 0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "ray", "shard": "0/2"}, "engine ray divides the work among its nodes; omit shard"),
        ({"address": "auto"}, "address auto is that of a Ray cluster; set engine to ray"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        WorkSettings(**settings)
