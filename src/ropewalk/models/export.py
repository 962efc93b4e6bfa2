"""A checkpoint with another RoPE in its config and its weights as they are, for programs that do not know ropewalk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.files import new_folder, remove_left_overs
from ropewalk.io.lock import locked
from ropewalk.io.results import Result
from ropewalk.models.config_file import read_model_config
from ropewalk.models.load import ModelSetup, left_out, load_model, read_config, save_model
from ropewalk.rope import RopeMethod
from ropewalk.rope.config import notes_on


@dataclass(frozen=True)
class ExportResult(Result):
    """A checkpoint as it was written.

    Attributes:
        model: what it was made of, as the user named it.
        out: its folder.
        max_position_embeddings: tokens that it states as its longest input.
        method: RoPE in its config.
        notes: which programs read it, and what else to know, a sentence each.
        factors: where the factors come from, if they come from a table.
    """

    model: str
    out: Path
    max_position_embeddings: int
    method: RopeMethod
    notes: tuple[str, ...]
    factors: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values; the method's parameters by their names in a config."""
        entry = self.method.to_entry()
        return {
            "model": self.model,
            "out": str(self.out),
            "max_position_embeddings": self.max_position_embeddings,
            **{key: value for key, value in entry.items() if key != "rope_theta"},
            "factors": None if self.factors is None else dict(self.factors),
            "notes": list(self.notes),
        }


def export(
    path: str | Path, method: RopeMethod, context: int, out: Path, tokenizer: Any, name: str | None = None
) -> ExportResult:
    """Write a folder with a checkpoint's weights and tokenizer and another RoPE in its config, whole or not at all.

    Args:
        path: the checkpoint's folder or hub id.
        method: RoPE that the config is to say, for all layers.
        context: tokens that it is to state as its longest input.
        out: a new folder.
        tokenizer: of the checkpoint; its own limit is raised to the context.
        name: of the checkpoint as the user gave it; ``path`` if None.

    Raises:
        RopewalkError: if there is something at ``out``, the model cannot be loaded, or its config cannot hold the
            method.
    """
    refuse_existing(out)
    # A tokenizer that truncates at the old length would take the new context away again.
    tokenizer.model_max_length = max(tokenizer.model_max_length, context)
    loaded = load_model(path, ModelSetup(method.as_written(), context))
    with locked(out.parent, file=out.name):
        remove_left_overs(out.parent, out.name)
        with new_folder(out) as partial:
            save_model(loaded, partial, tokenizer)
    lost = left_out(read_config(path))
    notes = (*notes_on(read_model_config(str(out)).values), *([] if lost is None else [lost]))
    return ExportResult(str(path) if name is None else name, out, context, method, notes)


def refuse_existing(out: Path) -> None:
    """Raise for a folder that is there already, before anything is loaded."""
    if out.exists() or out.is_symlink():
        raise RopewalkError(f"{out} exists already; --out names a new folder")
