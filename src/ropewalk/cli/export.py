"""``ropewalk export``: a checkpoint with a factor table in its config, for programs that know nothing of ropewalk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.options import JsonFlag
from ropewalk.cli.output import print_json, results
from ropewalk.errors import RopewalkError
from ropewalk.io.settings import FilePath, Option

if TYPE_CHECKING:
    from ropewalk.cli.factor_table import FittedTable


def export(
    model: Annotated[str, Field(description="A checkpoint's folder, a Hub id, or embedded.")],
    *,
    rope: Annotated[
        FilePath, Option(metavar="FILE"), Field(description="A factor table, from ropewalk search.")
    ],
    out: Annotated[FilePath, Option(metavar="DIR"), Field(description="Where to write; a new folder.")],
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint with a factor table in its config, as longrope, and the weights as they are.

    The last lines say which other programs read it.
    """
    from ropewalk.cli.factor_table import fitted_table, other_checkpoint
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.evaluation.identity import model_digest
    from ropewalk.models.config_file import read_config_file
    from ropewalk.rope.config import notes_on

    if out.exists() or out.is_symlink():
        raise RopewalkError(f"{out} exists already; --out names a new folder")
    path = str(resolve_model(model))
    table = fitted_table(rope, path)
    if table.method.start_tokens:
        raise RopewalkError(
            f"{rope} has start tokens ({table.method.start_tokens}), for which a config has no field: search again "
            f"with --start-tokens 0, or run it here, as ropewalk eval {model} --rope {rope} does"
        )
    write_folder(path, table, out)
    digest = model_digest(path) if table.factors.model.digest else None
    told = [*other_checkpoint(table.record, digest), *notes_on(read_config_file(str(out)))]
    if as_json:
        print_json(described(model, table, out, told))
        return
    method = table.method
    for name, value in (
        ("model", str(out)),
        ("RoPE", f"longrope, {method.original_max_position_embeddings:,} to {table.context:,} tokens"),
        *(("note", each) for each in told),
        ("next", f"AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it in plain transformers"),
    ):
        results().say(f"{name:6} {value}")


def write_folder(path: str, table: FittedTable, out: Path) -> None:
    """Write weights and tokenizer of a checkpoint with another config beside them, whole or not at all."""
    from ropewalk.data import load_tokenizer
    from ropewalk.io.files import new_folder, remove_left_overs
    from ropewalk.io.lock import locked
    from ropewalk.models.load import load_model, save_model

    tokenizer = load_tokenizer(path)
    # A tokenizer that truncates at the old length would take the new context away again.
    tokenizer.model_max_length = max(tokenizer.model_max_length, table.context)
    loaded = load_model(path, rope=table.method, max_position_embeddings=table.context)
    with locked(out.parent, file=out.name):
        remove_left_overs(out.parent, out.name)
        with new_folder(out) as partial:
            save_model(loaded, partial, tokenizer)


def described(model: str, table: FittedTable, out: Path, told: list[str]) -> dict[str, Any]:
    """What was exported, as JSON values."""
    method = table.method
    return {
        "model": model,
        "out": str(out),
        "max_position_embeddings": table.context,
        "original_max_position_embeddings": method.original_max_position_embeddings,
        "attention_factor": method.attention_factor,
        "short_factor": list(method.short_factor),
        "long_factor": list(method.long_factor),
        "factors": table.record,
        "notes": told,
    }


app = make_command(
    export, "export", "ropewalk export meta-llama/Llama-3.1-8B --rope factors.json --out llama-512k"
)
