"""``ropewalk eval``: measure a checkpoint with perplexity by position and passkey retrieval."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.output import JsonOption, notes, print_json, results
from ropewalk.cli.text import documents_of
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.evaluation import TaskResult

DTYPES = ("auto", "float32", "bfloat16", "float16")


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    example = "Example: ropewalk eval meta-llama/Llama-3.1-8B --lengths 8k,128k --text books/ --out results"
    app.command("eval", epilog=example)(evaluate_command)


def evaluate_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a Hub id, or embedded.")
    ],
    suite: Annotated[str, typer.Option(help="What to measure, with commas between.")] = "perplexity,passkey",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens, with commas between: 8192, 128k, 1M. The longest the config states if not given."
        ),
    ] = None,
    text: Annotated[
        str, typer.Option(help="Documents for perplexity: as for ropewalk data pack.")
    ] = "embedded:validation",
    samples: Annotated[int, typer.Option(help="Passkey prompts a length.")] = 20,
    rows: Annotated[int, typer.Option(help="Most rows of text a length, for perplexity.")] = 16,
    engine: Annotated[str, typer.Option(help="Attention engine.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"Dtype of the parameters: {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="auto takes cuda where there is one, else cpu.")] = "auto",
    exact_rope: Annotated[
        bool, typer.Option(help="Float64 angles and float32 rotation, or transformers' own RoPE.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the prompts and the bootstrap.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results.json, predictions.jsonl and figures.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a checkpoint: perplexity by position and passkey retrieval, with 95 % intervals."""
    from ropewalk.attention import resolve_engine
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.data import load_tokenizer
    from ropewalk.data.embedded import resolve_model
    from ropewalk.evaluation import check_suites, evaluate
    from ropewalk.integrations.models import choose_device, load_model
    from ropewalk.reporting import result_tables
    from ropewalk.versions import software_versions

    suites = _names(suite)
    check_suites(suites)
    if dtype not in DTYPES:
        raise RopewalkError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if out is not None and out.exists() and not out.is_dir():
        raise RopewalkError(f"{out} is a file; --out names a folder")
    path = resolve_model(model)
    tokens = _lengths(lengths, path)
    where = choose_device(device)
    tokenizer = load_tokenizer(path)
    documents = documents_of(text, tokenizer, max(tokens), rows) if "perplexity" in suites else None
    loaded = load_model(path, engine=engine, dtype=dtype, exact_rope=exact_rope, device=where)
    with ConsoleReporter(notes).bar("evaluation", None) as advance:
        found = evaluate(
            loaded,
            tokenizer,
            documents,
            tokens,
            suites,
            samples,
            seed,
            rows,
            progress=lambda what, done, total: advance(done, f"{what} {done}/{total}"),
        )
    record = {
        "model": model,
        "suites": suites,
        "lengths": tokens,
        "text": text if "perplexity" in suites else None,
        "seed": seed,
        "engine": resolve_engine(loaded.device, loaded.dtype) if engine == "auto" else engine,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "exact_rope": exact_rope,
        "results": [result.to_json() for result in found],
        "versions": software_versions(),
    }
    if out is not None:
        _write(out, record, found, "embedded" if model == "embedded" else Path(path).name)
    if as_json:
        print_json(record)
        return
    for number, table in enumerate(result_tables({model: found})):
        results().print(*([] if number == 0 else [""]), table.rich(), sep="\n")
    if out is not None:
        results().print(f"\n{out}", soft_wrap=True, markup=False)


def _names(text: str) -> list[str]:
    """The parts of a list with commas, each once, in order."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _lengths(text: str | None, path: str) -> list[int]:
    """The lengths asked for, or the one that the config states; the model's folder is checked either way."""
    from ropewalk.cli.inspect import read_config
    from ropewalk.lengths import parse_length

    config = read_config(path).values
    if text is not None:
        tokens = list(dict.fromkeys(parse_length(part) for part in _names(text)))
        if not tokens:
            raise RopewalkError(f"--lengths {text!r} names no length; write tokens as 8192, 128k or 1M")
        return tokens
    stated = config.get("max_position_embeddings")
    if stated is None:
        raise RopewalkError(f"the config of {path} states no max_position_embeddings; give --lengths")
    return [int(stated)]


def _write(out: Path, record: dict[str, Any], found: Sequence[TaskResult], name: str) -> None:
    """The files of a result, each complete or not there; figures where there is something to draw."""
    from ropewalk.files import write_json, write_text
    from ropewalk.reporting import passkey_figure, perplexity_figure

    predictions = (prediction for result in found for prediction in result.predictions)
    write_text(out / "predictions.jsonl", "".join(json.dumps(each) + "\n" for each in predictions))
    curves = [r for r in found if any(math.isfinite(each.perplexity) for each in r.positions)]
    if curves:
        longest = max(curves, key=lambda result: result.length)
        trained = longest.details["max_position_embeddings"]
        title = f"{name}: perplexity by position"
        perplexity_figure({name: longest}, out / "perplexity.png", trained, title)
    retrieval = [result for result in found if result.suite == "passkey"]
    if retrieval:
        passkey_figure({name: retrieval}, out / "passkey.png", f"{name}: passkey retrieval")
    # Last, so that where it stands the others do.
    write_json(out / "results.json", record)
