"""Searches in a run, for a stage's factors or for short factors; tables are kept for resumed runs.

A search measures on held-out documents that the run's evaluation does not use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.data import PackedRows
from ropewalk.data.read.documents import token_hash
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.rows import Ids, evaluation_rows
from ropewalk.io.digests import digest
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.parallel.context import RunContext
from ropewalk.search import Candidate, Factors, Goal, Ledger, goal_of, write_factors
from ropewalk.search.data import SearchData, beginning, rows_digest, search_needles, search_rows
from ropewalk.search.factor_table import CriticalPair, FactorsModel
from ropewalk.search.goal import TITLES
from ropewalk.search.run import SearchOutcome, SearchProblem, factors_found, find, search_ledger
from ropewalk.search.settings import (
    LongFactorSearch,
    SearchSettings,
    ShortFactorSearch,
    check_budget,
)
from ropewalk.training.checkpoint.files import read_record
from ropewalk.training.checkpoint.sharded import load_weights
from ropewalk.training.documents import (
    held_out_documents,
    training_rows,
    validation_documents,
)
from ropewalk.training.measurement import perplexity_lengths
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.recipe.softmax_scale import SoftmaxScale
from ropewalk.training.resolved import AtStage, ResolvedRecipe, load_for_run
from ropewalk.training.stage_rope.base import (
    Before,
    factors_file,
    refuse_start_tokens,
    stage_name,
)
from ropewalk.training.update.step import autocast

SHORT, SHORT_LABEL = "short", "the short factors"
SCALE = "softmax-scale"
"""Name of the step that measures softmax scales."""
HELD_OUT, TRAINING, NEEDLES = "held-out rows", "training rows", "rows with needles in held-out documents"


@dataclass(frozen=True)
class WantedRows:
    """Rows that a search needs.

    Attributes:
        label: name of the search in messages.
        settings: settings of the search in the recipe.
        target_length: length that the factors are for, tokens.
        trained_length: trained length of the model, tokens.
    """

    label: str
    settings: ShortFactorSearch | SoftmaxScale
    target_length: int
    trained_length: int

    @property
    def has_penalty(self) -> bool:
        """Whether the search also needs rows of the trained length, for its short penalty."""
        return isinstance(self.settings, LongFactorSearch) and self.settings.short_penalty > 0

    @property
    def has_needles(self) -> bool:
        """Whether candidates are measured on needles hidden in the documents."""
        return isinstance(self.settings, LongFactorSearch) and self.settings.objective == "needle"


def rows_for_search(wanted: WantedRows, at: AtStage) -> SearchData:
    """Rows for a search, from held-out documents that the evaluation does not use, starting with the last document.

    The result is judged on further documents of this kind, or on those of the evaluation if none are left.

    Args:
        wanted: number and length of the rows.
        at: state of the run; without held-out documents, the stage's training rows are used.

    Raises:
        RopewalkError: if the documents do not fill enough rows.
    """
    resolved, packed, target = at.resolved, at.rows, wanted.target_length
    count = wanted.settings.documents
    # Enough for the evaluation, the rows to search on and those to judge on, with some to spare.
    limit = resolved.recipe.evaluation.rows + 3 * count
    taken = evaluated_documents(resolved, at.validation, at.searched)
    known = 0
    while documents := held_out_documents(resolved, at.validation, target, limit):
        try:
            return _held_out_rows(wanted, resolved, documents, taken)
        except RopewalkError:
            # Only as many documents as usually suffice were read from the sources; read more and try again.
            if len(documents) == known:
                raise
            known, limit = len(documents), 2 * limit
    if packed is None or packed.settings.context != target or wanted.has_penalty or wanted.has_needles:
        raise RopewalkError(
            f"{wanted.label}: the search needs held-out documents, but there are none; raise "
            "data.validation_documents, or set data.validation_sources"
        )
    if len(packed) < count:
        raise RopewalkError(
            f"{wanted.label}: the search needs {count} rows of {target} tokens, but there are only {len(packed)} "
            "training rows and no held-out documents; either lower the setting documents of the search, or add text"
        )
    return SearchData(training_rows(packed, target, count, resolved.recipe.seed), source=TRAINING)


def evaluated_documents(
    resolved: ResolvedRecipe, validation: PackedRows | None, searched: frozenset[int] = frozenset()
) -> frozenset[int]:
    """Hashes of the held-out documents that a run's evaluation reads, as documents or in rows, at any length.

    Args:
        resolved: the recipe.
        validation: packed rows whose held-out documents the run evaluates on.
        searched: as in :class:`~ropewalk.training.resolved.AtStage`.
    """
    documents = validation_documents(resolved, validation, searched)
    if not documents:
        return frozenset()
    found: set[int] = set()
    limit = resolved.recipe.evaluation.rows
    for length in perplexity_lengths(resolved):
        found.update(evaluation_rows(documents, length, *_special(resolved), limit).documents)
    if resolved.recipe.evaluation.reads_documents:
        found.update(range(min(limit, len(documents))))
    return frozenset(token_hash(documents[number]) for number in found)


def _held_out_rows(
    wanted: WantedRows, resolved: ResolvedRecipe, documents: Sequence[Ids], taken: frozenset[int]
) -> SearchData:
    target, trained, label = wanted.target_length, wanted.trained_length, wanted.label
    count, special = wanted.settings.documents, _special(resolved)
    # From the end, because the evaluation reads documents from the beginning.
    backwards = [(token_hash(document), document) for document in documents][::-1]
    hashes, free = [], []
    for number, document in backwards:
        if number not in taken:
            hashes.append(number)
            free.append(document)
    if wanted.has_needles:
        return _needle_rows(wanted, resolved, hashes, free)
    try:
        rows, others = search_rows(free, target, *special, count, count)
        short = search_rows(free, trained, *special, count, 0)[0] if wanted.has_penalty else None
    except RopewalkError as error:
        if taken:
            raise RopewalkError(_too_few(wanted, resolved, documents, free)) from error
        raise RopewalkError(
            f"{label}: {error} (the text is the held-out documents; for more, {_for_more(resolved.recipe)})"
        ) from error
    if others is None or len(others.rows) < count:
        # Judging the result selects nothing, so it may share documents with the evaluation.
        last = [document for number, document in backwards if number in taken]
        again, more = search_rows([*free, *last], target, *special, count, count)
        # More documents may fill the rows to search on as well, which must not contain the evaluation's.
        if rows_digest(again.rows) == rows_digest(rows.rows):
            others = more
    measured = rows.documents + (short.documents if short else ())
    return SearchData(
        rows.rows,
        others.rows if others else [],
        short.rows if short else [],
        HELD_OUT,
        documents=frozenset(hashes[number] for number in measured),
    )


def _needle_rows(
    wanted: WantedRows, resolved: ResolvedRecipe, hashes: Sequence[int], documents: Sequence[Ids]
) -> SearchData:
    """Rows with needles in the held-out documents that the evaluation does not use."""
    target, trained, count = wanted.target_length, wanted.trained_length, wanted.settings.documents
    texts = (resolved.tokenizer.decode(document) for document in documents)
    try:
        rows, others, used = search_needles(texts, resolved.tokenizer, target, trained, count, count)
    except RopewalkError as error:
        raise RopewalkError(f"{wanted.label}: {error}") from error
    if not used:
        raise RopewalkError(
            f"{wanted.label}: the evaluation uses all held-out documents, and needles are hidden in others; "
            f"{_for_more(resolved.recipe)}"
        )
    short = [beginning(row, min(trained, target)) for row in rows] if wanted.has_penalty else []
    return SearchData(rows, others, short, NEEDLES, documents=frozenset(hashes[:used]))


def _too_few(
    wanted: WantedRows, resolved: ResolvedRecipe, documents: Sequence[Ids], free: Sequence[Ids]
) -> str:
    """Error message for an evaluation that leaves too few documents for a search."""
    recipe, count, length = resolved.recipe, wanted.settings.documents, wanted.target_length
    special = _special(resolved)
    added = sum(each is not None for each in special)
    try:
        filled = len(evaluation_rows(free, length, *special, count).rows)
    except RopewalkError:
        filled = 0
    tokens, left = (sum(len(document) + added for document in each) for each in (documents, free))
    # One more token per row, because each row that continues a document starts with its own special token.
    evaluated = recipe.evaluation.rows * (resolved.reach + 1)
    searched = count * (length + 1)
    missing = max(searched - left, evaluated + searched - tokens, 0)
    # One more, because the evaluation may use only a part of its last document.
    more = math.ceil(missing * len(documents) / tokens) + 1
    return (
        f"{wanted.label}: the evaluation uses {len(documents) - len(free)} of the {len(documents)} held-out "
        f"documents, and the other {len(free)} fill {filled} rows of {length} tokens, but the search needs {count} "
        f"rows; either hold out about {more} more documents ({_for_more(recipe)}), or lower evaluation.rows or the "
        "setting documents of the search"
    )


def _for_more(recipe: Recipe) -> str:
    """What to do to hold out more documents."""
    if recipe.data.validation_sources:
        return "add text to data.validation_sources"
    if recipe.data.rows:
        return "pack the rows with more --validation-documents"
    return "raise data.validation_documents"


def _special(resolved: ResolvedRecipe) -> tuple[int | None, int | None]:
    """BOS and EOS ids as in the evaluation's rows: EOS is used only if the tokenizer has no BOS."""
    bos, eos = resolved.tokenizer.bos_token_id, resolved.tokenizer.eos_token_id
    return bos, eos if bos is None else None


def searches_of(resolved: ResolvedRecipe) -> dict[str, WantedRows]:
    """The rows that the searches of a run need, by the names of the searches; those of stages come first."""
    recipe, found = resolved.recipe, {}
    trained = resolved.trained_length
    for number, stage in enumerate(recipe.stages):
        if (search := stage.rope.limiting.search) is not None:
            own = trained if search.weights == "current" else resolved.trained_length
            found[stage_name(number)] = WantedRows(f"stage {number + 1}", search, stage.context, own)
        trained = stage.context
    if (scale := recipe.stages[-1].rope.softmax_scale) is not None:
        found[SCALE] = WantedRows("softmax scale", scale, max(scale.lengths), resolved.trained_length)
    if recipe.short_context is not None and resolved.original_length is not None:
        found[SHORT] = WantedRows(
            SHORT_LABEL, recipe.short_context, resolved.original_length, resolved.target
        )
    return found


def split_of(name: str, wanted: WantedRows, resolved: ResolvedRecipe) -> dict[str, Any]:
    """What decides which documents a search gets: its own rows, and the evaluation, whose documents it avoids."""
    evaluation = resolved.recipe.evaluation
    return {
        "search": name,
        "documents": wanted.settings.documents,
        "target_length": wanted.target_length,
        "trained_length": wanted.trained_length if wanted.has_penalty or wanted.has_needles else None,
        # Without the key in splits of earlier versions.
        **({"objective": "needle"} if wanted.has_needles else {}),
        "evaluated": [evaluation.rows, perplexity_lengths(resolved), evaluation.reads_documents]
        if evaluation.reads_text
        else None,
    }


@dataclass(frozen=True)
class FactorSearch:
    """One search in a run.

    Attributes:
        name: name in its files, such as ``stage1`` or ``short``.
        label: name of the search in messages.
        goal: RoPE and target length that candidates are measured for.
        settings: settings of the search in the recipe.
        weights: checkpoint of the run to measure on; None for the recipe's model.
        stage: index of the stage whose RoPE other layer types use during the search; -1 for the last stage.
    """

    name: str
    label: str
    goal: Goal
    settings: ShortFactorSearch
    weights: Path | None = None
    stage: int = -1

    @property
    def wanted(self) -> WantedRows:
        """Rows that the search needs."""
        return WantedRows(self.label, self.settings, self.goal.target_length, self.goal.trained_length)


def search_factors(search: FactorSearch, at: AtStage) -> Factors:
    """Run a search and return its factor table, which is written to disk first.

    An interrupted search resumes from its log. Every process loads the whole model for the search.

    Args:
        search: the search.
        at: state of the run; every rank must call this function.

    Raises:
        RopewalkError: if there are too few documents to measure on, or the log belongs to another search.
    """
    world, reporter = at.context.world, at.context.rank_0_reporter
    path = at.output / factors_file(search.name)
    data = world.on_rank_0(lambda: rows_for_search(search.wanted, at))
    log = path.with_suffix(".jsonl")
    with search_ledger(log, lambda: _header(search, at.resolved, data), log.exists(), world) as ledger:
        if ledger.known:
            reporter.note(f"{search.label}: the search resumes after {len(ledger.known):,} forward passes")
        outcome = _find(search, at, data, ledger)
    table = world.on_rank_0(lambda: _write(search, at.resolved, outcome, path))
    reporter.note(f"{search.label}: {describe_search(search_summary(table, path.name))}")
    return table


def search_goals(recipe: Recipe, number: int, before: Before) -> tuple[Goal, Goal]:
    """The goal that a stage's candidates are measured for, and the goal that the result is applied to.

    They differ if the search measures on the recipe's model instead of the current weights.

    Args:
        recipe: the recipe.
        number: index of the stage, counted from 0.
        before: state before the stage.

    Raises:
        RopewalkError: if the model is already scaled by another method, or the length needs no scaling; if the recipe's
            model has other frequencies than the model before the stage; or if the recipe disables ropewalk's rotary
            module.
    """
    stage = recipe.stages[number]
    rope, search = stage.rope.limiting, stage.rope.limiting.search
    assert search is not None
    refuse_start_tokens(rope)
    if not recipe.exact_rope:
        raise RopewalkError(
            f"stages.{number}.rope: a search needs ropewalk's rotary module, which exact_rope: false disables; set "
            "exact_rope: true"
        )
    attention_factor = rope.parameter("attention_factor")
    try:
        goal = goal_of(before.method, before.length, stage.context, attention_factor)
        own = goal
        if search.weights == "checkpoint":
            own = goal_of(*before.checkpoint, stage.context, attention_factor)
        space = own.space(largest=search.largest, name=search.space)
        check_budget(search.budget, len(own.seeds(space)), search.rows)
        if search.weights == "current":
            return goal, goal
    except RopewalkError as error:
        raise RopewalkError(f"stages.{number}.rope.search: {error}") from error
    here, there = ((g.current.rope_theta, g.original_length) for g in (goal, own))
    if here != there:
        raise RopewalkError(
            f"stages.{number}.rope.search.weights: the checkpoint has rope_theta {there[0]:g} and original length "
            f"{there[1]}, but the stage starts from rope_theta {here[0]:g} and original length {here[1]}, so factors "
            "found on the checkpoint do not fit; set weights: current"
        )
    return own, goal


def search_of(recipe: Recipe, number: int, before: Before, weights: Path | None = None) -> FactorSearch:
    """The search of a stage.

    Args:
        recipe, number, before: as for :func:`search_goals`.
        weights: the latest checkpoint of the run, if there is one.
    """
    settings = recipe.stages[number].rope.limiting.search
    assert settings is not None
    goal = search_goals(recipe, number, before)[0]
    on = weights if settings.weights == "current" else None
    return FactorSearch(stage_name(number), f"stage {number + 1}", goal, settings, on, number)


def checkpoint_digest(path: Path) -> str:
    """SHA-256 of a checkpoint of a run, as recorded in the tables of searches on it.

    For a single-process checkpoint it is the digest of the model; for shards, a digest of the recorded file digests.
    """
    files = read_record(path).files
    return model_digest(str(path)) or digest([[name, files[name].sha256] for name in sorted(files)])


def candidate_of(table: Factors) -> Candidate:
    """Candidate with the best factors of a search's table."""
    assert table.best is not None
    return Candidate(table.best.rescale_factors, table.best.start_tokens)


def _header(search: FactorSearch, resolved: ResolvedRecipe, data: SearchData) -> dict[str, Any]:
    """Inputs that determine a search; a log with another first line belongs to another search."""
    return {
        "model": model_digest(resolved.model) or resolved.model,
        "weights": None if search.weights is None else search.weights.name,
        "goal": repr(search.goal),
        # A search may resume with another batch size.
        "settings": search.settings.model_dump(mode="json", exclude={"batch"}),
        "seed": resolved.recipe.seed,
        "precision": resolved.stages[search.stage].precision,
        "documents_sha256": data.sha256,
    }


def _find(search: FactorSearch, at: AtStage, data: SearchData, ledger: Ledger) -> SearchOutcome:
    resolved = at.resolved
    here = resolved.stages[search.stage]
    # Load the whole model in each process: the processes divide the forward passes, not the model.
    alone = RunContext()
    model = load_for_run(
        resolved,
        alone,
        resolved.model,
        dtype=here.compute_dtype,
        other_ropes=resolved.other_ropes[search.stage],
        with_adapter=search.weights is not None,
    )
    if search.weights is not None:
        load_weights(search.weights, model, alone.world)
    # A recipe has keys that a search does not know, such as `weights`.
    shared = search.settings.model_dump(include=set(LongFactorSearch.model_fields))
    settings = SearchSettings(**shared, seed=resolved.recipe.seed)
    problem = SearchProblem(search.goal, data, settings, f"{search.label} search")
    with autocast(resolved.device, here.precision):
        return find(model.model, problem, at.context, ledger)


def _write(search: FactorSearch, resolved: ResolvedRecipe, outcome: SearchOutcome, path: Path) -> Factors:
    weights, name = search.weights, resolved.recipe.model
    model = FactorsModel.of(
        name if weights is None else f"{name} after {weights.name}",
        search.goal,
        model_digest(resolved.model) if weights is None else checkpoint_digest(weights),
    )
    table = factors_found(outcome, model, str(resolved.device), resolved.stages[search.stage].precision)
    write_factors(path, table)
    return table


def search_summary(table: Factors, file: str) -> dict[str, Any]:
    """Entry of a search in the run's summary."""
    assert table.best is not None
    assert table.search is not None
    return {
        "file": file,
        "target_length": table.target_length,
        "perplexity": table.best.objective,
        "baselines": table.baselines,
        "held_out": None if table.held_out is None else table.held_out.model_dump(mode="json"),
        # Without the key where no critical pair was searched, as in summaries of earlier versions.
        **({"critical_pair": table.critical_pair.model_dump()} if table.critical_pair else {}),
        "rows": table.search.documents,
        "text": table.search.text,
        "forwards": table.forwards,
        "cautions": table.cautions(),
    }


def describe_search(found: Mapping[str, Any]) -> str:
    """Describe an entry of :func:`search_summary`: result, baselines and cautions, without a final full stop."""
    sentence = (
        f"factors for {found['target_length']:,} tokens from a search of {found['forwards']:,} forward passes on "
        f"{found['rows']} {found['text']}: perplexity {_compared(found['perplexity'], found['baselines'])}"
    )
    if "critical_pair" in found:
        sentence += f"; {CriticalPair(**found['critical_pair'])}"
    judged = found["held_out"]
    if judged is not None:
        sentence += f"; on held-out rows {_compared(judged['best'], judged['baselines'])}"
    # Summaries of earlier versions have no cautions.
    return ". ".join([sentence, *(caution.removesuffix(".") for caution in found.get("cautions", ()))])


def _compared(best: float | None, baselines: Mapping[str, float | None]) -> str:
    others = ", ".join(f"{TITLES.get(name, name)} {_number(value)}" for name, value in baselines.items())
    return f"{_number(best)} ({others})"


def _number(value: float | None) -> str:
    return "infinite" if value is None else f"{value:.3f}"
