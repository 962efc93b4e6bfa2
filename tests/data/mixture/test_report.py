"""The mixture's report is explained in sentences that name what was asked for and what was drawn."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from ropewalk.data.mixture.mixture import Mixture, mix
from ropewalk.data.mixture.report import MixtureReport, explain
from ropewalk.data.settings import MixtureSettings

NAMES = ("arxiv", "wiki", "books")


def mixed(lengths: list[int], ids: list[int], settings: MixtureSettings) -> Mixture:
    return mix(np.array(lengths, np.int64), np.array(ids, np.int32), NAMES, settings)


def test_the_report_is_explained_in_sentences() -> None:
    lengths, ids = [100] * 40 + [1000] * 2 + [0] * 2 + [50], [0] * 44 + [1]
    report = mixed(lengths, ids, MixtureSettings(long_from=1000, long_factor=4)).report
    assert explain(report) == [
        "The mixture has 6,050 tokens where the corpus has 6,050; no other total was asked for.",
        "In random order, 25 documents are read, 23 different ones, of which 2 repeat, 2 times at most.",
        "Left out for want of a single token: 2 documents.",
        "Of all tokens, 66.12 % (asked 66.12 %, before 33.06 %) lie in documents of 1,000 tokens or more.",
        "Source 'arxiv' has 99.17 % (asked 99.17 %, before 99.17 %) of the tokens.",
        "Of source 'arxiv', 66.67 % (asked 66.67 %, before 33.33 %) lie in documents of 1,000 tokens or more.",
        "Source 'wiki' has 0.83 % (asked 0.83 %, before 0.83 %) of the tokens.",
        "Of source 'wiki', 0.00 % (asked 0.00 %, before 0.00 %) lie in documents of 1,000 tokens or more.",
        "Source 'books' has 0.00 % (asked 0.00 %, before 0.00 %) of the tokens.",
        "Source 'arxiv' has 40 documents of fewer than 1,000 tokens, read 0.5 times on average (asked 0.5), none "
        "more than 1 time.",
        "Source 'arxiv' has 2 documents of 1,000 tokens or more, read 2 times on average (asked 2), none more than "
        "2 times.",
    ]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"tokens": 60}, "The mixture has 60 tokens where 60 were asked for and the corpus has 100."),
        (
            {"weights": {"arxiv": 0.5}, "tokens": 40},
            "The mixture has 40 tokens where 40 were asked for and the corpus has 100.",
        ),
        (
            {"weights": {"arxiv": 0.5}},
            "The mixture has 80 tokens where 80 follow from the weights and the corpus has 100.",
        ),
        (
            {"shares": {"arxiv": 1, "wiki": 3, "books": 0}},
            "The mixture has 80 tokens where 80 follow from the shares and the corpus has 100.",
        ),
        (
            {"weights": {"arxiv": 6}, "shortage": "cap"},
            "The mixture has 220 tokens where 300 follow from the weights and the corpus has 100.",
        ),
        (
            {"shuffle": True},
            "The mixture has 100 tokens where the corpus has 100; no other total was asked for.",
        ),
    ],
)
def test_a_total_that_nobody_asked_for_is_not_said_to_be_asked(asked: dict[str, Any], sentence: str) -> None:
    report = mixed([10] * 10, [0] * 4 + [1] * 6, MixtureSettings(**asked)).report
    assert explain(report)[0] == sentence
    assert explain(MixtureReport.from_dict(json.loads(json.dumps(asdict(report))))) == explain(report)


def test_many_cells_are_explained_as_a_whole() -> None:
    lengths, ids = [10] * 10 + [30] * 10, [*range(5)] * 4
    settings = MixtureSettings(long_from=20, long_share=0.9, shortage="cap", max_epochs=1)
    few, many = (
        mix(np.array(lengths, np.int64), np.array(ids, np.int32) % count, [*"abcde"][:count], settings).report
        for count in (3, 4)
    )
    assert (len(few.cells), len(many.cells)) == (6, 8)
    assert [sentence.split(" tokens, and ")[1] for sentence in many.shortages[-2:]] == [
        "72 are asked for, so that each would be read 1.2 times on average where max_epochs is 1; they are read once, "
        "and about 12 tokens are missing."
    ] * 2
    assert [sentence[:8] for sentence in explain(few)].count("Source '") == 3 + 3 + 6
    assert explain(many) == [
        "The mixture has 350 tokens where the corpus has 400; no other total was asked for.",
        *many.shortages,
        "In random order, 15 documents are read, none of them twice.",
        "Of all tokens, 85.71 % (asked 90.00 %, before 75.00 %) lie in documents of 20 tokens or more.",
    ]
