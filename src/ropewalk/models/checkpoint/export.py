"""Write a checkpoint with another RoPE in its config and unchanged weights, for programs without ropewalk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.files import new_folder, remove_left_overs
from ropewalk.io.lock import locked
from ropewalk.io.results import Result
from ropewalk.models.checkpoint.save import save_model
from ropewalk.models.config.auto_class import encoders_note
from ropewalk.models.config.layers import BASES_OF_LAYERS
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import with_rope, written_config
from ropewalk.models.load import ModelSetup, load_model
from ropewalk.rope import RopeMethod


@dataclass(frozen=True)
class ExportResult(Result):
    """A checkpoint that was written.

    Attributes:
        model: the source model, as the user named it.
        out: folder of the new checkpoint.
        max_position_embeddings: longest input in tokens that the config states.
        method: RoPE method in the config.
        notes: facts to know, in one sentence each.
        factors: source of the factors, if they come from a table.
    """

    model: str
    out: Path
    max_position_embeddings: int
    method: RopeMethod
    notes: tuple[str, ...]
    factors: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """JSON values, with the method's parameters under their names in a config."""
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
    path: str | Path,
    method: RopeMethod,
    context: int,
    out: Path,
    tokenizer: Any,
    name: str | None = None,
    check: Callable[[Mapping[str, Any]], None] | None = None,
) -> ExportResult:
    """Write a checkpoint's weights and tokenizer with another RoPE in its config, completely or not at all.

    Args:
        path: folder or hub id of the checkpoint.
        method: RoPE method for the config, for all layers.
        context: longest input in tokens that the config will state.
        out: a new folder.
        tokenizer: tokenizer of the checkpoint; its length limit is raised to the context.
        name: name of the checkpoint as the user gave it; None for ``path``.
        check: called with the contents of the new ``config.json`` before weights are loaded; it raises to refuse them.

    Raises:
        RopewalkError: if ``out`` exists, the model cannot be loaded, or its config cannot express the method.
    """
    refuse_existing(out)
    # A tokenizer that truncates at the old length would undo the extension.
    tokenizer.model_max_length = max(tokenizer.model_max_length, context)
    if check is not None:
        check(written_config(with_rope(read_config(path), method.as_written(), context).source))
    # Granite with windows has a rotary module for each base, which ours cannot replace.
    exact = not read_config(path).values.get(BASES_OF_LAYERS)
    # as_written refuses a method that no config can express, before anything is loaded or written.
    loaded = load_model(path, ModelSetup(method.as_written(), context, exact_rope=exact))
    with locked(out.parent, file=out.name):
        remove_left_overs(out.parent, out.name)
        with new_folder(out) as partial:
            save_model(loaded, partial, tokenizer)
    beside = encoders_note(read_config(path).source)
    notes = () if beside is None else (beside,)
    return ExportResult(str(path) if name is None else name, out, context, method, notes)


def refuse_existing(out: Path) -> None:
    """Raise for an existing folder, before anything is loaded."""
    if out.exists() or out.is_symlink():
        raise RopewalkError(f"{out} already exists; give a new folder with --out")
