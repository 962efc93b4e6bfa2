"""The searches of a run: factors for a stage, or for the original length; found once, and kept for resumed runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ropewalk.data import PackedRows
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.identity import model_digest
from ropewalk.packing import Row
from ropewalk.parallel import World
from ropewalk.search import Candidate, Factors, Goal, Ledger, read_factors, write_factors
from ropewalk.search.documents import rows_digest, search_rows
from ropewalk.search.factors import FactorsModel, found_factors
from ropewalk.search.finding import Found, SearchSettings, find
from ropewalk.search.ledger import begin_log, read_log
from ropewalk.training.documents import held_out_documents, rows_with_validation, training_rows
from ropewalk.training.preflight import Plan
from ropewalk.training.recipe import Recipe, Search, ShortContext
from ropewalk.training.reporter import Reporter
from ropewalk.training.sharded_checkpoint import load_weights
from ropewalk.training.step import autocast
from ropewalk.training.team import Team
from ropewalk.versions import software_versions

SHORT, SHORT_LABEL = "short", "the short factors"
HELD_OUT, TRAINING = "held-out rows", "training rows"


@dataclass(frozen=True)
class FactorSearch:
    """One search of a run.

    Attributes:
        name: of its files, ``stage1`` or ``short``.
        label: what it is, for people.
        goal: what candidates are measured for.
        settings: what the recipe says.
        weights: checkpoint of the run to measure on; None for the recipe's model.
    """

    name: str
    label: str
    goal: Goal
    settings: ShortContext
    weights: Path | None


def factors_file(name: str) -> str:
    """File of a table in a run's folder; the log of its search has the suffix ``.jsonl``."""
    return f"factors-{name}.json"


def stage_name(number: int) -> str:
    """Name of a stage in files, the first being 1."""
    return f"stage{number + 1}"


@dataclass(frozen=True, eq=False)
class Material:
    """What a search measures on.

    Attributes:
        rows: candidates are measured on.
        held_out: the result is judged by; none where the text is used up.
        short: of the length trained for, for the penalty.
        text: what they are made of.
    """

    rows: list[Row]
    held_out: list[Row]
    short: list[Row]
    text: str


def search_material(
    label: str,
    settings: ShortContext,
    lengths: tuple[int, int],
    recipe: Recipe,
    chosen: Plan,
    packed: PackedRows | None,
    validation: PackedRows | None,
) -> Material:
    """The rows of a search: held-out documents from the last on, as the evaluation takes them from the first on.

    Args:
        label: what it is, for people.
        settings: what the recipe says of it.
        lengths: tokens, searched for and trained for.
        recipe, chosen: of the run.
        packed: training rows of the stage, for a run that holds nothing out; None where there are none.
        validation: packed rows whose held-out documents the run measures on.

    Raises:
        RopewalkError: if the documents do not fill so many rows.
    """
    target, trained = lengths
    count, penalty = settings.documents, short_penalty(settings)
    limit = recipe.evaluation.rows + 3 * count
    documents = held_out_documents(recipe, chosen, validation, target, limit)[::-1]
    if not documents:
        if packed is None or packed.settings.context != target or penalty:
            raise RopewalkError(
                f"{label}: there are no held-out documents to search on; raise data.validation_documents, or give "
                "data.validation_sources"
            )
        if len(packed) < count:
            raise RopewalkError(
                f"{label}: the search wants {count} rows of {target} tokens, and there are {len(packed)} to train on "
                "and none held out; lower its documents, or give more text"
            )
        return Material(training_rows(packed, target, count), [], [], TRAINING)
    bos, eos = chosen.tokenizer.bos_token_id, chosen.tokenizer.eos_token_id
    special = (bos, eos if bos is None else None)
    try:
        rows, others = search_rows(documents, target, *special, count, count)
        short = search_rows(documents, trained, *special, count, 0)[0] if penalty else None
    except RopewalkError as error:
        raise RopewalkError(
            f"{label}: {error}; the text is what data.validation_documents or data.validation_sources holds out"
        ) from error
    return Material(rows.rows, others.rows if others else [], short.rows if short else [], HELD_OUT)


def short_penalty(settings: ShortContext) -> float:
    """The weight of a search's penalty; 0 for none."""
    return settings.short_penalty if isinstance(settings, Search) else 0.0


def check_materials(recipe: Recipe, chosen: Plan, rows: Sequence[PackedRows | None]) -> None:
    """Raise for a search of a recipe whose documents are too few: now, and not after the stages before it."""
    validation = rows_with_validation(recipe, rows)
    trained = chosen.trained_length
    for number, stage in enumerate(recipe.stages):
        if (settings := stage.rope.search) is not None:
            own = trained if settings.weights == "current" else chosen.trained_length
            lengths = (stage.context, own)
            search_material(
                f"stage {number + 1}", settings, lengths, recipe, chosen, rows[number], validation
            )
        trained = stage.context
    if recipe.short_context is not None and chosen.original_length is not None:
        lengths = (chosen.original_length, trained)
        search_material(SHORT_LABEL, recipe.short_context, lengths, recipe, chosen, None, validation)


def searched_factors(
    search: FactorSearch,
    recipe: Recipe,
    chosen: Plan,
    packed: PackedRows | None,
    validation: PackedRows | None,
    output: Path,
    begun: bool,
    reporter: Reporter,
    team: Team,
) -> Factors:
    """The factor table of a search: as found before, or found now and on disk before this returns.

    A search that was cut off goes on from its log. Every process holds the whole model while it lasts.

    Args:
        search: which.
        recipe, chosen, packed, validation: as for :func:`search_material`.
        output: folder of the run.
        begun: whether the work that comes after the search has begun; it is never done again then.
        reporter: progress.
        team: the processes that take part; all of them call this alike.

    Raises:
        RopewalkError: if the table is damaged, of another search, or gone after the work on it has begun.
    """
    path = output / factors_file(search.name)
    kept = team.world.lead(lambda: _kept(search, recipe, path, begun))
    if kept is not None:
        return kept
    lengths = (search.goal.target_length, search.goal.trained_length)
    material = team.world.lead(
        lambda: search_material(search.label, search.settings, lengths, recipe, chosen, packed, validation)
    )
    header = team.world.lead(lambda: _header(search, recipe, chosen, material))
    with ExitStack() as stack:
        opened: list[IO[str]] = []

        def begin() -> dict[Any, float]:
            known, file = _log(path.with_suffix(".jsonl"), header)
            opened.append(stack.enter_context(file))
            return known

        known = team.world.lead(begin)
        if known:
            reporter.note(f"{search.label}: the search goes on after {len(known)} forwards")
        found = _find(
            search, recipe, chosen, material, Ledger(known, opened[0] if opened else None), reporter, team
        )
    table = team.world.lead(lambda: _write(search, recipe, chosen, material, found, path))
    reporter.note(f"{search.label}: {describe_search(search_summary(table, path.name))}")
    return table


def candidate_of(table: Factors) -> Candidate:
    """The factors of a search's table as a candidate."""
    assert table.best is not None
    return Candidate(table.best.rescale_factors, table.best.start_tokens)


def _kept(search: FactorSearch, recipe: Recipe, path: Path, begun: bool) -> Factors | None:
    """The table on disk, if it is there and of this search."""
    if not path.is_file():
        if begun:
            raise RopewalkError(
                f"{search.label} has begun, and {path} with its factors is gone; restore the file, or start again"
            )
        return None
    table = read_factors(path)
    goal, settings = search.goal, search.settings
    factors = table.short_factor if goal.short else table.long_factor
    there = table.search
    fits = (
        there is not None
        and table.best is not None
        and factors == table.best.rescale_factors
        and table.target_length == goal.target_length
        and table.model.rope_theta == goal.current.rope_theta
        and table.model.original_max_position_embeddings == goal.original_length
        and (there.algorithm, there.budget, there.seed) == (settings.algorithm, settings.budget, recipe.seed)
        and goal.space(largest=settings.largest).contains(candidate_of(table))
    )
    if not fits:
        raise RopewalkError(
            f"{path} does not hold what {search.label} searched for; restore the file, or start again"
        )
    return table


def _header(search: FactorSearch, recipe: Recipe, chosen: Plan, material: Material) -> dict[str, Any]:
    """What decides a search: a log with another first line is another search's."""
    return {
        "model": model_digest(chosen.model) or chosen.model,
        "weights": None if search.weights is None else search.weights.name,
        "goal": repr(search.goal),
        "settings": search.settings.model_dump(mode="json", exclude={"batch"}),
        "seed": recipe.seed,
        "precision": chosen.precision,
        "documents_sha256": rows_digest([*material.rows, *material.short]),
    }


def _log(path: Path, header: Mapping[str, Any]) -> tuple[dict[Any, float], IO[str]]:
    if path.is_file() and not path.stat().st_size:
        # Killed before its first line.
        path.unlink()
    if not path.is_file():
        return {}, begin_log(path, header)
    known = read_log(path, header)
    try:
        return known, path.open("a", encoding="utf-8")
    except OSError as error:
        raise RopewalkError(f"cannot write {path}: {error.strerror}") from error


def _find(
    search: FactorSearch,
    recipe: Recipe,
    chosen: Plan,
    material: Material,
    ledger: Ledger,
    reporter: Reporter,
    team: Team,
) -> Found:
    dtype = torch.bfloat16 if chosen.precision == "bfloat16" else torch.float32
    # Whole in each process: forwards are what the processes share.
    alone = World()
    model = Team(alone).load(chosen.model, recipe, chosen, dtype=dtype)
    if search.weights is not None:
        load_weights(search.weights, model, alone)
    settings = SearchSettings(
        algorithm=search.settings.algorithm,
        budget=search.settings.budget,
        seed=recipe.seed,
        racing=search.settings.racing,
        largest=search.settings.largest,
        short_penalty=short_penalty(search.settings),
        batch=search.settings.batch,
    )
    with (
        reporter.bar(f"{search.label} search", settings.budget) as advance,
        autocast(chosen.device, chosen.precision),
    ):

        def progress(forwards: int, best: float) -> None:
            advance(forwards, f"perplexity {math.exp(best):.3f}" if math.isfinite(best) else "")

        return find(
            model.model,
            search.goal,
            material.rows,
            settings,
            short_rows=material.short,
            held_out=material.held_out,
            world=team.world,
            ledger=ledger,
            progress=progress,
        )


def _write(
    search: FactorSearch, recipe: Recipe, chosen: Plan, material: Material, found: Found, path: Path
) -> Factors:
    goal, weights = search.goal, search.weights
    name = recipe.model if weights is None else f"{recipe.model} after {weights.name}"
    table = found_factors(
        found,
        FactorsModel(
            name=name,
            digest=model_digest(chosen.model if weights is None else str(weights)),
            rotary_dim=goal.current.rotary_dim,
            rope_theta=goal.current.rope_theta,
            original_max_position_embeddings=goal.original_length,
        ),
        objective="perplexity",
        text=material.text,
        documents=(len(material.rows), rows_digest(material.rows)),
        held_out=(len(material.held_out), rows_digest(material.held_out)) if material.held_out else None,
        device=str(chosen.device),
        dtype=chosen.precision,
        versions=software_versions(),
    )
    write_factors(path, table)
    return table


def search_summary(table: Factors, file: str) -> dict[str, Any]:
    """What a run's summary says of a search."""
    assert table.best is not None
    assert table.search is not None
    return {
        "file": file,
        "target_length": table.target_length,
        "perplexity": table.best.objective,
        "baselines": table.baselines,
        "held_out": None if table.held_out is None else table.held_out.model_dump(mode="json"),
        "rows": table.search.documents,
        "text": table.search.text,
        "forwards": table.forwards,
    }


def describe_search(found: Mapping[str, Any]) -> str:
    """One sentence on a search as :func:`search_summary` gives it: what it found, and what it had to beat."""
    sentence = (
        f"factors for {found['target_length']:,} tokens from a search of {found['forwards']:,} forwards on "
        f"{found['rows']} {found['text']}: perplexity {_compared(found['perplexity'], found['baselines'])}"
    )
    judged = found["held_out"]
    if judged is None:
        return sentence
    return f"{sentence}; on rows it did not see {_compared(judged['best'], judged['baselines'])}"


def _compared(best: float | None, baselines: Mapping[str, float | None]) -> str:
    others = ", ".join(f"{name} {_number(value)}" for name, value in baselines.items())
    return f"{_number(best)} ({others})"


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3f}"
