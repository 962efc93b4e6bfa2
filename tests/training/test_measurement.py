"""What a run measures before and after: any suites, at lengths of the recipe's, the run's, or their own."""

from pathlib import Path

import pytest
import yaml

from ropewalk import RopewalkError
from ropewalk.data import load_tokenizer
from ropewalk.evaluation.predictions import read_predictions
from ropewalk.evaluation.record import answers_file
from ropewalk.io.progress import Silent
from ropewalk.reporting import ResultTable
from ropewalk.reporting.run.training import run_tables
from ropewalk.training.measurement import prompt_lengths, requested_lengths
from ropewalk.training.preflight import resolve
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe
from tests.places import ROOT
from tests.training.run_cases import extend

TRAINED, TARGET = 256, 512
DOCUMENTS = ROOT / "tests/recorded/inputs/documents.jsonl"


def recipe_of(output: Path, **evaluation) -> Recipe:
    values = {
        "model": "embedded",
        "output": str(output),
        # Tokenising the embedded documents would take most of a run's time.
        "data": {"sources": [str(DOCUMENTS)], "validation_sources": ["embedded:validation"]},
        "stages": [{"context": TARGET, "steps": 1, "rows_per_step": 1}],
        "evaluation": {"rows": 2, "samples": 2, **evaluation},
    }
    return parse_recipe(yaml.safe_dump(values), "test")


class Noted(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def asked(recipe: Recipe) -> tuple[dict[str, list[int]], list[str]]:
    resolved, reporter = resolve(recipe), Noted()
    return requested_lengths(resolved, prompt_lengths(resolved, reporter)), reporter.notes


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that measures a suite of each kind: of rows, of documents, of prompts, of prompts as long as they are."""
    recipe = recipe_of(
        tmp_path_factory.mktemp("runs") / "suites",
        suites=["perplexity", "needle", "longeval"],
        tasks=["perplexity", "sliding"],
        lengths=[TRAINED],
        perplexity={"most_windows": 1},
        needle={"depths": 2},
        longeval={"lines": [3]},
    )
    return recipe, extend(recipe)


@pytest.mark.slow
def test_a_run_measures_any_suite_and_goes_on_with_its_results(finished):
    recipe, summary = finished
    for when in ("before", "after"):
        found = {(r["suite"], r["task"], r["length"]) for r in summary[when] if r["suite"] != "longeval"}
        assert found == {
            ("perplexity", "perplexity", TARGET),
            ("perplexity", "sliding", TARGET),
            ("needle", "generated", TRAINED),
            ("needle", "teacher_forced", TRAINED),
        }
        (lines,) = [r for r in summary[when] if r["suite"] == "longeval"]
        assert lines["status"] == "ok"
        assert [r["n"] for r in summary[when] if r["suite"] == "needle"] == [4, 4]
    assert extend(recipe, resume=True)["after"] == summary["after"]


def test_the_answers_of_a_run_are_those_that_were_scored(finished):
    recipe, summary = finished
    for when in ("before", "after"):
        answers = read_predictions(Path(recipe.output) / answers_file(when))
        generated = [r for r in summary[when] if r["suite"] == "longeval" or r["task"] == "generated"]
        assert len(answers) == sum(r["n"] for r in generated) > 0
        assert all(a.prompt and a.prompt_characters for a in answers)
        for result in generated:
            own = [a for a in answers if a.key[:3] == (result["suite"], result["task"], result["length"])]
            assert [a.index for a in own] == [sample["index"] for sample in result["samples"]]
            assert [100 * a.score for a in own] == [sample["score"] for sample in result["samples"]]
    kept = (Path(recipe.output) / answers_file("before")).read_bytes()
    extend(recipe, resume=True)
    assert (Path(recipe.output) / answers_file("before")).read_bytes() == kept


def test_the_tables_of_a_run_hold_every_suite_once(finished):
    _, summary = finished
    tables = run_tables(summary)
    assert all(isinstance(table, ResultTable) for table in tables)
    titles = [table.title for table in tables]
    assert len(set(titles)) == len(titles)
    for words in ("Perplexity by position", "Perplexity of documents", "LongEval", "Needle"):
        assert any(words.lower() in title.lower() for title in titles), titles


def test_a_suite_with_lengths_of_its_own_is_asked_for_none(finished):
    recipe, _ = finished
    assert asked(recipe)[0] == {"perplexity": [TARGET], "needle": [TRAINED], "longeval": []}


def test_where_no_lengths_are_given_each_suite_takes_those_that_its_prompts_fit_into(tmp_path):
    lengths, notes = asked(recipe_of(tmp_path / "run", suites=["passkey", "ruler"], tasks=["passkey", "fwe"]))
    assert lengths["passkey"] == [TRAINED, TARGET]
    said = {note.partition(" tokens: ")[0] for note in notes}
    left_out = {length for length in (TRAINED, TARGET) if length not in lengths.get("ruler", [])}
    assert said == {f"ruler is skipped at {length}" for length in left_out}


def test_a_length_that_no_prompt_fits_into_is_refused_where_it_is_given(tmp_path):
    with pytest.raises(RopewalkError, match=r"passkey does not fit in 20 tokens; the shortest length"):
        resolve(recipe_of(tmp_path / "run", lengths=[20]))
    # Lengths are of prompts: without any they say nothing.
    resolve(recipe_of(tmp_path / "run", suites=["perplexity"], lengths=[20]))


def test_a_model_that_always_thinks_is_refused_before_the_run(tmp_path, monkeypatch):
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
    monkeypatch.setattr("ropewalk.training.preflight.load_tokenizer", lambda path, embedding_rows: tokenizer)
    with pytest.raises(
        RopewalkError, match=r"always starts the model's thoughts.*; set evaluation.chat to false"
    ):
        resolve(recipe_of(tmp_path / "run", chat=True))
    # Perplexity generates nothing.
    resolve(recipe_of(tmp_path / "run", chat=True, suites=["perplexity"]))


def test_no_suites_measure_nothing(tmp_path):
    assert asked(recipe_of(tmp_path / "run", suites=[])) == ({}, [])
