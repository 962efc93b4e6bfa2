"""``ropewalk audit``: how far arithmetic breaks a checkpoint's relative positions, where, and what mitigates it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ropewalk.cli.output import JsonOption, notes, print_json, results
from ropewalk.cli.text import rows_of
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.audit import Audit

LONGEST_DEFAULT = 4096
"""Tokens of a row where the option is not given and the model is trained for as many."""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    example = (
        "Example: ropewalk audit meta-llama/Llama-3.2-1B --text books/ --shifts 0,16,1k,128k,1M --plot audit"
    )
    app.command("audit", epilog=example)(audit_command)


def audit_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a Hub id, or embedded.")
    ],
    text: Annotated[str, typer.Option(help="Documents: as for ropewalk data pack.")] = "embedded:validation",
    length: Annotated[
        str | None,
        typer.Option(help=f"Tokens of a row; {LONGEST_DEFAULT}, or the trained length if that is shorter."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Most rows of text.", min=1)] = 50,
    shifts: Annotated[
        str, typer.Option(help="Positions of the first token to compare, with commas between; 1k is 1,024.")
    ] = "0,16,100,1000,10000,100000,1000000",
    delta2: Annotated[str, typer.Option(help="The position that they are compared with.")] = "16",
    dtypes: Annotated[
        str,
        typer.Option(
            help="Dtypes with commas between; ablation, mitigations and first token are the first one's."
        ),
    ] = "bfloat16,float16,float32",
    ablation_samples: Annotated[
        int, typer.Option(help="Most rows of what runs in float64, and of the random control.", min=1)
    ] = 4,
    random_control: Annotated[bool, typer.Option(help="Measure a randomly initialised control too.")] = True,
    costs: Annotated[bool, typer.Option(help="Measure time and memory of the mitigations.")] = True,
    device: Annotated[str, typer.Option(help="auto takes cuda where there is one, else cpu.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the random control.", min=0)] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="DIR", help="Draw the pictures into DIR.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure how far arithmetic breaks relative positions in a model, which step does it, and what mitigates it."""
    from ropewalk.audit import AuditSettings, audit, finding, forward_passes, rope_findings
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.data import load_tokenizer
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.io.lengths import parse_length
    from ropewalk.models.config import ModelConfig
    from ropewalk.models.load import choose_device, load_model, read_config
    from ropewalk.versions import software_versions

    settings = AuditSettings(
        dtypes=tuple(_parts(dtypes)),
        shifts=tuple(_shift(part, "--shifts") for part in _parts(shifts)),
        delta2=_shift(delta2, "--delta2"),
        ablation_samples=ablation_samples,
        random_control=random_control,
        costs=costs,
        seed=seed,
    )
    _check_folder(plot)
    path = resolve_model(model)
    trained = ModelConfig.of(read_config(path)).trained_length
    tokens = min(LONGEST_DEFAULT, trained) if length is None else parse_length(length)
    where = choose_device(device)
    rows = rows_of(text, load_tokenizer(path), tokens, samples)
    reporter = ConsoleReporter(notes)
    if length is None and tokens < LONGEST_DEFAULT:
        reporter.note(f"rows of {tokens:,} tokens, what the model is trained for")
    if tokens > trained:
        reporter.note(
            f"rows of {tokens:,} tokens are longer than the {trained:,} that the model is trained for"
        )
    if len(rows) < samples:
        reporter.note(
            f"the text fills {len(rows)} rows of {tokens:,} tokens, fewer than the {samples} asked for"
        )
    loaded = load_model(path, exact_rope=False, device=where)
    with reporter.bar("audit", forward_passes(settings, len(rows))) as advance:
        found = audit(
            loaded,
            [row.input_ids for row in rows],
            settings,
            [row.layout for row in rows],
            lambda done, _, label: advance(done, label),
        )
    said, warnings = finding(found), rope_findings(found.rope)
    if as_json:
        print_json(
            {
                "model": model,
                "text": text,
                "trained_length": trained,
                "checkpoint_dtype": str(loaded.dtype).removeprefix("torch."),
                "device": str(loaded.device),
                "seed": seed,
                "finding": list(said),
                "rope_findings": list(warnings),
                **asdict(found),
                "versions": software_versions(),
            }
        )
    else:
        _print(found, said, warnings)
    # After the result: a picture that cannot be written must not take it away.
    if plot is not None:
        from ropewalk.cli.audit_pictures import draw

        files, left_out = draw(found, plot, "embedded" if model == "embedded" else Path(path).name)
        for sentence in left_out:
            reporter.note(sentence)
        if not as_json:
            results().print()
            for file in files:
                results().say(f"picture {file}")


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _shift(text: str, option: str) -> int:
    from ropewalk.io.lengths import parse_length

    try:
        return 0 if text.strip() == "0" else parse_length(text)
    except RopewalkError as error:
        raise RopewalkError(f"{option}: {error}") from error


def _check_folder(plot: Path | None) -> None:
    """Make the folder for the pictures, or refuse before the work."""
    if plot is None:
        return
    if plot.exists() and not plot.is_dir():
        raise RopewalkError(f"{plot} is a file; --plot names a folder")
    try:
        plot.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RopewalkError(f"cannot make the folder {plot} for --plot: {error.strerror}") from error


def _print(found: Audit, said: tuple[str, ...], warnings: tuple[str, ...]) -> None:
    from ropewalk.cli.audit_tables import tables
    from ropewalk.cli.output import print_whole

    for sentence in said:
        results().say(sentence)
    for table in tables(found):
        results().print()
        print_whole(table.rich())
    for sentence in warnings:
        results().say(sentence)
