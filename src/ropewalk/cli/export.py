"""``ropewalk export``: write a checkpoint with a factor table in its config, or publish a model on the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ropewalk.cli.binding import UsageError, make_command
from ropewalk.cli.output import JsonFlag, notes, on_interrupt, print_json, results
from ropewalk.io.settings import MODEL_NAME, FilePath, Option

if TYPE_CHECKING:
    from ropewalk.models.export import ExportResult
    from ropewalk.training.publish import PushResult, Repository


def export(
    model: Annotated[
        str,
        Field(
            description=f"{MODEL_NAME}; with --push and "
            "without --rope, the folder of a finished run or of an exported model."
        ),
    ],
    *,
    rope: Annotated[
        FilePath | None,
        Option(metavar="FILE"),
        Field(description="Factor table, for example from ropewalk search. Needs --out."),
    ] = None,
    out: Annotated[
        FilePath | None, Option(metavar="DIR"), Field(description="New folder to write to. Needs --rope.")
    ] = None,
    push: Annotated[
        str | None,
        Option(metavar="OWNER/NAME"),
        Field(
            description="Upload the model to this repository on the Hugging Face Hub, which is private if new."
        ),
    ] = None,
    public: Annotated[bool, Field(description="Let everybody see the uploaded model. Needs --push.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Publish a run's model on the Hub, or write a checkpoint with the factors that a search found.

    With --push, the model is uploaded with its model card. With --rope, a checkpoint is written with unchanged weights:
    ropewalk export meta-llama/Llama-3.1-8B --rope factors.json --out llama-512k
    """
    if (rope is None) != (out is None):
        given, missing = ("--rope", "--out DIR") if out is None else ("--out", "--rope FILE")
        raise UsageError(f"{given} needs {missing}")
    if rope is None and push is None:
        raise UsageError(
            "give --rope FILE and --out DIR to write a checkpoint, or --push OWNER/NAME to publish a model"
        )
    if public and push is None:
        raise UsageError("--public needs --push OWNER/NAME")
    with on_interrupt(
        lambda: "nothing is in the repository that was not there before; run the same command again"
    ):
        # Asked first, so that a missing right to write is found before a checkpoint is written.
        repository = None if push is None else _repository(push, public)
        exported = None if rope is None or out is None else _exported(model, rope, out, repository)
        pushed = None if repository is None else _pushed(model if out is None else str(out), repository)
    if as_json:
        values = {} if exported is None else exported.to_json()
        print_json(values | ({} if pushed is None else {"push": pushed.to_json()}))
        return
    if exported is not None:
        _say(_about(exported))
    if pushed is not None:
        _say(_about_push(pushed))


def _repository(name: str, public: bool) -> Repository:
    from ropewalk.training.publish import writable_repository

    return writable_repository(name, public)


def _exported(model: str, rope: Path, out: Path, repository: Repository | None) -> ExportResult:
    from ropewalk.reporting.run.model_card import write_export_card
    from ropewalk.search.fitted_table import export as export_with_table

    found = export_with_table(model, rope, out)
    write_export_card(found, None if repository is None else repository.name)
    return found


def _pushed(model: str, repository: Repository) -> PushResult:
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.io.lock import locked
    from ropewalk.reporting.run.model_card import write_model_card
    from ropewalk.training.publish import folder_to_push, push
    from ropewalk.training.run_folder import RECIPE

    folder, run = folder_to_push(model), Path(model).expanduser()
    # Locked, so that no run rewrites the model while it is uploaded.
    with locked(run, "push later"):
        if (run / RECIPE).is_file():
            # The card's commands name the repository.
            write_model_card(run, repository.name)
        return push(folder, repository, ConsoleReporter(notes))


def _about(found: ExportResult) -> list[tuple[str, str]]:
    from ropewalk.rope import LongRope

    # A factor table is always exported as longrope.
    method = found.method
    assert isinstance(method, LongRope)
    original = method.original_max_position_embeddings
    out = str(found.out)
    return [
        ("model", out),
        ("RoPE", f"longrope, {original:,} to {found.max_position_embeddings:,} tokens"),
        *(("note", each) for each in found.notes),
        ("next", f"AutoModelForCausalLM.from_pretrained({out!r}) loads it in plain transformers"),
    ]


def _about_push(found: PushResult) -> list[tuple[str, str]]:
    seen = "private" if found.private else "public"
    return [
        ("pushed", f"{len(found.files)} files, {found.bytes:,} bytes, from {found.folder}"),
        ("url", f"{found.url} ({seen})"),
        *(("note", each) for each in found.notes),
    ]


def _say(facts: list[tuple[str, str]]) -> None:
    for name, value in facts:
        results().say(f"{name:6} {value}")


app = make_command(export, "export", "ropewalk export runs/llama-128k --push your-name/llama-128k")
