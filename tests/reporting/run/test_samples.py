"""The page of prompts and answers has all of them, side by side, whatever is in them."""

import base64
import hashlib
import re

import pytest

from ropewalk.evaluation.answered_samples import write_answers
from ropewalk.reporting.run.samples import write_samples_page
from tests.evaluation.test_answered_samples import answered
from tests.reporting.test_page import Reader

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\u202e\x1b[31m\ud800"


@pytest.fixture
def run(tmp_path):
    text = "Find the key.\n" + "grass " * 2000 + "the key is 42. " + "grass " * 2000 + "The key is"
    write_answers(
        tmp_path,
        "before",
        [answered(text, index=0, answer=" 13", score=0.0), answered(text, index=1, score=1.0)],
    )
    write_answers(
        tmp_path,
        "after",
        [answered(text, index=0, score=1.0), answered(EVIL, index=1, answer=EVIL, score=0.0)],
    )
    return tmp_path


def test_every_sample_is_there_with_both_answers(run):
    path = write_samples_page(run)
    page = path.read_text(encoding="utf-8")
    read = Reader(page)
    assert read.tags.count("details") == 2
    for part in (
        "passkey at 1,024 tokens: 2 samples, 50.0 % correct before, 50.0 % correct after",
        "Sample 0 wrong before, correct after",
        "Sample 1 correct before, wrong after",
        "Answer before, wrong",
        "Answer after, correct",
        " 13",
        "the key is 42.",
        "The key is",
    ):
        assert part in read.text
    assert re.findall(r"\(([\d,]+) characters left out\)", read.text) == ["10,725", "10,712"]
    assert [value for name, value in read.attributes if name == "data-verdict"] == ["better", "worse wrong"]


def test_nothing_in_an_answer_is_markup_and_the_only_script_is_ours(run):
    page = write_samples_page(run).read_text(encoding="utf-8")
    read = Reader(page)
    assert read.tags.count("script") == 1
    assert "img" not in read.tags
    assert "onerror" not in dict(read.attributes)
    assert not set(page) & set("\u202e\x1b")
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = dict(read.attributes)["content"]
    policies = [value for name, value in read.attributes if name == "content" and "default-src" in str(value)]
    assert policy
    assert policies == [
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    ]


def test_a_run_without_answers_has_no_page(tmp_path):
    assert write_samples_page(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_many_and_huge_samples_make_no_huge_page(tmp_path):
    samples = [answered("q " * 5000, index=index, answer="a" * 20_000) for index in range(300)]
    write_answers(tmp_path, "after", samples)
    page = write_samples_page(tmp_path).read_text(encoding="utf-8")
    assert Reader(page).tags.count("details") == 300
    assert len(page) < 5_000_000
    assert "17,000 characters left out" in page
