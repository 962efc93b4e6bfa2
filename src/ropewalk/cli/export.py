"""``ropewalk export``: write a checkpoint with a factor table in its config, for programs without ropewalk."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.output import JsonFlag, print_json, results
from ropewalk.io.settings import FilePath, Option


def export(
    model: Annotated[
        str, Field(description="Checkpoint folder, Hub id, or embedded (the demo model in the package).")
    ],
    *,
    rope: Annotated[
        FilePath, Option(metavar="FILE"), Field(description="Factor table, for example from ropewalk search.")
    ],
    out: Annotated[FilePath, Option(metavar="DIR"), Field(description="New folder to write to.")],
    as_json: JsonFlag = False,
) -> None:
    """Write a checkpoint with a factor table in its config (as longrope) and unchanged weights.

    The last lines of the output say which other programs can read it.
    """
    from ropewalk.rope import LongRope
    from ropewalk.search.fitted_table import export as export_with_table

    found = export_with_table(model, rope, out)
    if as_json:
        print_json(found.to_json())
        return
    method = found.method
    assert isinstance(method, LongRope)
    original = method.original_max_position_embeddings
    for name, value in (
        ("model", str(out)),
        ("RoPE", f"longrope, {original:,} to {found.max_position_embeddings:,} tokens"),
        *(("note", each) for each in found.notes),
        ("next", f"AutoModelForCausalLM.from_pretrained({str(out)!r}) loads it in plain transformers"),
    ):
        results().say(f"{name:6} {value}")


app = make_command(
    export, "export", "ropewalk export meta-llama/Llama-3.1-8B --rope factors.json --out llama-512k"
)
