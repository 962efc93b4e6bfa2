"""The searches of a run: factors for a stage, or for the original length; found once, and kept for resumed runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk.data import PackedRows
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.store import model_digest
from ropewalk.io.digests import digest
from ropewalk.io.progress import Reporter
from ropewalk.parallel import World
from ropewalk.parallel.context import RunContext
from ropewalk.search import Candidate, Factors, Goal, Ledger, read_factors, write_factors
from ropewalk.search.data import SearchData
from ropewalk.search.factor_table import FactorsModel
from ropewalk.search.goal import TITLES
from ropewalk.search.run import SearchOutcome, SearchProblem, factors_found, find, search_ledger
from ropewalk.search.settings import LongFactorSearch, SearchSettings, ShortFactorSearch
from ropewalk.training.checkpoint.files import read_record
from ropewalk.training.checkpoint.sharded import load_weights
from ropewalk.training.context import Team
from ropewalk.training.documents import model_at_start
from ropewalk.training.preflight import Plan
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.stage_rope.search_data import factors_file, search_material
from ropewalk.training.step import autocast


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
    settings: ShortFactorSearch
    weights: Path | None


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
    log = path.with_suffix(".jsonl")
    with search_ledger(log, lambda: header, log.exists(), team.world) as ledger:
        if ledger.known:
            reporter.note(f"{search.label}: the search goes on after {len(ledger.known)} forwards")
        found = _find(search, recipe, chosen, material, ledger, reporter, team)
    table = team.world.lead(lambda: _write(search, recipe, chosen, found, path))
    reporter.note(f"{search.label}: {describe_search(search_summary(table, path.name))}")
    return table


def checkpoint_digest(path: Path) -> str:
    """SHA-256 of a checkpoint of a run, which is the one in the tables of searches on it.

    That of any model where one process wrote it; where several wrote shards, over these files as it records them.
    """
    files = read_record(path).files
    return model_digest(str(path)) or digest([[name, files[name].sha256] for name in sorted(files)])


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
    began = model_at_start(path.parent) if table.model.name == recipe.model else None
    fits = (
        there is not None
        and table.best is not None
        and factors == table.best.rescale_factors
        and table.target_length == goal.target_length
        and table.model.rope_theta == goal.current.rope_theta
        and table.model.original_max_position_embeddings == goal.original_length
        and (there.algorithm, there.budget, there.seed) == (settings.algorithm, settings.budget, recipe.seed)
        and goal.space(largest=settings.largest).contains(candidate_of(table))
        and (began is None or table.model.digest in (None, began))
    )
    if not fits:
        raise RopewalkError(
            f"{path} does not hold what {search.label} searched for; restore the file, or start again"
        )
    return table


def _header(search: FactorSearch, recipe: Recipe, chosen: Plan, material: SearchData) -> dict[str, Any]:
    """What decides a search: a log with another first line is another search's."""
    return {
        "model": model_digest(chosen.model) or chosen.model,
        "weights": None if search.weights is None else search.weights.name,
        "goal": repr(search.goal),
        "settings": search.settings.model_dump(mode="json", exclude={"batch"}),
        "seed": recipe.seed,
        "precision": chosen.precision,
        "documents_sha256": material.sha256,
    }


def _find(
    search: FactorSearch,
    recipe: Recipe,
    chosen: Plan,
    material: SearchData,
    ledger: Ledger,
    reporter: Reporter,
    team: Team,
) -> SearchOutcome:
    dtype = torch.bfloat16 if chosen.precision == "bfloat16" else torch.float32
    # Whole in each process: forwards are what the processes share.
    alone = World()
    model = Team(alone).load(chosen.model, recipe, chosen, dtype=dtype)
    if search.weights is not None:
        load_weights(search.weights, model, alone)
    shared = search.settings.model_dump(include=set(LongFactorSearch.model_fields))
    settings = SearchSettings(**shared, seed=recipe.seed)
    problem = SearchProblem(search.goal, material, settings, f"{search.label} search")
    with autocast(chosen.device, chosen.precision):
        return find(model.model, problem, RunContext(team.world, reporter=reporter), ledger)


def _write(search: FactorSearch, recipe: Recipe, chosen: Plan, found: SearchOutcome, path: Path) -> Factors:
    goal, weights = search.goal, search.weights
    name = recipe.model if weights is None else f"{recipe.model} after {weights.name}"
    digest_ = model_digest(chosen.model) if weights is None else checkpoint_digest(weights)
    table = factors_found(found, FactorsModel.of(name, goal, digest_), str(chosen.device), chosen.precision)
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
        "cautions": table.cautions(),
    }


def describe_search(found: Mapping[str, Any]) -> str:
    """What a search found as :func:`search_summary` gives it, what it had to beat, and what to mind, without a stop."""
    sentence = (
        f"factors for {found['target_length']:,} tokens from a search of {found['forwards']:,} forwards on "
        f"{found['rows']} {found['text']}: perplexity {_compared(found['perplexity'], found['baselines'])}"
    )
    judged = found["held_out"]
    if judged is not None:
        sentence += f"; on rows it did not see {_compared(judged['best'], judged['baselines'])}"
    # Summaries of earlier versions have none.
    return ". ".join([sentence, *(caution.removesuffix(".") for caution in found.get("cautions", ()))])


def _compared(best: float | None, baselines: Mapping[str, float | None]) -> str:
    others = ", ".join(f"{TITLES.get(name, name)} {_number(value)}" for name, value in baselines.items())
    return f"{_number(best)} ({others})"


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3f}"
