"""Run one search on a model: read the goal and the text, keep the log, and write the factor table."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import resolve_model
from ropewalk.errors import RopewalkError
from ropewalk.io.files import check_writable
from ropewalk.io.progress import Advance, Reporter
from ropewalk.io.results import Result
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.models.config.read import read_config
from ropewalk.models.load import choose_device, load_model
from ropewalk.parallel import World, require_devices
from ropewalk.parallel.context import RunContext
from ropewalk.rope import RopeMethod
from ropewalk.runs import refuse_other
from ropewalk.runs.log import existing_log, missing_log
from ropewalk.search.algorithms import algorithm_named
from ropewalk.search.data import SearchData, search_data
from ropewalk.search.factor_table import (
    Best,
    CriticalPair,
    Factors,
    FactorsModel,
    HeldOut,
    Point,
    Provenance,
    SearchRecord,
    checkpoint,
    perplexity,
    read_factors,
    write_factors,
)
from ropewalk.search.goal import Goal, goal_of
from ropewalk.search.loop import (
    Ledger,
    Minimum,
    Progress,
    Strategy,
    minimise,
    search_log,
)
from ropewalk.search.objective import Forwards, ModelEvaluator, ShortPenalty
from ropewalk.search.settings import SearchConfig, SearchSettings, check_budget
from ropewalk.search.space import ALL_PAIRS, Candidate, Space
from ropewalk.versions import software_versions

LOG_FORMAT = "ropewalk-search/1"
MOST_SHOWN = 20.0
"""Nats per token; progress shows no perplexity above e^20."""


@dataclass(frozen=True)
class SearchResult(Result):
    """Result of a search.

    Attributes:
        table: the factors found, the baselines, and a record of the search.
        file: file that the table was written to; None if it was not written.
    """

    table: Factors
    file: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """The table and its file as JSON values."""
        return {
            **self.table.model_dump(mode="json"),
            "file": None if self.file is None else str(self.file),
        }


def search(config: SearchConfig, context: RunContext | None = None) -> SearchResult:
    """Search LongRoPE's rescale factors for a longer context, without training the checkpoint.

    Args:
        config: model, target length, text and search settings.
        context: processes that share the forward passes, and the reporter of progress. Every process must call this
            function. None means this process alone, without progress.

    Returns:
        ``table`` is the factor table. Its ``long_factor`` has one rescale factor for each rotary pair,
            ``target_length`` is in tokens, and ``forwards`` is the number of forward passes. If ``config.out`` is
            given, the table is also written to this file, and a log of all losses next to it. If the search to resume
            is finished, the table is the one in this file.

    Raises:
        RopewalkError: if rescale factors cannot extend this checkpoint, if the text does not fill the rows, if the
            budget is too small for the initial candidates, or if an output file already exists.

    Example:
        >>> from ropewalk.search import SearchConfig, search
        >>> settings = {"budget": 3, "documents": 1, "held_out": 0, "device": "cpu"}
        >>> found = search(SearchConfig(model="embedded", target_length=512, settings=settings))
        >>> len(found.table.long_factor), found.table.forwards
        (16, 3)
    """
    context = context or RunContext()
    world = context.world
    # Everything that can be refused is checked before the weights are loaded.
    ready = world.on_rank_0(lambda: _prepared(config, context))
    if config.resume and (found := world.on_rank_0(lambda: _finished(config, ready))) is not None:
        context.rank_0_reporter.note(f"the search is finished; its result is in {config.out}")
        return SearchResult(found, config.out)
    loaded = load_model(
        ready.path, dtype=config.settings.dtype, device=_device(config.settings.device, world)
    )
    if context.is_rank_0:
        rules = len(ready.goal.baselines())
        # Every baseline on all rows; on held-out rows the result as well.
        besides = rules * len(ready.data.measured) + (1 + rules) * len(ready.data.held_out)
    rows = len(ready.data.measured)
    with search_ledger(
        config.log, lambda: _header(config, ready, loaded), config.resume, world, rows
    ) as ledger:
        if context.is_rank_0:
            if ledger.known:
                context.rank_0_reporter.note(f"resuming after {len(ledger.known):,} forward passes")
            context.rank_0_reporter.note(
                f"{besides:,} forward passes in addition to the budget, for baselines and held-out rows"
            )
        outcome = find(loaded, SearchProblem(ready.goal, ready.data, config.settings), context, ledger)

    def finish() -> Factors:
        # On rank 0 alone, because it reads and hashes all weights.
        model = FactorsModel.of(config.model, ready.goal, model_digest(ready.path))
        table = factors_found(outcome, model, str(loaded.device), _dtype_name(loaded.dtype))
        if config.out is not None:
            write_factors(config.out, table)
        return table

    return SearchResult(world.on_rank_0(finish), config.out)


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """One search problem.

    Attributes:
        goal: checkpoint and target length.
        data: rows to measure on.
        settings: search settings.
        label: label of the progress bar.
    """

    goal: Goal
    data: SearchData
    settings: SearchSettings
    label: str = "search"


@dataclass(frozen=True, eq=False)
class SearchOutcome:
    """Result of a search and of its baselines; objectives in nats per token.

    Attributes:
        problem: the search problem.
        minimum: result of the search loop.
        baselines: objectives of the baselines by name.
        held_out: objectives on held-out rows, of the best candidate under ``best`` and of each baseline; None without
            held-out rows.
        seconds: wall-clock time, including baselines and held-out rows.
    """

    problem: SearchProblem
    minimum: Minimum
    baselines: dict[str, float]
    held_out: dict[str, float] | None
    seconds: float = field(compare=False)


def find(
    model: Any, problem: SearchProblem, context: RunContext | None = None, ledger: Ledger | None = None
) -> SearchOutcome:
    """Run a search on a loaded model, and measure the baselines.

    Args:
        model: model, see :class:`~ropewalk.search.objective.ModelEvaluator`.
        problem: goal, rows and settings.
        context: processes that share the forwards, all of which must call this function, and the reporter of progress.
        ledger: record of losses, see :func:`~ropewalk.search.loop.minimise`.

    Raises:
        RopewalkError: if a short penalty lacks its rows.
    """
    context = context or RunContext()
    goal, data, settings = problem.goal, problem.data, problem.settings
    if settings.short_penalty and not data.short_rows:
        raise RopewalkError("a short penalty needs rows at the trained length, got none")
    started = time.perf_counter()
    penalty = ShortPenalty(data.short_rows, settings.short_penalty) if settings.short_penalty else None
    forwards = Forwards(settings.batch, settings.prefill_chunk, context.world)
    evaluator = ModelEvaluator(model, goal, data.rows, penalty, forwards)
    space = space_of(goal, settings)
    # Before the search, so that rows that do not fit in memory fail before any of the budget is spent.
    baselines = {name: evaluator.baseline(method) for name, method in goal.baselines().items()}
    algorithm = algorithm_named(settings.algorithm)
    strategy = Strategy(algorithm, settings.budget, settings.seed, settings.racing)
    with progress_bar(context.rank_0_reporter, problem.label, settings.budget) as progress:
        minimum = minimise(space, evaluator, strategy, goal.seeds(space, settings.seed), ledger, progress)
    judged = None
    if data.held_out:
        # Without the short penalty: held-out rows judge the target length alone.
        judge = ModelEvaluator(model, goal, data.held_out, forwards=forwards)
        methods: dict[str, RopeMethod] = {
            "best": goal.method(minimum.best.candidate),
            **goal.baselines(),
        }
        judged = {name: judge.baseline(method) for name, method in methods.items()}
    return SearchOutcome(problem, minimum, baselines, judged, time.perf_counter() - started)


def space_of(goal: Goal, settings: SearchSettings) -> Space:
    """Search space of a goal with these settings."""
    return goal.space(settings.start_tokens, settings.largest, settings.space)


@contextmanager
def search_ledger(
    log: Path | None,
    header: Callable[[], Mapping[str, Any]],
    resume: bool,
    world: World,
    n_documents: int | None = None,
) -> Iterator[Ledger]:
    """Ledger of a search that several processes share: rank 0 owns the log and sends the known losses to the others.

    Args:
        log: log file; None keeps no log.
        header: called on rank 0 for the inputs that determine the search.
        resume, n_documents: see :func:`~ropewalk.search.loop.search_log`.
        world: the processes, all of which must call this function.

    Raises:
        RopewalkError: see :func:`~ropewalk.search.loop.search_log`.
    """
    if log is None:
        yield Ledger()
        return
    path = log
    with ExitStack() as stack:
        ledgers: list[Ledger] = []

        def begin() -> dict[Any, float]:
            ledgers.append(stack.enter_context(search_log(path, header(), resume, n_documents)))
            return ledgers[0].known

        known = world.on_rank_0(begin)
        # Only rank 0 ran begin(); the others remember the losses but write no log.
        yield ledgers[0] if ledgers else Ledger(known)


@contextmanager
def progress_bar(reporter: Reporter, label: str, budget: int) -> Iterator[Progress]:
    """Progress bar of a search, which starts at the first new forward.

    Forwards of the baselines and those recalled from a log would distort the estimate of the remaining time.

    Args:
        reporter: draws the bar.
        label: label of the bar.
        budget: maximum number of forwards.
    """
    bars: list[Advance] = []
    before: list[int] = []
    with ExitStack() as stack:

        def forward(done: int, best: float) -> None:
            if not bars:
                # The first report of a resumed search tells how many passes were recalled from the log.
                before.append(done - 1)
                text = f"{label}, after {before[0]:,}" if before[0] else label
                bars.append(stack.enter_context(reporter.bar(text, budget - before[0])))
            reached = (
                f"best perplexity {math.exp(best):.4g}"
                if best < MOST_SHOWN
                else "no candidate measured on all rows yet"
            )
            bars[0](done - before[0], f"forward passes, {reached}")

        yield forward


def factors_found(outcome: SearchOutcome, model: FactorsModel, device: str, dtype: str) -> Factors:
    """Factor table of a search.

    Args:
        outcome: result of the search.
        model: checkpoint that was searched on.
        device, dtype: device and dtype of the model during the search.

    Raises:
        RopewalkError: if the perplexity of the best objective overflows float64.
    """
    goal, data, settings = outcome.problem.goal, outcome.problem.data, outcome.problem.settings
    minimum = outcome.minimum
    best = minimum.best.candidate
    pairs = goal.critical_pairs if best.critical_pair else None
    reached = perplexity(minimum.best.objective)
    if reached is None:
        raise RopewalkError(
            f"the best objective is {minimum.best.objective:g} nats per token, too large for a finite perplexity; "
            "check the model and the documents"
        )
    judged = None
    if (nats := outcome.held_out) is not None:
        judged = HeldOut(
            documents=len(data.held_out),
            documents_sha256=data.held_out_sha256,
            best=perplexity(nats["best"]),
            baselines={name: perplexity(each) for name, each in nats.items() if name != "best"},
        )
    return Factors(
        model=model,
        target_length=goal.target_length,
        long_factor=None if goal.short else best.rescale_factors,
        short_factor=best.rescale_factors if goal.short else None,
        start_tokens=best.start_tokens,
        attention_factor=goal.attention_factor,
        critical_pair=pairs
        and CriticalPair(found=best.critical_pair, smallest=pairs[0], theoretical=pairs[-1]),
        provenance=Provenance(
            kind="search", source=f"{settings.algorithm}, seed {settings.seed}, on {data.source}"
        ),
        best=Best(objective=reached, rescale_factors=best.rescale_factors, start_tokens=best.start_tokens),
        baselines={name: perplexity(each) for name, each in outcome.baselines.items()},
        baseline_factors=goal.baseline_factors(),
        forwards=minimum.forwards,
        history=tuple(
            Point(forwards=trace.forwards, objective=perplexity(trace.measured.objective))
            for trace in minimum.traces
        ),
        search=_record(outcome, device, dtype),
        held_out=judged,
        versions=software_versions(),
    )


def _record(outcome: SearchOutcome, device: str, dtype: str) -> SearchRecord:
    goal, data, settings = outcome.problem.goal, outcome.problem.data, outcome.problem.settings
    return SearchRecord(
        objective=settings.objective,
        space=settings.space,
        short_penalty=settings.short_penalty,
        algorithm=settings.algorithm,
        seed=settings.seed,
        budget=settings.budget,
        racing=settings.racing,
        documents=len(data.measured),
        text=data.source,
        documents_sha256=data.sha256,
        largest=space_of(goal, settings).largest,
        start_tokens=settings.start_tokens,
        device=device,
        dtype=dtype,
        candidates=outcome.minimum.candidates,
        ended_by="budget" if outcome.minimum.spent else "algorithm",
        seconds=round(outcome.seconds, 1),
    )


@dataclass(frozen=True, eq=False)
class _Ready:
    """Inputs that are known before the model is loaded: its path, the goal and the rows."""

    path: str
    goal: Goal
    data: SearchData


def _prepared(config: SearchConfig, context: RunContext) -> _Ready:
    """Check everything that can be checked before the model is loaded."""
    settings = config.settings
    # Cheap checks first, so that a refusal comes at once.
    _check_files(config)
    device = choose_device(settings.device)
    if context.world.size > 1:
        if device.index is not None:
            raise RopewalkError(
                f"--device {settings.device} names one device for {context.world.size} processes; use --device cuda"
            )
        require_devices(context.world, device)
    checked = checkpoint(config.model)
    path = resolve_model(config.model)
    # `checkpoint` read the file alone; a config that transformers refuses should fail here, before the text is read.
    read_config(path)
    current = checked.full_attention_rope
    goal = goal_of(current, checked.trained_length, config.target_length, settings.attention_factor)
    _check_goal(goal, settings)
    space = space_of(goal, settings)
    # Before the text is read and tokenised, which may take minutes.
    check_budget(settings.budget, len(set(goal.seeds(space, settings.seed).values())), settings.rows)
    data = search_data(config.text, load_tokenizer(path, checked.vocab_size), goal, settings)
    if data.joined:
        context.rank_0_reporter.note(
            f"rows join several documents, because too few documents have {goal.target_length:,} tokens"
        )
    if len(data.held_out) < settings.held_out:
        context.rank_0_reporter.note(
            f"only {len(data.held_out)} of {settings.held_out} held-out rows: the text is used up"
        )
    return _Ready(path, goal, data)


def _check_files(config: SearchConfig) -> None:
    """Raise if an output file would be overwritten or cannot be written, or the log to resume is missing."""
    out, log = config.out, config.log
    if out is None or log is None:
        return
    if out.suffix != ".json":
        raise RopewalkError(f"--out {out}: the name of a factor table must end in .json")
    # Beside its log, the table may be that of the search to resume, which `_finished` finds out.
    if out.exists() and not (config.resume and log.exists()):
        raise RopewalkError(f"{out} already exists; remove it or give another --out")
    if not config.resume and log.exists() and log.stat().st_size:
        raise existing_log(log, "search")
    if config.resume and not log.exists():
        raise missing_log(log, "search")
    check_writable(out)


def _finished(config: SearchConfig, ready: _Ready) -> Factors | None:
    """The table of a search that has ended; None if it has not.

    Raises:
        RopewalkError: if the table is that of another search, or cannot be read.
    """
    if config.out is None or not config.out.exists():
        return None
    table, settings = read_factors(config.out), config.settings
    record = {} if table.search is None else table.search.model_dump()
    then = {**record, "model": table.model.digest, "target length": table.target_length}
    then["attention_factor"] = table.attention_factor
    now = {
        "model": model_digest(ready.path),
        "target length": config.target_length,
        "attention_factor": ready.goal.attention_factor,
        "objective": settings.objective,
        "space": settings.space,
        "short_penalty": settings.short_penalty,
        "algorithm": settings.algorithm,
        "seed": settings.seed,
        "budget": settings.budget,
        "racing": settings.racing,
        "documents": len(ready.data.measured),
        "documents_sha256": ready.data.sha256,
        "largest": space_of(ready.goal, settings).largest,
        "start_tokens": settings.start_tokens,
    }
    refuse_other(
        {key: then.get(key) for key in now},
        now,
        lambda first: (
            f"{config.out} already exists, from a search with {first.key} {first.was} instead of {first.now}; remove "
            "it or give another --out"
        ),
    )
    return table


def _check_goal(goal: Goal, settings: SearchSettings) -> None:
    """Raise for settings that contradict the goal."""
    space = space_of(goal, settings)
    # Build the method once, so that its own checks (an attention factor of 0, say) fail before the search.
    goal.extended(Candidate((1.0,) * space.pairs, max(settings.start_tokens)))
    if goal.short and settings.short_penalty:
        raise RopewalkError(
            f"--short-penalty {settings.short_penalty:g} applies to long factors only, but factors for "
            f"{goal.target_length} tokens (within the original length of {goal.original_length}) are short factors; "
            "omit --short-penalty"
        )


def _device(name: str, world: World) -> torch.device:
    device = choose_device(name)
    if device.type == "cuda" and world.size > 1:
        # choose_device gives cuda without an index; each rank takes its own GPU.
        return torch.device("cuda", world.local_rank)
    return device


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _header(config: SearchConfig, ready: _Ready, loaded: Any) -> dict[str, Any]:
    """Inputs that determine losses and candidates; without the budget and settings that affect only speed."""
    settings = config.settings
    # Without the key in LongRoPE's space, as in all logs of earlier versions.
    named = {} if settings.space == ALL_PAIRS else {"space": settings.space}
    return {
        "format": LOG_FORMAT,
        "model_sha256": model_digest(ready.path),
        "target_length": config.target_length,
        "attention_factor": ready.goal.attention_factor,
        "objective": settings.objective,
        **named,
        "documents": settings.documents,
        "seed": settings.seed,
        # After the settings that also decide which documents are drawn, so that a refusal names the cause.
        "documents_sha256": ready.data.sha256,
        "short_penalty": settings.short_penalty,
        "algorithm": settings.algorithm,
        "racing": settings.racing,
        "largest": space_of(ready.goal, settings).largest,
        "start_tokens": list(settings.start_tokens),
        "dtype": _dtype_name(loaded.dtype),
    }
