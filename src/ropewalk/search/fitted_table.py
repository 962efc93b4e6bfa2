"""Apply a factor table to a checkpoint: the meaning of ``--rope FILE``, and export of a checkpoint with its factors."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropewalk.compatibility.table import cautions, checkpoint_of, readings_of, refuse_wrong
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import resolve_model
from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.models.checkpoint.export import ExportResult, refuse_existing
from ropewalk.models.checkpoint.export import export as export_checkpoint
from ropewalk.rope import LongRope
from ropewalk.search.factor_table import Factors, checkpoint, read_factors


@dataclass(frozen=True)
class FittedTable:
    """A factor table as it applies to one checkpoint.

    Attributes:
        factors: content of the table.
        sha256: SHA-256 of the file.
        method: RoPE method of the checkpoint with these factors.
        context: max_position_embeddings of the checkpoint with these factors.
    """

    factors: Factors
    sha256: str
    method: LongRope
    context: int

    @property
    def record(self) -> dict[str, Any]:
        """Identity of the factors in recorded results, as JSON values."""
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
    """A warning if the factors were found on other weights than the checkpoint's; empty if the same or unknown.

    Args:
        record: :attr:`FittedTable.record` of the table.
        digest: SHA-256 of the checkpoint from ``model_digest``; None if unknown.
    """
    found_on = record["found_on"]
    if digest is None or found_on["sha256"] in (None, digest):
        return []
    return [
        f"the factors were found on another checkpoint ({found_on['name']}) with the same frequencies; they may not be "
        "optimal for this one"
    ]


def fitted_table(file: Path, model: str) -> FittedTable:
    """Read a factor table and apply it to a checkpoint.

    Args:
        file: factor table.
        model: folder or Hub id of the checkpoint.

    Raises:
        RopewalkError: if either cannot be read, or the factors do not fit the checkpoint.
    """
    factors = read_factors(file)
    config = checkpoint(model)
    current = config.full_attention_rope
    trained = config.trained_length
    method = factors.method(current, trained)
    if factors.long_factor is None:
        # Short factors alone do not extend the context.
        context = trained
    elif factors.target_length > method.original_max_position_embeddings:
        context = factors.target_length
    else:
        raise RopewalkError(
            f"{file} has long factors for {factors.target_length} tokens, but {model} applies long factors only beyond "
            f"its original length of {method.original_max_position_embeddings} tokens; give factors for a longer target"
        )
    return FittedTable(factors, hashlib.sha256(file.read_bytes()).hexdigest(), method, context)


def export(model: str, rope: Path | str, out: Path | str, programs: Sequence[str] = ()) -> ExportResult:
    """Write a checkpoint with a factor table in its config, as longrope, and unchanged weights.

    Args:
        model: folder, Hub id, or ``embedded``.
        rope: factor table, for example from ``ropewalk search``.
        out: new folder to write to.
        programs: programs that must read the checkpoint right, by their keys in ``ropewalk.compatibility``. Where one
            needs a command for short inputs and another for long ones, the notes have both.

    Raises:
        RopewalkError: if ``out`` exists, the model or the table cannot be read, the factors do not fit the model,
            the table has start tokens, which a config cannot store, or one of the programs would read it wrongly.
    """
    rope, out = Path(rope), Path(out)
    # First, because reading a model and hashing its weights take long.
    refuse_existing(out)
    path = str(resolve_model(model))
    table = fitted_table(rope, path)
    if table.method.start_tokens:
        raise RopewalkError(
            f"{rope} has {table.method.start_tokens} start tokens, which config.json cannot store; search again with "
            f"--start-tokens 0, or evaluate without an export: ropewalk eval {model} --rope {rope}"
        )

    told: list[str] = []

    def check(stated: Mapping[str, Any]) -> None:
        found = readings_of(checkpoint_of(stated, model), str(out))
        refuse_wrong(found, programs)
        told.extend(cautions(found, programs))

    written = export_checkpoint(path, table.method, table.context, out, load_tokenizer(path), model, check)
    # Hashing the weights takes long for large models, so only where the table has a digest to compare with.
    digest = model_digest(path) if table.factors.model.digest else None
    notes = (*other_checkpoint(table.record, digest), *written.notes, *told)
    return replace(written, notes=notes, factors=table.record)
