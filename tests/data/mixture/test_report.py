"""The mixture's report is explained in sentences that name what was asked for and what was drawn."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from ropewalk.data.mixture.mixture import Mixture, mix
from ropewalk.data.mixture.report import MixtureReport, explain
from ropewalk.data.mixture.settings import MixtureSettings

NAMES = ("arxiv", "wiki", "books")


def mixed(lengths: list[int], ids: list[int], settings: MixtureSettings) -> Mixture:
    return mix(np.array(lengths, np.int64), np.array(ids, np.int32), NAMES, settings)


def test_the_report_is_explained_in_sentences() -> None:
    lengths, ids = [100] * 40 + [1000] * 2 + [0] * 2 + [50], [0] * 44 + [1]
    report = mixed(lengths, ids, MixtureSettings(long_from=1000, long_factor=4)).report
    assert explain(report) == [
        "The mixture has 6,050 tokens; the corpus has 6,050, and no other total was requested.",
        "In random order, 25 documents are read: 23 distinct documents, of which 2 are repeated, at most 2 times.",
        "Left out because they have no tokens: 2 documents.",
        "Of all tokens, 66.12 % (requested 66.12 %, before 33.06 %) lie in documents of 1,000 tokens or more.",
        "Source 'arxiv' has 99.17 % (requested 99.17 %, before 99.17 %) of the tokens.",
        "Of source 'arxiv', 66.67 % (requested 66.67 %, before 33.33 %) lie in documents of 1,000 tokens or more.",
        "Source 'wiki' has 0.83 % (requested 0.83 %, before 0.83 %) of the tokens.",
        "Of source 'wiki', 0.00 % (requested 0.00 %, before 0.00 %) lie in documents of 1,000 tokens or more.",
        "Source 'books' has 0.00 % (requested 0.00 %, before 0.00 %) of the tokens.",
        "Source 'arxiv' has 40 documents of fewer than 1,000 tokens, read 0.5 times on average (requested 0.5), at "
        "most 1 time each.",
        "Source 'arxiv' has 2 documents of 1,000 tokens or more, read 2 times on average (requested 2), at most "
        "2 times each.",
    ]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"tokens": 60}, "The mixture has 60 tokens; 60 were requested, and the corpus has 100."),
        (
            {"weights": {"arxiv": 0.5}, "tokens": 40},
            "The mixture has 40 tokens; 40 were requested, and the corpus has 100.",
        ),
        (
            {"weights": {"arxiv": 0.5}},
            "The mixture has 80 tokens; 80 follow from the weights, and the corpus has 100.",
        ),
        (
            {"shares": {"arxiv": 1, "wiki": 3, "books": 0}},
            "The mixture has 80 tokens; 80 follow from the shares, and the corpus has 100.",
        ),
        (
            {"weights": {"arxiv": 6}, "shortage": "cap"},
            "The mixture has 220 tokens; 300 follow from the weights, and the corpus has 100.",
        ),
        (
            {"shuffle": True},
            "The mixture has 100 tokens; the corpus has 100, and no other total was requested.",
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
    assert [sentence.split(", but ")[1] for sentence in many.shortages[-2:]] == [
        "the mixture requests 72 tokens: 1.2 epochs on average, more than max_epochs 1; the documents "
        "are read once, and about 12 tokens are missing."
    ] * 2
    assert [sentence[:8] for sentence in explain(few)].count("Source '") == 3 + 3 + 6
    assert explain(many) == [
        "The mixture has 350 tokens; the corpus has 400, and no other total was requested.",
        *many.shortages,
        "In random order, 15 documents are read, none of them twice.",
        "Of all tokens, 85.71 % (requested 90.00 %, before 75.00 %) lie in documents of 20 tokens or more.",
    ]
