"""What programs computed from configs with their own functions, as ``scripts/observe_readers.py`` recorded it."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ropewalk.compatibility.reader import Checkpoint, Methods, Reader
from ropewalk.compatibility.table import checkpoint_of

RECORD = Path(__file__).parent / "observed.json"
TOLERANCE = 8 * 2.0**-24
"""Eight rounding steps of float32, in which the programs compute: the power, the division and the factor take one
each; sine, cosine and arctangent of a recorded angle, and the record's nine digits, up to five more."""


@cache
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def checkpoint(name: str, **changes: Any) -> Checkpoint:
    """A recorded config, with these keys changed."""
    return checkpoint_of({**record()["configs"][name], **changes}, name)


def with_entry(name: str, **changes: Any) -> Checkpoint:
    """A recorded config in the newer spelling, with these keys of ``rope_parameters`` changed."""
    raw = record()["configs"][name]
    return checkpoint_of({**raw, "rope_parameters": {**raw["rope_parameters"], **changes}}, name)


def only(methods: Methods) -> Any:
    (method,) = methods.values()
    return method


def differing(reader: Reader, key: str) -> list[str]:
    """Names of recorded configs from which a reader computes something else than the program did."""
    observed = record()["observed"][key]
    assert len(observed) == len(record()["configs"]) > 100
    wrong = []
    for name, by_length in observed.items():
        read = checkpoint(name)
        method = only(reader.methods(read))
        if "served" in by_length and reader.served(read) != by_length["served"]:
            wrong.append(f"{name}: serves {reader.served(read)}, not {by_length['served']}")
        for length in (1024, 4096):
            expected = by_length[str(length)]
            inv_freq, attention_factor = method.frequencies(read.length if reader.fixed else length)
            theirs = torch.tensor(expected["inv_freq"], dtype=torch.float64)
            if not torch.allclose(inv_freq, theirs, rtol=TOLERANCE, atol=TOLERANCE):
                wrong.append(f"{name}: frequencies at {length}")
            if not math.isclose(attention_factor, expected["attention_factor"], rel_tol=TOLERANCE):
                wrong.append(f"{name}: attention factor at {length}")
    return wrong
