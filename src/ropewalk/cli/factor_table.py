"""A checkpoint and a factor table for it: what ``--rope FILE`` of several commands means."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.rope import LongRope
    from ropewalk.search import Factors


@dataclass(frozen=True)
class FittedTable:
    """A factor table as it applies to one checkpoint.

    Attributes:
        factors: as the file holds them.
        sha256: of the file.
        method: that the checkpoint gets.
        context: tokens that it then states as its longest input.
    """

    factors: Factors
    sha256: str
    method: LongRope
    context: int

    @property
    def record(self) -> dict[str, Any]:
        """What results under these factors are known by, as JSON values."""
        return {
            "sha256": self.sha256,
            "found_on": {"name": self.factors.model.name, "sha256": self.factors.model.digest},
            "provenance": self.factors.provenance.model_dump(),
            "target_length": self.factors.target_length,
            "start_tokens": self.method.start_tokens,
            "attention_factor": self.method.attention_factor,
        }


def other_checkpoint(record: Mapping[str, Any], digest: str | None) -> list[str]:
    """That a table was found on other weights than it is used with, one sentence; nothing where that is not known.

    Args:
        record: of the table, as :class:`FittedTable` gives it.
        digest: sha256 of the checkpoint, as ``model_digest`` gives it.
    """
    found_on = record["found_on"]
    if digest is None or found_on["sha256"] in (None, digest):
        return []
    return [
        f"the factors were found on another checkpoint ({found_on['name']}) with the same frequencies; they may not be "
        "the best for this one"
    ]


def fitted_table(file: Path, model: str) -> FittedTable:
    """A factor table for a checkpoint.

    Args:
        file: the table.
        model: folder or hub id of the checkpoint.

    Raises:
        RopewalkError: if one of them cannot be read, or the factors are not for such a checkpoint.
    """
    from ropewalk.search import read_factors
    from ropewalk.search.imports import checkpoint, method_of

    factors = read_factors(file)
    config = checkpoint(model)
    current = method_of(config)
    trained = config.trained_length
    method = factors.method(current, trained)
    if factors.long_factor is None:
        # Short factors alone make nothing longer.
        context = trained
    elif factors.target_length > method.original_max_position_embeddings:
        context = factors.target_length
    else:
        raise RopewalkError(
            f"{file} has long factors for {factors.target_length} tokens, and {model} needs none up to its original "
            f"{method.original_max_position_embeddings}; give factors for a longer target"
        )
    return FittedTable(factors, hashlib.sha256(file.read_bytes()).hexdigest(), method, context)
