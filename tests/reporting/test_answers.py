"""The pages with all answers hold every sample, and texts in their scripts are strings whatever is in them."""

import json
import re
from dataclasses import replace

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.excerpts import excerpt
from ropewalk.evaluation.predictions import write_predictions
from ropewalk.evaluation.settings import ViewSettings
from ropewalk.reporting.answers import CHUNK, MOST_CHARACTERS, write_answers, write_view
from ropewalk.training.answers import read_sides
from tests.evaluation.test_excerpts import answered, sample
from tests.reporting.test_page import Reader

EVIL = (
    "</script><img src=x onerror=alert(1)>\u2028\u2029\u202e\x1b[31m\ud800 __proto__ \\u0041 ');alert(1);//"
)


OWN_KEYS = {
    *("chunk", "groups", "sample", "tokens", "depth", "difficulty", "whole", "sides"),
    *("name", "score", "new", "finished"),
}


def called(path):
    """The function that a script calls, and its arguments: the script is JSON within a call, and nothing else."""
    text = path.read_text(encoding="ascii")
    function, arguments = re.fullmatch(r"(\w+)\((.*)\);\n", text).groups()
    return function, *json.loads(f"[{arguments}]")


@pytest.fixture
def run(tmp_path):
    text = "Find the key.\n" + "grass " * 2000 + "the key is 42. " + "grass " * 2000 + "The key is"
    run = tmp_path / "run"
    details = {EVIL: EVIL, "difficulty": EVIL}
    before = [answered(text, index=0, answer=" 13", score=0.0), answered("short", index=1, score=1.0)]
    before[1] = replace(before[1], details=details)
    evil = replace(answered("short", index=1, answer=EVIL, score=0.5), details=details)
    write_predictions(run / "predictions-before.jsonl", before)
    write_predictions(run / "predictions-after.jsonl", [answered(text, index=0), evil])
    return run


def test_every_sample_is_there_with_both_answers(run):
    found = write_view(ViewSettings(folder=run))
    assert found.page == run / "answers" / "index.html"
    assert (found.samples, found.paired, found.whole_prompts) == (2, 2, 0)
    function, index = called(run / "answers" / "data" / "index.js")
    assert function == "index"
    assert index["groups"] == [["passkey", 1024, 2]]
    assert [side["name"] for side in index["sides"]] == ["before", "after"]
    assert [side["score"] for side in index["sides"]] == [[0, 1], [1, 0.5]]
    assert called(run / "answers" / "data" / "answers-0.js")[:2] == ("answers", 0)
    first, _ = called(run / "answers" / "data" / "answers-0.js")[2]
    assert first == [["42"], [[[" 13"], [], []], [[" 42"], [], []]]]
    (characters, parts, facts), _ = called(run / "answers" / "data" / "prompts-0.js")[2]
    assert [part for part in parts if isinstance(part, list)] == [["needle", "42"]]
    assert [part for part in parts if isinstance(part, int)] == [10_725, 10_712]
    written = "".join(
        part[1] if isinstance(part, list) else part for part in parts if not isinstance(part, int)
    )
    assert characters == len(written) + 10_725 + 10_712
    assert written.endswith("The key is")
    assert facts == []
    # Once more into the same folder: only other files are not replaced.
    assert write_view(ViewSettings(folder=run)) == found


def test_texts_are_nothing_but_strings_and_the_page_loads_its_own_files_alone(run):
    pages = write_view(ViewSettings(folder=run, prompts=0)).page.parent
    strings = []

    def collect(value):
        if isinstance(value, str):
            strings.append(value)
        elif isinstance(value, list):
            [collect(each) for each in value]
        elif isinstance(value, dict):
            # Keys are the page's own, so none of them is __proto__.
            assert set(value) <= OWN_KEYS
            collect(list(value.values()))

    for path in sorted((pages / "data").iterdir()):
        collect(list(called(path)))
    evil = [each for each in strings if "onerror" in each]
    assert len(evil) == 4
    shown = r"</script><img src=x onerror=alert(1)>\u2028\u2029\u202e\x1b[31m\ud800 __proto__ \u0041 ');alert(1);//"
    assert set(evil) == {shown}
    page = (pages / "index.html").read_text(encoding="utf-8")
    read = Reader(page)
    policies = [value for name, value in read.attributes if name == "content" and "default-src" in str(value)]
    assert policies == [
        "default-src 'none'; script-src 'self'; style-src 'self'; base-uri 'none'; form-action 'none'"
    ]
    loaded = [value for name, value in read.attributes if name in ("src", "href")]
    assert loaded == ["answers.css", "answers.js", "data/index.js"]
    assert all((pages / each).is_file() for each in loaded)
    assert not re.search(r"<script[^>]*>[^<]|<style| style=| on\w+=", page)
    script = (pages / "answers.js").read_text(encoding="utf-8")
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|Function\(|setAttribute\(\"style",
        script,
    )


def test_a_title_from_elsewhere_is_text(run, tmp_path):
    write_answers(tmp_path / "out", EVIL, read_sides(run))
    read = Reader((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "img" not in read.tags
    assert "onerror=alert(1)" in read.text


def test_two_folders_are_paired_by_prompt(run, tmp_path):
    other = tmp_path / "other"
    unlike = replace(answered("another", index=1), prompt_sha256="cd")
    write_predictions(other / "predictions.jsonl", [answered("x", index=0, score=0.5), unlike])
    found = write_view(ViewSettings(folder=run, other=other))
    assert found.page.parent == run / "answers-other"
    assert (found.samples, found.paired) == (3, 1)
    _, index = called(found.page.parent / "data" / "index.js")
    assert index["sample"] == [0, 1, 1]
    assert [side["score"] for side in index["sides"]] == [[1, 0.5, None], [0.5, None, 1]]
    write_predictions(other / "predictions.jsonl", [unlike])
    with pytest.raises(RopewalkError, match="have no prompt in common"):
        write_view(ViewSettings(folder=run, other=other))


def test_long_texts_lose_their_middle_and_chunks_their_surplus(tmp_path):
    huge = "a" * (MOST_CHARACTERS + 5)
    thoughts = f"<think>{huge}</think> 42"
    samples = [answered("q", index=index) for index in range(CHUNK)]
    samples.append(replace(answered("q", index=CHUNK, answer=thoughts), thoughts_opened=False))
    write_predictions(tmp_path / "predictions.jsonl", samples)
    pages = write_view(ViewSettings(folder=tmp_path)).page.parent
    assert [len(called(pages / "data" / f"answers-{number}.js")[2]) for number in (0, 1)] == [CHUNK, 1]
    ((_, ((answer, (head, left_out, tail), _),)),) = called(pages / "data" / "answers-1.js")[2]
    assert answer == ["42"]
    assert (len(head), left_out, len(tail)) == (MOST_CHARACTERS // 2, 12, MOST_CHARACTERS // 2)


def test_turns_spans_and_further_metrics_are_shown(tmp_path):
    asked = sample(
        "Which?", ("a",), earlier=(("user", "Write."), ("assistant", "a b c")), details={"spans": [[26, 27]]}
    )
    whole = asked.whole
    start = whole.index("a b c")
    asked = replace(asked, details={"spans": [[start, start + 3]]})
    nodes = replace(
        answered("x", answer="Final Answer: [b]", score=0.0),
        suite="graphwalks",
        task="bfs",
        metric="f1",
        references=("a",),
        details=asked.details,
        prompt=excerpt(asked),
        prompt_characters=len(whole),
    )
    write_predictions(tmp_path / "predictions.jsonl", [nodes])
    data = write_view(ViewSettings(folder=tmp_path)).page.parent / "data"
    ((_, parts, facts),) = called(data / "prompts-0.js")[2]
    assert parts == [
        ["role", "user"],
        "Write.\n",
        ["role", "assistant"],
        ["needle", "a b"],
        " c\n",
        ["role", "user"],
        "Which?\n",
        ["role", "assistant"],
    ]
    assert facts == []
    ((_, ((_, _, scores),)),) = called(data / "answers-0.js")[2]
    # The first scorer published gives 1 to an answer that shares nothing.
    assert scores == [["f1", 0], ["exact", 0], ["openai", 1]]


def test_answers_of_earlier_versions_have_no_prompt(tmp_path):
    write_predictions(
        tmp_path / "predictions.jsonl", [replace(answered("x"), prompt=(), prompt_characters=None)]
    )
    data = write_view(ViewSettings(folder=tmp_path)).page.parent / "data"
    assert called(data / "prompts-0.js")[2] == [[None, [], []]]


def test_other_files_are_not_replaced(run, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    with pytest.raises(RopewalkError, match="holds other files, which the pages would replace; give --out"):
        write_view(ViewSettings(folder=run, out=out))
    assert (out / "mine.txt").read_text() == "mine"


def test_an_answer_that_waits_for_a_judge_has_no_score(tmp_path):
    waiting = replace(answered("short", index=0), metric="judged", score=0.0)
    judged = replace(waiting, index=1, details={"verdicts": {"a": 0.0}, "judged_by": "a"})
    write_predictions(tmp_path / "predictions-after.jsonl", [waiting, judged])
    write_view(ViewSettings(folder=tmp_path))
    _, index = called(tmp_path / "answers" / "data" / "index.js")
    assert index["sides"][0]["score"] == [None, 0]
