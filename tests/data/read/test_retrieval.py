"""Documents that train retrieval: they are the benchmarks' prompts, and their answers stand in them."""

import random
import re

import pytest

from ropewalk.data.read.embedded import demo_model_path
from ropewalk.data.read.identity import embedded_corpus
from ropewalk.data.read.retrieval import ExamWriter, retrieval_documents
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.tasks.passkey import PasskeyTask
from ropewalk.evaluation.tasks.ruler.niah import NeedleTask
from ropewalk.evaluation.tasks.ruler.vt import TrackingTask

WORDS = (("bright", "calm", "late"), ("river", "stone", "cloud", "lamp", "harbour"))
NEEDLE = re.compile(r"One of the special magic numbers for (\S+) is: (\d{7})\.")


@pytest.fixture
def writer():
    return ExamWriter(random.Random(5), WORDS)


@pytest.fixture(scope="module")
def encoder():
    from transformers import AutoTokenizer

    return PromptEncoder(AutoTokenizer.from_pretrained(demo_model_path(), local_files_only=True))


def shape_of(text):
    """A prompt with placeholders for its keys, names and numbers."""
    text = re.sub(r"[\w']+(-[\w']+)+(?= is:| mentioned)", "KEY", text)
    return re.sub(r"\b(?!VAR)[A-Z]{3,5}\b", "NAME", re.sub(r"\d+", "0", text))


def own_prompt(task, encoder):
    sample = next(iter(task.samples(encoder, 1024, 1, seed=11)))
    return sample.text + sample.answer_prefix, sample


def first_prompt(exam):
    return exam.context + exam.questions[0][0]


@pytest.mark.parametrize("haystack", ["noise", "needle"])
def test_needles_are_rulers_prompt(encoder, writer, haystack):
    prompt, sample = own_prompt(NeedleTask("niah", haystack), encoder)
    units = sample.details["units"]
    keys, noise = (1, units) if haystack == "noise" else (1 + units, 0)
    words = [f"word{number}" for number in range(1000)]
    found = first_prompt(ExamWriter(writer.rng, (words, words)).needles(keys, noise, 1))
    assert sorted(shape_of(found).split("\n")) == sorted(shape_of(prompt).split("\n"))


def test_passkey_is_the_passkey_prompt(encoder, writer):
    prompt, _ = own_prompt(PasskeyTask(), encoder)
    found = first_prompt(writer.passkey(9))
    assert [shape_of(found).split("\n")[n] for n in (0, 2, 4)] == [
        shape_of(prompt).split("\n")[n] for n in (0, 2, 4)
    ]
    assert found.count("There and back again.") >= 1


def test_two_chains_are_the_prompt_of_variable_tracking(encoder, writer):
    prompt, sample = own_prompt(TrackingTask(), encoder)
    example = writer.chain(3, sample.details["example_units"])
    asked = writer.chain(5, sample.details["units"])
    found = f"{example.text}\n\n{first_prompt(asked)}"
    assert sorted(shape_of(found).split("\n")) == sorted(shape_of(prompt).split("\n"))


def test_answers_are_what_the_text_says(writer):
    exam = writer.needles(6, 3, 4)
    said = dict(NEEDLE.findall(exam.context))
    assert len(said) == 6
    assert len(exam.questions) == 4
    for question, answer in exam.questions:
        (key,) = {key for key in said if f" for {key} mentioned" in question}
        assert answer == f" {said[key]}"
    chain = writer.chain(4, 3)
    names = chain.questions[0][1].split()
    assert [*re.findall(r"^VAR (\w+) = ", chain.context, re.M)] == names
    assert len(set(names)) == 5


def test_documents_are_the_same_each_time_and_of_all_kinds():
    documents = list(retrieval_documents())
    again = retrieval_documents()
    assert [next(again) for _ in range(20)] == documents[:20]
    beginnings = {document.text[:30] for document in documents}
    assert len(beginnings) == 3
    assert {document.source for document in documents} == {"retrieval"}
    assert sum(len(document.text) for document in documents) < 12_000_000
    assert embedded_corpus("embedded:retrieval-documents")[:3] == documents[:3]


def test_an_unknown_part_of_the_embedded_corpus_is_refused_by_name():
    with pytest.raises(RopewalkError, match=r"'embedded:retrieval'; choose one of .*retrieval-documents"):
        embedded_corpus("embedded:retrieval")
