"""What the searches of a run measure on: held-out documents that its evaluation does not take."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from ropewalk.data import PackedRows
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.rows import Ids, evaluation_rows
from ropewalk.search.data import SearchData, rows_digest, search_rows
from ropewalk.search.settings import LongFactorSearch, ShortFactorSearch
from ropewalk.training.documents import (
    held_out_documents,
    rows_with_validation,
    training_rows,
    validation_documents,
)
from ropewalk.training.measurement import perplexity_lengths
from ropewalk.training.preflight import Plan
from ropewalk.training.recipe.recipe import Recipe

SHORT, SHORT_LABEL = "short", "the short factors"
HELD_OUT, TRAINING = "held-out rows", "training rows"
_BOS, _EOS = -1, -2


def factors_file(name: str) -> str:
    """File of a table in a run's folder; the log of its search has the suffix ``.jsonl``."""
    return f"factors-{name}.json"


def stage_name(number: int) -> str:
    """Name of a stage in files, the first being 1."""
    return f"stage{number + 1}"


def short_penalty(settings: ShortFactorSearch) -> float:
    """The weight of a search's penalty; 0 for none."""
    return settings.short_penalty if isinstance(settings, LongFactorSearch) else 0.0


def search_material(
    label: str,
    settings: ShortFactorSearch,
    lengths: tuple[int, int],
    recipe: Recipe,
    chosen: Plan,
    packed: PackedRows | None,
    validation: PackedRows | None,
) -> SearchData:
    """The rows of a search: of held-out documents that the evaluation does not take, from the last one on.

    The result is judged by others of these, and by the evaluation's only where these are used up.

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
    target, _ = lengths
    count = settings.documents
    limit = recipe.evaluation.rows + 3 * count
    taken = evaluated_documents(recipe, chosen, validation)
    known = 0
    while documents := held_out_documents(recipe, chosen, validation, target, limit):
        try:
            return _held_out_material(label, settings, lengths, recipe, chosen, documents, taken)
        except RopewalkError:
            # Of sources no more is read than ought to be enough, and the evaluation may have taken most of it.
            if len(documents) == known:
                raise
            known, limit = len(documents), 2 * limit
    if packed is None or packed.settings.context != target or short_penalty(settings):
        raise RopewalkError(
            f"{label}: there are no held-out documents to search on; raise data.validation_documents, or give "
            "data.validation_sources"
        )
    if len(packed) < count:
        raise RopewalkError(
            f"{label}: the search wants {count} rows of {target} tokens, and there are {len(packed)} to train on "
            "and none held out; lower its documents, or give more text"
        )
    return SearchData(training_rows(packed, target, count), source=TRAINING)


def evaluated_documents(recipe: Recipe, chosen: Plan, validation: PackedRows | None) -> frozenset[int]:
    """Which of the held-out documents, counted from 0, the rows of a run's evaluation are made of, at any length.

    Args:
        recipe, chosen: of the run.
        validation: packed rows whose held-out documents the run measures on.
    """
    documents = validation_documents(recipe, chosen, validation)
    if not documents:
        return frozenset()
    bos, eos = _special(chosen)
    # The rows that the evaluation makes, of documents whose every token is the document's number.
    numbered = [np.full(len(document), number) for number, document in enumerate(documents)]
    marks = (None if bos is None else _BOS, None if eos is None else _EOS)
    found: set[int] = set()
    for length in perplexity_lengths(recipe, chosen):
        for row in evaluation_rows(numbered, length, *marks, recipe.evaluation.rows).rows:
            found.update(row.input_ids.tolist())
    return frozenset(found - {_BOS, _EOS})


def check_materials(
    recipe: Recipe,
    chosen: Plan,
    rows: Sequence[PackedRows | None],
    output: Path,
    outdated: Collection[str] = (),
) -> None:
    """Raise for a search of a recipe whose documents are too few: now, and not after the stages before it.

    Searches whose tables lie in ``output`` already, and are not ``outdated``, need no documents any more.
    """
    validation = rows_with_validation(recipe, rows)
    trained = chosen.trained_length

    def check(
        name: str,
        label: str,
        settings: ShortFactorSearch,
        lengths: tuple[int, int],
        packed: PackedRows | None,
    ) -> None:
        table = factors_file(name)
        if table in outdated or not (output / table).is_file():
            search_material(label, settings, lengths, recipe, chosen, packed, validation)

    for number, stage in enumerate(recipe.stages):
        if (settings := stage.rope.search) is not None:
            own = trained if settings.weights == "current" else chosen.trained_length
            check(stage_name(number), f"stage {number + 1}", settings, (stage.context, own), rows[number])
        trained = stage.context
    if recipe.short_context is not None and chosen.original_length is not None:
        check(SHORT, SHORT_LABEL, recipe.short_context, (chosen.original_length, trained), None)


def _held_out_material(
    label: str,
    settings: ShortFactorSearch,
    lengths: tuple[int, int],
    recipe: Recipe,
    chosen: Plan,
    documents: Sequence[Ids],
    taken: frozenset[int],
) -> SearchData:
    target, trained = lengths
    count, special = settings.documents, _special(chosen)
    backwards = list(enumerate(documents))[::-1]
    free = [document for number, document in backwards if number not in taken]
    try:
        rows, others = search_rows(free, target, *special, count, count)
        short = search_rows(free, trained, *special, count, 0)[0].rows if short_penalty(settings) else []
    except RopewalkError as error:
        if taken:
            raise RopewalkError(_too_few(label, count, target, recipe, chosen, documents, free)) from error
        raise RopewalkError(
            f"{label}: {error}; the text is what data.validation_documents or data.validation_sources holds out"
        ) from error
    if others is None or len(others.rows) < count:
        # What the result is judged by chooses nothing: it may be what the evaluation takes too.
        last = [document for number, document in backwards if number in taken]
        again, more = search_rows([*free, *last], target, *special, count, count)
        if rows_digest(again.rows) == rows_digest(rows.rows):
            others = more
    return SearchData(rows.rows, others.rows if others else [], short, HELD_OUT)


def _too_few(
    label: str,
    count: int,
    length: int,
    recipe: Recipe,
    chosen: Plan,
    documents: Sequence[Ids],
    free: Sequence[Ids],
) -> str:
    """What to say where the evaluation leaves too little for a search."""
    special = _special(chosen)
    framing = sum(each is not None for each in special)
    try:
        filled = len(evaluation_rows(free, length, *special, count).rows)
    except RopewalkError:
        filled = 0
    tokens, left = (sum(len(document) + framing for document in each) for each in (documents, free))
    # A row that goes on with a document begins with a token of its own, as the first one does.
    evaluated = recipe.evaluation.rows * (recipe.stages[-1].context + 1)
    wanted = count * (length + 1)
    missing = max(wanted - left, evaluated + wanted - tokens, 0)
    # One more for the document that the evaluation takes a part of.
    more = math.ceil(missing * len(documents) / tokens) + 1
    if recipe.data.validation_sources:
        where = "give more in data.validation_sources"
    elif recipe.data.rows:
        where = "pack the rows with more --validation-documents"
    else:
        where = "raise data.validation_documents"
    return (
        f"{label}: the evaluation takes {len(documents) - len(free)} of the {len(documents)} held-out documents, and "
        f"the other {len(free)} fill {filled} rows of {length} tokens where the search wants {count}; hold out about "
        f"{more} more ({where}), or lower evaluation.rows or the search's "
        "documents"
    )


def _special(chosen: Plan) -> tuple[int | None, int | None]:
    """BOS and EOS as rows of the evaluation have them: EOS only where there is no BOS."""
    bos, eos = chosen.tokenizer.bos_token_id, chosen.tokenizer.eos_token_id
    return bos, eos if bos is None else None
