"""One search from the command line: read, load, search, write, print; with torchrun by all processes together."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.cli.output import notes
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    import torch

    from ropewalk.cli.search import SearchOutput
    from ropewalk.cli.search_text import SearchText
    from ropewalk.parallel import World
    from ropewalk.search.algorithm import Job
    from ropewalk.search.factors import Factors, FactorsModel
    from ropewalk.search.goal import Goal
    from ropewalk.search.run import Found
    from ropewalk.search.settings import SearchSettings

LOG_FORMAT = "ropewalk-search/1"


@dataclass(frozen=True)
class Request:
    """What the command asks for.

    Attributes:
        model: checkpoint to search on.
        target_length: tokens to search for.
        text: documents to measure on.
        settings: how to search.
        output: where the result goes.
    """

    model: str
    target_length: int
    text: str
    settings: SearchSettings
    output: SearchOutput

    @property
    def log(self) -> Path:
        """Where losses are kept, line by line."""
        return log_file(self.output.out)


def log_file(out: Path) -> Path:
    """The log of the search that writes a factor table to ``out``."""
    return out.with_suffix(".jsonl")


@dataclass(frozen=True)
class Prepared:
    """What is known before the model loads.

    Attributes:
        path: of the checkpoint.
        goal: from it to the target length.
        text: rows.
    """

    path: str
    goal: Goal
    text: SearchText


def run(asked: Request, world: World) -> None:
    """Search, and on the first process write and print what was found."""
    from ropewalk.cli.search_output import finish
    from ropewalk.models.load import load_model

    ready = world.lead(lambda: _prepared(asked, world))
    device = _device(asked.settings.device, world)
    loaded = load_model(ready.path, dtype=asked.settings.dtype, device=device)
    with ExitStack() as stack:
        found = _search(asked, ready, loaded, stack, world)
    if world.leads:
        table = _table(asked, ready, loaded, found)
        finish(table, asked)


def _search(asked: Request, ready: Prepared, loaded: Any, stack: ExitStack, world: World) -> Found:
    """The search itself, with its log and its progress."""
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.search.ledger import Ledger, search_log
    from ropewalk.search.run import find
    from ropewalk.training.reporter import search_progress

    text = ready.text
    ledgers: list[Ledger] = []

    def known() -> dict[Job, float]:
        header, rows = _header(asked, ready, loaded), len(text.rows) + len(text.short_rows)
        ledgers.append(stack.enter_context(search_log(asked.log, header, asked.output.resume, rows)))
        if ledgers[0].known:
            notes.print(f"going on after {len(ledgers[0].known):,} forwards", soft_wrap=True)
        return ledgers[0].known

    losses = world.lead(known)
    ledger = ledgers[0] if ledgers else Ledger(losses)
    if world.leads:
        rules = len(ready.goal.baselines())
        besides = rules * (len(text.rows) + len(text.short_rows)) + (1 + rules) * len(text.held_out)
        notes.print(f"besides the budget {besides:,} forwards: what needs no search, and held-out rows")
    progress = None
    if world.leads:
        progress = search_progress(ConsoleReporter(notes), "search", asked.settings.budget, stack)
    return find(
        loaded,
        ready.goal,
        text.rows,
        asked.settings,
        short_rows=text.short_rows,
        held_out=text.held_out,
        world=world,
        ledger=ledger,
        progress=progress,
    )


def _prepared(asked: Request, world: World) -> Prepared:
    """All that can be refused without the model is refused here."""
    from ropewalk.cli.search_text import search_text
    from ropewalk.data import load_tokenizer
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.models.load import choose_device, read_config
    from ropewalk.parallel import require_devices
    from ropewalk.search.goal import goal_of
    from ropewalk.search.imports import checkpoint, method_of
    from ropewalk.search.loop import check_budget

    _check_files(asked)
    device = choose_device(asked.settings.device)
    if world.size > 1:
        if device.index is not None:
            raise RopewalkError(
                f"--device {asked.settings.device} names one device for {world.size} processes; say cuda"
            )
        require_devices(world, device)
    config = checkpoint(asked.model)
    path = resolve_model(asked.model)
    read_config(path)
    current = method_of(config)
    goal = goal_of(current, config.trained_length, asked.target_length, asked.settings.attention_factor)
    _check_goal(goal, asked.settings)
    short = goal.trained_length if asked.settings.short_penalty else None
    measured = asked.settings.documents * (1 if short is None else 2)
    space = goal.space(asked.settings.start_tokens, asked.settings.largest)
    check_budget(asked.settings.budget, goal.seeds(space), measured)
    text = search_text(
        asked.text,
        load_tokenizer(path),
        asked.settings.objective,
        asked.target_length,
        asked.settings.documents,
        asked.settings.held_out,
        short,
        goal.trained_length,
    )
    if text.joined:
        notes.print(f"rows are documents joined: too few have {asked.target_length:,} tokens of their own")
    if len(text.held_out) < asked.settings.held_out:
        notes.print(
            f"{len(text.held_out)} held-out rows, and not {asked.settings.held_out}: there is no more text",
            soft_wrap=True,
        )
    return Prepared(path, goal, text)


def _check_files(asked: Request) -> None:
    """Raise for what would be overwritten, for what is missing, and for what cannot be written."""
    from ropewalk.io.files import check_writable

    if asked.output.out.suffix != ".json":
        raise RopewalkError(f"--out {asked.output.out} is a factor table, whose name ends in .json")
    if asked.output.out.exists():
        raise RopewalkError(f"{asked.output.out} exists already; remove it or give another --out")
    if not asked.output.resume and asked.log.exists() and asked.log.stat().st_size:
        raise RopewalkError(
            f"{asked.log} holds a search already; go on with it by --resume, or give another --out"
        )
    if asked.output.resume and not asked.log.exists():
        raise RopewalkError(f"nothing to resume: there is no log {asked.log}; leave --resume out")
    for path in (asked.output.out, asked.output.plot):
        if path is not None:
            check_writable(path)


def _check_goal(goal: Goal, settings: SearchSettings) -> None:
    """Raise for settings that do not go with the goal."""
    from ropewalk.search.space import Candidate

    space = goal.space(settings.start_tokens, settings.largest)
    # What the method refuses (an attention factor of 0, say) is said before the work.
    goal.extended(Candidate((1.0,) * space.pairs, max(settings.start_tokens)))
    if goal.short and settings.short_penalty:
        raise RopewalkError(
            f"--short-penalty {settings.short_penalty:g} is for long factors; {goal.target_length} tokens are short"
        )


def _device(name: str, world: World) -> torch.device:
    import torch

    from ropewalk.models.load import choose_device

    device = choose_device(name)
    if device.type == "cuda" and world.size > 1:
        return torch.device("cuda", world.local_rank)
    return device


def _header(asked: Request, ready: Prepared, loaded: Any) -> dict[str, Any]:
    """Everything that decides a loss or what is asked next; not what changes only the speed, nor the budget."""
    from ropewalk.evaluation.identity import model_digest
    from ropewalk.search.documents import rows_digest

    settings = asked.settings
    return {
        "format": LOG_FORMAT,
        "model_sha256": model_digest(ready.path),
        "target_length": asked.target_length,
        "attention_factor": ready.goal.attention_factor,
        "objective": asked.settings.objective,
        "documents": asked.settings.documents,
        "documents_sha256": rows_digest([*ready.text.rows, *ready.text.short_rows]),
        "short_penalty": settings.short_penalty,
        "algorithm": settings.algorithm,
        "seed": settings.seed,
        "racing": settings.racing,
        "largest": ready.goal.space(settings.start_tokens, settings.largest).largest,
        "start_tokens": list(settings.start_tokens),
        "dtype": str(loaded.dtype).removeprefix("torch."),
    }


def _table(asked: Request, ready: Prepared, loaded: Any, found: Found) -> Factors:
    from ropewalk.search.documents import rows_digest
    from ropewalk.search.factors import found_factors
    from ropewalk.versions import software_versions

    text = ready.text
    measured = [*text.rows, *text.short_rows]
    return found_factors(
        found,
        _model(asked, ready),
        objective=asked.settings.objective,
        text=asked.text,
        documents=(len(measured), rows_digest(measured)),
        held_out=(len(text.held_out), rows_digest(text.held_out)) if text.held_out else None,
        device=str(loaded.device),
        dtype=str(loaded.dtype).removeprefix("torch."),
        versions=software_versions(),
    )


def _model(asked: Request, ready: Prepared) -> FactorsModel:
    from ropewalk.evaluation.identity import model_digest
    from ropewalk.search.factors import FactorsModel

    goal = ready.goal
    return FactorsModel(
        name=asked.model,
        digest=model_digest(ready.path),
        rotary_dim=goal.current.rotary_dim,
        rope_theta=goal.current.rope_theta,
        original_max_position_embeddings=goal.original_length,
    )
