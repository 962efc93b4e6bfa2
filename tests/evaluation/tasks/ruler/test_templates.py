"""What RULER's prompts say, character by character; the literals are the specification's."""

import pytest

from ropewalk.evaluation.tasks.ruler.templates import (
    CWE,
    FWE,
    NOISE_LINE,
    QA,
    listed,
    needle_line,
    niah_prompt,
)
from ropewalk.evaluation.tasks.ruler.word_counting import answered_example, numbered


def test_noise_line():
    assert NOISE_LINE == (
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    )


def test_one_query_with_one_value_is_asked_in_the_singular():
    text, prefix = niah_prompt("numbers", ["old-tree"], 1, "HAY\nSTACK")
    assert text == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the number afterwards.\nHAY\nSTACK\nWhat is the special magic number for old-tree mentioned in the "
        "provided text?"
    )
    assert prefix == " The special magic number for old-tree mentioned in the provided text is"


@pytest.mark.parametrize(
    ("queries", "values", "said"),
    [
        (["old-tree"], 4, "old-tree"),
        (["a-b", "c-d"], 1, "a-b, and c-d"),
        (["a-b", "c-d", "e-f", "g-h"], 1, "a-b, c-d, e-f, and g-h"),
    ],
)
def test_several_answers_are_asked_for_in_the_plural(queries, values, said):
    text, prefix = niah_prompt("uuids", queries, values, "HAY")
    assert text == (
        "Some special magic uuids are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the uuids afterwards.\nHAY\nWhat are all the special magic uuids for "
        + said
        + " mentioned in the "
        "provided text?"
    )
    assert prefix == " The special magic uuids for " + said + " mentioned in the provided text are"


def test_needles_speak_of_the_plural_even_alone():
    assert needle_line("numbers", "old-tree", "1234567") == (
        "One of the special magic numbers for old-tree is: 1234567."
    )


def test_lists_have_the_comma_before_and():
    assert [listed(list("abcd")[:n]) for n in (1, 2, 3)] == ["a", "a, and b", "a, b, and c"]


def test_common_words():
    assert numbered(["one", "two", "three"]) == "1. one 2. two 3. three"
    question = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
        "that appear most often.\n1. one 2. two\nQuestion: What are the 10 most common words in the above list?"
    )
    prefix = " Answer: The top 10 words that appear most often in the list are:"
    assert CWE.text(context="1. one 2. two") == question
    assert CWE.prefix() == prefix
    assert answered_example("1. one 2. two", ["two", "one"]) == question + prefix + " 1. two 2. one\n"


def test_frequent_words():
    assert FWE.text(context="abc ... def") == (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. abc ... def\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text?"
    )
    assert FWE.prefix() == (
        " Answer: According to the coded text above, the three most frequently appeared words are:"
    )


def test_questions_over_documents():
    assert QA.text(context="Document 1:\nText", query="Who?") == (
        "Answer the question based on the given documents. Only give me the answer and do not output any other "
        "words.\n\nThe following are given documents.\n\nDocument 1:\nText\n\nAnswer the question based on the given "
        "documents. Only give me the answer and do not output any other words.\n\nQuestion: Who?"
    )
    assert QA.prefix() == " Answer:"
