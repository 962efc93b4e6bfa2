"""Reports of a corpus, as ``ropewalk data stats --json`` prints them."""

from typing import Any

import numpy as np

from ropewalk.data.statistics import length_statistics, statistics_report

EVIL = "ev[red]il\x1b[31m $x$"


def report(lengths: dict[str, list[int]], **changes: Any) -> dict[str, Any]:
    ids = [number for number, each in enumerate(lengths.values()) for _ in each]
    every = np.array([length for each in lengths.values() for length in each], np.int64)
    statistics = length_statistics(every, np.array(ids, np.int32), list(lengths), row_length=64)
    return {**statistics_report(statistics), **changes}


BEFORE = report({"web": [3, 5, 6, 20], "books": [100, 66]})
AFTER = report({"web": [5, 20, 20], "books": [100, 100, 66], EVIL: [1]})
