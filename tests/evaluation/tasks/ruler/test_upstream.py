"""The samples of ``--compat nvidia`` are those of NVIDIA/RULER's own scripts, character by character.

``ruler_fixture.py`` ran the scripts and wrote down digests of what they made.
"""

import hashlib
import json
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.tasks.haystack_sources import split_sentences
from ropewalk.evaluation.tasks.ruler import upstream
from ropewalk.evaluation.tasks.ruler.tasks import RULER, ruler_tasks
from ropewalk.evaluation.tasks.ruler.upstream import upstream_samples, upstream_unavailable
from ropewalk.evaluation.tasks.words import listed_words, word_lists, words_unavailable
from tests.evaluation.ruler_cases import byte_tokenizer, prose, template_tokenizer
from tests.marks import slow_after

FIXTURE = json.loads((Path(__file__).parents[2] / "ruler_upstream.json").read_text())
CASES = [tuple(key.split(" ")) for key in FIXTURE["samples"]]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    if words_unavailable() or word_lists().digest != FIXTURE["word_lists"]:
        pytest.skip("the installed wonderwords has other word lists than upstream ran with")
    essays = tmp_path_factory.mktemp("essays") / "essays.txt"
    essays.write_text(prose(FIXTURE["prose_words"]))
    return ruler_tasks(essays)


def samples_of(task, length, count):
    return list(upstream_samples(task, PromptEncoder(template_tokenizer()), length, count, split_sentences))


@pytest.mark.parametrize(("name", "length"), slow_after(22, CASES))
def test_prompts_and_answers_are_those_of_upstreams_scripts(tasks, name, length):
    expected = FIXTURE["samples"][f"{name} {length}"]
    if expected is None:
        with pytest.raises(
            RopewalkError, match=f"{name}.* at {length} tokens|{name}.* fit in {length} tokens"
        ):
            samples_of(tasks[name], int(length), 1)
        return
    found = samples_of(tasks[name], int(length), len(expected))
    assert [sample.references for sample in found] == [tuple(each["references"]) for each in expected]
    assert [sample.answer_prefix for sample in found] == [each["prefix"] for each in expected]
    assert [s.details["upstream_tokens"] + s.max_new_tokens for s in found] == [
        each["length"] for each in expected
    ]
    digests = [hashlib.sha256((s.text + s.answer_prefix).encode()).hexdigest() for s in found]
    assert digests == [each["sha256"] for each in expected]


def test_fewer_samples_are_the_first_ones_of_more(tasks):
    assert samples_of(tasks["vt"], 2048, 1) == samples_of(tasks["vt"], 2048, 3)[:1]


def test_own_number_of_tokens_has_the_bos_that_upstream_does_not_count(tasks):
    (sample,) = samples_of(tasks["niah_single_1"], 1024, 1)
    assert sample.prompt_tokens == sample.details["upstream_tokens"] + 1
    assert sample.bos_count == 1


@pytest.mark.parametrize("name", ["niah_single_1", "vt", "cwe", "fwe"])
def test_what_upstream_would_try_for_ever_is_refused(tasks, name):
    with pytest.raises(RopewalkError, match="500 tokens" if name == "vt" else "256 tokens"):
        upstream_samples(tasks[name], PromptEncoder(byte_tokenizer()), 256, 1)


def test_words_that_only_upstreams_repository_has_are_refused_by_name(monkeypatch, tasks):
    few = listed_words()[:1000]
    monkeypatch.setattr(upstream, "listed_words", lambda: few)
    with pytest.raises(RopewalkError, match="cwe at 8192 tokens needs more than the 1000 available words"):
        upstream_samples(tasks["cwe"], PromptEncoder(template_tokenizer()), 8192, 1)


def test_essays_need_nltks_own_splitter(monkeypatch):
    import nltk.tokenize

    def missing(text):
        raise LookupError

    monkeypatch.setattr(nltk.tokenize, "sent_tokenize", missing)
    assert "punkt_tab" in upstream_unavailable(RULER["niah_single_2"])
    assert upstream_unavailable(RULER["niah_single_1"]) is None
    monkeypatch.setattr(nltk.tokenize, "sent_tokenize", str.split)
    assert upstream_unavailable(RULER["niah_single_2"]) is None


@pytest.mark.parametrize("count", [0, -1])
def test_no_samples_are_refused(count):
    with pytest.raises(RopewalkError, match=f"1 or more, got {count}"):
        upstream_samples(RULER["vt"], PromptEncoder(template_tokenizer()), 2048, count)
