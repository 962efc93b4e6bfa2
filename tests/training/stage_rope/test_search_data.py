"""What the searches of a run measure on, by the identity of documents: never what the evaluation uses."""

import random
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml

import ropewalk.training.documents as documents_room
import ropewalk.training.measurement as measurement_room
import ropewalk.training.stage_rope.search as material_room
from ropewalk import RopewalkError
from ropewalk.data import TokenisedDocument
from ropewalk.data.read.documents import token_hash
from ropewalk.evaluation import evaluation_rows
from ropewalk.evaluation.rows import DrawnDocuments, take_documents
from ropewalk.parallel.context import RunContext
from ropewalk.training.documents import validation_documents
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.resolved import AtStage
from ropewalk.training.stage_rope.search import WantedRows, evaluated_documents, rows_for_search
from tests.marks import slow_after
from tests.training.run_cases import extend

ORIGINAL = 32
BOS, EOS = 100_000, 100_001


def resolved_of(recipe, bos, original=ORIGINAL):
    """As much of a resolved recipe as rows depend on."""
    return SimpleNamespace(
        recipe=recipe,
        tokenizer=SimpleNamespace(bos_token_id=bos, eos_token_id=EOS),
        original_length=original,
        trained_length=ORIGINAL,
        target=recipe.stages[-1].context,
        reach=recipe.stages[-1].context,
        methods=(None,) * len(recipe.stages),
        tables=(None,) * len(recipe.stages),
    )


@cache
def recipe_of(count, rows, context, penalty=0.0, suites=("perplexity",)):
    search = {"documents": count, "budget": 9 * count, "short_penalty": penalty}
    values = {
        "model": "m",
        "output": "o",
        "data": {"sources": ["a"], "validation_documents": 60},
        "stages": [{"context": context, "steps": 0, "rope": {"method": "longrope", "search": search}}],
        "evaluation": {"suites": list(suites), "rows": rows},
    }
    return parse_recipe(yaml.safe_dump(values), "test")


@pytest.fixture
def held_out(monkeypatch):
    """Makes documents of some lengths what a run holds out; every token of one is its number."""

    def hold(lengths, stream):
        ids = [np.full(length, number) for number, length in enumerate(lengths)]
        numbered = DrawnDocuments(ids, ["held out"] * len(ids))

        def documents(resolved, rows, length, limit):
            return taken(numbered, length, limit) if stream else numbered

        for room in (documents_room, material_room):
            monkeypatch.setattr(room, "held_out_documents", documents)
        return numbered

    return hold


def taken(numbered, length, limit):
    """What the evaluation takes from a stream of documents."""
    return take_documents((TokenisedDocument(ids, "held out") for ids in numbered), length, limit)


def numbers_in(rows):
    """The documents that rows are made of."""
    return {number for row in rows for number in row.input_ids.tolist()} - {BOS, EOS}


def material(resolved, target):
    wanted = WantedRows("stage 1", resolved.recipe.stages[0].rope.search, target, ORIGINAL)
    return rows_for_search(wanted, AtStage(resolved, RunContext()))


def found_or_refused(resolved, target):
    try:
        return material(resolved, target), None
    except RopewalkError as error:
        return None, str(error)


@pytest.mark.parametrize("stream", slow_after(1, [False, True]))
def test_no_document_of_a_search_is_in_the_evaluation(held_out, stream):
    rng = random.Random(20)
    outcomes = {"found": 0, "refused": 0, "joined": 0, "widened": 0}
    for _ in range(250):
        longest = rng.choice([12, 40, 150, 400])
        lengths = [rng.randint(1, longest) for _ in range(rng.randint(5, 150))]
        numbered = held_out(lengths, stream)
        count, rows = rng.randint(1, 4), rng.randint(1, 5)
        context = rng.choice([64, 128])
        recipe = recipe_of(count, rows, context, penalty=rng.choice([0.0, 1.0]))
        resolved = resolved_of(recipe, rng.choice([BOS, None]))
        special = (resolved.tokenizer.bos_token_id, None if resolved.tokenizer.bos_token_id else EOS)
        try:
            # As the evaluation itself does, for the length that comes last and the original one.
            reads = taken(numbered, context, rows) if stream else numbered
            evaluated = numbers_in(
                row
                for length in (context, ORIGINAL)
                for row in evaluation_rows(reads, length, *special, rows).rows
            )
        except RopewalkError:
            continue
        found, refusal = found_or_refused(resolved, rng.choice([64, context]))
        if found is None:
            assert "the evaluation uses" in refusal
            outcomes["refused"] += 1
            continue
        searched = numbers_in(found.rows)
        assert len(found.rows) == count
        assert not (searched | numbers_in(found.short_rows)) & evaluated
        assert not searched & numbers_in(found.held_out)
        outcomes["found"] += 1
        outcomes["joined"] += any(len(set(row.input_ids.tolist())) > 2 for row in found.rows)
        outcomes["widened"] += bool(numbers_in(found.held_out) & evaluated)
    assert min(outcomes.values()) >= 10, outcomes


def test_a_search_takes_documents_from_the_last_one_on(held_out):
    held_out([70] * 20, stream=False)
    found = material(resolved_of(recipe_of(3, 4, 64), BOS), 64)
    assert [numbers_in([row]) for row in found.rows] == [{19}, {18}, {17}]
    assert [numbers_in([row]) for row in found.held_out] == [{16}, {15}, {14}]
    # Where only the evaluation's are left, the result is judged by these.
    held_out([70] * 8, stream=False)
    found = material(resolved_of(recipe_of(3, 4, 64), BOS), 64)
    assert [numbers_in([row]) for row in found.rows] == [{7}, {6}, {5}]
    assert [numbers_in([row]) for row in found.held_out] == [{4}, {3}, {2}]


def test_without_perplexity_every_held_out_document_may_be_searched_on(held_out):
    held_out([70] * 3, stream=False)
    recipe = recipe_of(3, 4, 64, suites=())
    assert evaluated_documents(resolved_of(recipe, BOS), None) == frozenset()
    assert numbers_in(material(resolved_of(recipe, BOS), 64).rows) == {0, 1, 2}
    with pytest.raises(RopewalkError, match=r"uses 3 of the 3 .* the other 0 fill 0 rows of 64 .* needs 3"):
        material(resolved_of(recipe_of(3, 3, 64), BOS), 64)


def test_more_of_the_sources_is_read_where_the_evaluation_takes_the_first_part(held_out):
    """Five documents that fill a row are read at first, and the evaluation's rows are longer: it takes fifteen."""
    lengths = [70] * 200
    held_out(lengths, stream=True)
    recipe = recipe_of(1, 2, 512)
    taken = evaluated_documents(resolved_of(recipe, BOS), None)
    assert taken == {hash_of(number) for number in range(15)}
    found = material(resolved_of(recipe, BOS), 64)
    assert not numbers_in(found.rows) & set(range(15))


@pytest.mark.parametrize(("length", "first"), [(30, 8), (30, 20), (30, 21), (50, 10), (9, 40)])
def test_the_sentence_names_as_many_documents_as_it_takes(held_out, length, first):
    resolved = resolved_of(recipe_of(4, 6, 64), BOS)
    held_out([length] * first, stream=False)
    with pytest.raises(
        RopewalkError, match=r"or lower evaluation\.rows or the setting documents of the search"
    ) as raised:
        material(resolved, 64)
    more = int(
        re.search(
            r"hold out about (\d+) more documents \(raise data\.validation_documents\)", str(raised.value)
        )[1]
    )
    held_out([length] * (first + more), stream=False)
    assert len(material(resolved, 64).rows) == 4
    # Exact but for the BOS of documents that go on in the next row, at most one a row, and the document to spare.
    too_many = 2 + -(-(4 + 6) // length)
    held_out([length] * (first + more - too_many - 1), stream=False)
    with pytest.raises(RopewalkError, match="hold out about"):
        material(resolved, 64)


def test_the_refusal_comes_before_any_work(recipe_values):
    search = {"documents": 5, "budget": 15}
    recipe_values["stages"] = [
        {"context": 64, "steps": 1, "rope": {"method": "longrope", "search": search}, "pattern": "full"}
    ]
    recipe_values["evaluation"]["rows"] = 10
    recipe = parse_recipe(yaml.safe_dump(recipe_values), "test")
    with pytest.raises(RopewalkError, match=r"stage 1: the evaluation uses \d+ of the 20 held-out documents"):
        extend(recipe)
    assert not {"recipe.yaml", "evaluation-before.json"} & {
        path.name for path in Path(recipe_values["output"]).iterdir()
    }


@pytest.mark.parametrize("stream", [False, True])
def test_a_later_stage_is_never_evaluated_on_what_a_search_has_seen(held_out, stream):
    """Two rows of 512 tokens would take 15 documents of 70, and the search has taken the last one that was read."""
    held_out([70] * (60 if stream else 15), stream)
    first = recipe_of(1, 2, 64)
    found = material(resolved_of(first, BOS), 64)
    (last,) = numbers_in(found.rows)
    assert found.documents == {hash_of(last)}
    longer = first.model_copy(update={"stages": [*first.stages, recipe_of(1, 2, 512).stages[0]]})
    resolved = resolved_of(longer, BOS)
    assert hash_of(last) in evaluated_documents(resolved, None)
    evaluated = evaluated_documents(resolved, None, found.documents)
    assert evaluated
    assert not evaluated & found.documents
    rows = evaluation_rows(validation_documents(resolved, None, found.documents), 512, BOS, None, 2).rows
    assert last not in numbers_in(rows)
    # From a stream as many documents are read in the place of those that the search keeps.
    assert len(rows) == (2 if stream else 1)


def hash_of(number, length=70):
    """The hash of a document of the fixture."""
    return token_hash(np.full(length, number))


def test_a_run_with_one_more_stage_never_evaluates_on_searched_text(recipe_values, monkeypatch):
    """All that the evaluations of the longer run read, against all that the searches of both runs measure on."""
    search = {"documents": 2, "budget": 9}
    stage = {"context": 64, "steps": 2, "rows_per_step": 2, "pattern": "full"}
    stage["rope"] = {"method": "longrope", "search": search}
    recipe_values["stages"] = [stage]
    recipe_values["data"]["validation_documents"] = 60
    searched, evaluated = [], []
    find, evaluate = material_room.find, measurement_room.evaluate_model

    def finding(model, problem, *others):
        assert problem.data.documents
        searched.append(problem.data.documents)
        return find(model, problem, *others)

    def evaluating(model, settings, documents, *others):
        evaluated.append((settings.lengths["perplexity"], list(documents)))
        return evaluate(model, settings, documents, *others)

    monkeypatch.setattr(material_room, "find", finding)
    monkeypatch.setattr(measurement_room, "evaluate_model", evaluating)
    extend(parse_recipe(yaml.safe_dump(recipe_values), "test"))
    evaluated.clear()
    recipe_values["stages"] = [
        stage,
        {**stage, "context": 256, "rope": {"method": "longrope", "search": search}},
    ]
    recipe_values["stages"][1]["rope"]["search"] = {**search, "budget": 12}
    recipe_values["evaluation"]["rows"] = 3
    extend(parse_recipe(yaml.safe_dump(recipe_values), "test"), resume=True)
    assert len(searched) == 2
    assert len(evaluated) == 2
    for lengths, documents in evaluated:
        assert 256 in lengths
        assert documents
        assert not {token_hash(document) for document in documents} & frozenset().union(*searched)
