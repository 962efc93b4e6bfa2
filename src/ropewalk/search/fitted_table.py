"""A checkpoint and a factor table for it: what ``--rope FILE`` means, and the checkpoint written with its factors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import resolve_model
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.store import model_digest
from ropewalk.models.export import ExportResult, refuse_existing
from ropewalk.models.export import export as export_checkpoint
from ropewalk.rope import LongRope
from ropewalk.search.factor_table import Factors, checkpoint, method_of, read_factors


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

    def notes(self, digest: str | None) -> list[str]:
        """See :func:`other_checkpoint`."""
        return other_checkpoint(self.record, digest)


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
        "optimal for this one"
    ]


def fitted_table(file: Path, model: str) -> FittedTable:
    """A factor table for a checkpoint.

    Args:
        file: the table.
        model: folder or hub id of the checkpoint.

    Raises:
        RopewalkError: if one of them cannot be read, or the factors are not for such a checkpoint.
    """
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
            f"{file} has long factors for {factors.target_length} tokens, but {model} does not need any up to its "
            f"original length of {method.original_max_position_embeddings}; give factors for a longer target"
        )
    return FittedTable(factors, hashlib.sha256(file.read_bytes()).hexdigest(), method, context)


def export(model: str, rope: Path | str, out: Path | str) -> ExportResult:
    """Write a checkpoint with a factor table in its config, as longrope, and the weights as they are.

    Args:
        model: folder, hub id, or ``embedded``.
        rope: a factor table, from ``ropewalk search``.
        out: a new folder.

    Raises:
        RopewalkError: if there is something at ``out``, one of them cannot be read, the factors are not for such a
            checkpoint, or a config has no field for them (start tokens).
    """
    rope, out = Path(rope), Path(out)
    refuse_existing(out)
    path = str(resolve_model(model))
    table = fitted_table(rope, path)
    if table.method.start_tokens:
        raise RopewalkError(
            f"{rope} has {table.method.start_tokens} start tokens, which config.json cannot store; search again with "
            f"--start-tokens 0, or evaluate with ropewalk eval {model} --rope {rope}"
        )
    written = export_checkpoint(path, table.method, table.context, out, load_tokenizer(path), model)
    digest = model_digest(path) if table.factors.model.digest else None
    notes = (*other_checkpoint(table.record, digest), *written.notes)
    return replace(written, notes=notes, factors=table.record)
