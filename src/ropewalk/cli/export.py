"""``ropewalk export``: write a checkpoint of a run or with a factor table, correct a GGUF file, or publish a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ropewalk.cli.binding import UsageError, make_command
from ropewalk.cli.output import JsonFlag, notes, on_interrupt, print_json, results, show
from ropewalk.io.settings import COMMON, FACTOR_TABLE, MODEL_NAME, FilePath, Option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ropewalk.models.checkpoint.export import ExportResult
    from ropewalk.models.checkpoint.gguf import GgufResult
    from ropewalk.reporting.run.publish import PushResult, Repository
    from ropewalk.training.export_step import ExportedStep


def export(
    model: Annotated[
        str,
        Field(
            description=f"{MODEL_NAME}. With --push or --gguf, the folder of a finished run is accepted too. With "
            "--step, it must be the folder of a run."
        ),
    ],
    *,
    rope: Annotated[
        FilePath | None,
        Option(group=COMMON.group, metavar="FILE"),
        Field(
            description=f"{FACTOR_TABLE}. A copy of the model gets these factors; the weights stay the same. Needs "
            "--out."
        ),
    ] = None,
    gguf: Annotated[
        FilePath | None,
        Option(group=COMMON.group, metavar="FILE"),
        Field(
            description="GGUF file of the model, made by llama.cpp's converter. A copy of the file gets the RoPE data "
            "that the converter leaves out. Needs --out."
        ),
    ] = None,
    step: Annotated[
        int | None,
        Option(group=COMMON.group, metavar="N"),
        Field(
            ge=1,
            description="Write the run's checkpoint of this step as a model. The run may still be training. Needs "
            "--out.",
        ),
    ] = None,
    out: Annotated[
        FilePath | None,
        Option(group=COMMON.group, metavar="PATH"),
        Field(
            description="Folder to write the model to. With --gguf, the GGUF file to write. It must not exist yet."
        ),
    ] = None,
    push: Annotated[
        str | None,
        Option(group=COMMON.group, metavar="OWNER/NAME"),
        Field(
            description="Repository on the Hugging Face Hub to upload the model and its model card to. A new "
            "repository is private."
        ),
    ] = None,
    for_: Annotated[
        list[str] | None,
        Option(name="--for", metavar="PROGRAM", repeated=True),
        Field(
            description="Refuse the model if this program computes its RoPE wrongly: transformers, transformers-4, "
            "vllm, vllm-0.22, sglang, llama.cpp or mlx-lm. vllm-0.22 means vLLM 0.22 to 0.29. Prints two serve "
            "commands if the program needs one for short inputs and another for long ones. Needs --rope or --push."
        ),
    ] = None,
    stage: Annotated[
        int | None,
        Field(
            ge=1,
            description="Stage that --step belongs to, counted from 1. Required if several stages have a checkpoint of "
            "this step.",
        ),
    ] = None,
    public: Annotated[bool, Field(description="Make the uploaded model public. Needs --push.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Upload a model to the Hub, write a run's checkpoint as a model, put LongRoPE factors into a model, or add RoPE
    data to a GGUF file.

    Give one of --push, --step, --rope and --gguf, or --rope with --push.
    """
    from ropewalk.compatibility import readings
    from ropewalk.compatibility.table import require_known
    from ropewalk.reporting.compatibility import readers_parts

    if step is not None or stage is not None:
        if step is None:
            raise UsageError("--stage needs --step N")
        others = {
            "--rope": rope,
            "--gguf": gguf,
            "--push": push,
            "--for": for_ or None,
            "--public": public or None,
        }
        if beside := [name for name, value in others.items() if value is not None]:
            raise UsageError(
                f"--step and {beside[0]} cannot be combined; write the model with --step first, then run the command "
                f"again with {beside[0]}"
            )
        if out is None:
            raise UsageError("--step needs --out DIR")
        written = _written_step(model, step, out, stage)
        if as_json:
            print_json(written.to_json())
        else:
            _say(_about_step(written))
        return
    if rope is not None and gguf is not None:
        raise UsageError(
            "--rope and --gguf cannot be combined; write a checkpoint with --rope, convert the checkpoint to GGUF "
            "with llama.cpp, then correct the GGUF file with --gguf"
        )
    if out is None and (rope is not None or gguf is not None):
        raise UsageError("--rope needs --out DIR" if gguf is None else "--gguf needs --out FILE")
    if out is not None and rope is None and gguf is None:
        raise UsageError("--out needs either --rope FILE, --gguf FILE or --step N")
    if gguf is not None and push is not None:
        raise UsageError("--gguf and --push cannot be combined; --push uploads a checkpoint, not a GGUF file")
    if rope is None and push is None and gguf is None:
        raise UsageError(
            "nothing to export; give --push OWNER/NAME to publish a model, --step N --out DIR to write a checkpoint of "
            "a run, --rope FILE --out DIR to put LongRoPE factors into a model, or --gguf FILE --out FILE to correct a "
            "GGUF file"
        )
    if public and push is None:
        raise UsageError("--public needs --push OWNER/NAME")
    programs = for_ or []
    if programs and rope is None and push is None:
        raise UsageError(
            "--for and --gguf cannot be combined, because the GGUF file is for llama.cpp only; omit --for"
        )
    # Before anything is loaded or asked for.
    require_known(programs)
    if gguf is not None and out is not None:
        corrected = _corrected(model, gguf, out)
        if as_json:
            print_json(corrected.to_json())
        else:
            _say(_about_gguf(corrected))
        return
    with on_interrupt(
        lambda: "nothing is in the repository that was not there before; run the same command again"
    ):
        # Asked first, so that a missing right to write is found before a checkpoint is written.
        repository = None if push is None else _repository(push, public)
        exported = None if rope is None or out is None else _exported(model, rope, out, repository, programs)
        pushed = (
            None
            if repository is None
            # An exported checkpoint was compared when it was written.
            else _pushed(model if out is None else str(out), repository, programs if exported is None else [])
        )
    if as_json:
        values = (
            {}
            if exported is None
            else exported.to_json() | {"readers": [each.to_json() for each in readings(str(exported.out))]}
        )
        print_json(values | ({} if pushed is None else {"push": pushed.to_json()}))
        return
    if exported is not None:
        _say(_about(exported))
        show(readers_parts(readings(str(exported.out)), "RoPE of the checkpoint in other programs"))
    if pushed is not None:
        _say(_about_push(pushed))


def _corrected(model: str, source: Path, out: Path) -> GgufResult:
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.models.checkpoint.gguf import write_gguf
    from ropewalk.models.config.file import read_model_config
    from ropewalk.training.folder import MODEL, RECIPE

    run = Path(model).expanduser()
    folder = run / MODEL if (run / RECIPE).is_file() else resolve_model(model)
    return write_gguf(source, read_model_config(str(folder)), out)


def _written_step(run: str, step: int, out: Path, stage: int | None) -> ExportedStep:
    from ropewalk.training.export_step import export_step
    from ropewalk.training.folder import RECIPE

    folder = Path(run).expanduser()
    if not (folder / RECIPE).is_file():
        raise UsageError(f"--step needs the folder of a training run as MODEL, but {run} has no {RECIPE}")
    return export_step(folder, step, out, stage)


def _about_step(found: ExportedStep) -> list[tuple[str, str]]:
    return [
        ("model", str(found.out)),
        ("from", f"step {found.step} of stage {found.stage}, {found.tokens:,} tokens, {found.checkpoint}"),
        ("RoPE", f"{found.method}, {found.max_position_embeddings:,} tokens"),
        ("next", f"AutoModelForCausalLM.from_pretrained({str(found.out)!r}) loads it in plain transformers"),
    ]


def _about_gguf(found: GgufResult) -> list[tuple[str, str]]:
    return [
        ("file", str(found.out)),
        ("RoPE", f"{found.method}, architecture {found.architecture}"),
        *(
            ("change", each)
            for each in found.changes or ("none: llama.cpp reads the converter's file correctly",)
        ),
        *(("note", each) for each in found.notes),
        *(("next", f"{command} serves {inputs}") for inputs, command in found.launch.items()),
    ]


def _repository(name: str, public: bool) -> Repository:
    from ropewalk.reporting.run.publish import writable_repository

    return writable_repository(name, public)


def _exported(
    model: str, rope: Path, out: Path, repository: Repository | None, programs: Sequence[str]
) -> ExportResult:
    from ropewalk.reporting.run.model_card import write_export_card
    from ropewalk.search.fitted_table import export as export_with_table

    found = export_with_table(model, rope, out, programs)
    write_export_card(found, None if repository is None else repository.name)
    return found


def _pushed(model: str, repository: Repository, programs: Sequence[str]) -> PushResult:
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.compatibility import cautions, readings, refuse_wrong
    from ropewalk.io.lock import locked
    from ropewalk.reporting.run.model_card import write_model_card
    from ropewalk.reporting.run.publish import folder_to_push, push
    from ropewalk.training.folder import RECIPE

    folder, run = folder_to_push(model), Path(model).expanduser()
    told: list[str] = []
    if programs:
        found = readings(str(folder))
        refuse_wrong(found, programs)
        told = cautions(found, programs)
    # Locked, so that no run rewrites the model while it is uploaded.
    with locked(run, "push later"):
        if (run / RECIPE).is_file():
            # The card's commands name the repository.
            write_model_card(run, repository.name)
        pushed = push(folder, repository, ConsoleReporter(notes))
    return replace(pushed, notes=(*pushed.notes, *told))


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
