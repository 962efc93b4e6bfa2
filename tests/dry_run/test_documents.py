"""Rows of a dry run hold what training would pack: the recipe's documents, documents of one length, or one per row."""

import pytest

from ropewalk.data.read.embedded import EMBEDDED
from ropewalk.dry_run.documents import documents_of
from ropewalk.parallel.context import RunContext
from tests.dry_run.cases import model_folder, recipe_of


def lengths_of(recipe, document_length=None):
    documents = documents_of(recipe, 0, document_length, RunContext())
    return documents.words, [row.layout.document_lengths.tolist() for row in documents.rows(recipe.stages[0])]


@pytest.mark.parametrize("pattern", ["anchor", "full"])
def test_documents_of_a_given_length_fill_the_row(tmp_path, pattern):
    recipe = recipe_of(model_folder(tmp_path / "model"), pattern=pattern, rows_per_batch=2, rows_per_step=2)
    room = 512 - (pattern == "anchor")
    words, rows = lengths_of(recipe, 200)
    assert words == "documents of 200 tokens"
    assert rows == [[200, 200, room - 400]] * 2
    assert lengths_of(recipe, 10**6)[1] == [[room]] * 2


def test_without_a_tokenizer_it_says_why_rows_are_one_document(tmp_path):
    words, rows = lengths_of(recipe_of(model_folder(tmp_path / "model")))
    assert words.startswith(
        "one document per row, because the recipe's own documents cannot be read: cannot load a tokenizer"
    )
    assert rows == [[511]]


def test_the_recipes_own_documents_are_packed(tmp_path):
    """The embedded documents have thousands of tokens, so rows of 2,048 hold one or a few, and each row is full."""
    recipe = recipe_of(EMBEDDED, context=2048)
    words, rows = lengths_of(recipe)
    assert "the recipe's" in words
    assert "tokens each on average" in words
    assert [sum(row) for row in rows] == [2047]
