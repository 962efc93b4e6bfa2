"""RULER's qa tasks: the published prompt, documents that fill it, and upstream's samples character by character."""

import copy
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.evaluation.tasks.ruler.qa import (
    QuestionTask,
    filling,
    others_in_order,
    qa_tasks,
    question_order,
)
from ropewalk.evaluation.tasks.ruler.upstream import upstream_qa_samples
from tests.evaluation.qa_cases import hotpotqa, squad, write
from tests.evaluation.ruler_cases import TOKENIZERS, demo_tokenizer, template_tokenizer
from tests.evaluation.ruler_fixture import digest
from tests.evaluation.ruler_qa_fixture import FIXTURE

INSTRUCTION = (
    "Answer the question based on the given documents. "
    "Only give me the answer and do not output any other words."
)
UPSTREAM = json.loads(FIXTURE.read_text())["samples"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, QuestionTask]:
    return qa_tasks(*write(tmp_path_factory.mktemp("questions")))


def squad_truth() -> dict[str, tuple[list[str], str, set[str]]]:
    """By question: its answers, its paragraph, and the paragraphs of its article."""
    return {
        qa["question"]: ([a["text"] for a in qa["answers"]], paragraph["context"], of_article)
        for article in squad()["data"]
        for of_article in [{each["context"] for each in article["paragraphs"]}]
        for paragraph in article["paragraphs"]
        for qa in paragraph["qas"]
        if not qa["is_impossible"]
    }


def hotpotqa_truth() -> dict[str, tuple[list[str], list[str]]]:
    """By question: its answer and its paragraphs."""
    return {
        each["question"]: ([each["answer"]], [f"{title}\n{''.join(text)}" for title, text in each["context"]])
        for each in hotpotqa()
    }


def parts(text: str) -> tuple[list[str], str]:
    """The documents of a prompt and its question, by the published template."""
    head = f"{INSTRUCTION}\n\nThe following are given documents.\n\n"
    assert text.startswith(head)
    context, query = text.removeprefix(head).split(f"\n\n{INSTRUCTION}\n\nQuestion: ")
    pieces = re.split(r"(?:^|\n\n)Document (\d+):\n", context)
    assert pieces[0] == ""
    assert pieces[1::2] == [str(number) for number in range(1, len(pieces) // 2 + 1)]
    return pieces[2::2], query


def test_prompt_is_the_published_one(tasks: dict[str, QuestionTask]) -> None:
    encoder = PromptEncoder(demo_tokenizer())
    for name, everything in (("qa_1", squad_truth()), ("qa_2", hotpotqa_truth())):
        for sample in tasks[name].samples(encoder, 4096, 8, 0):
            documents, query = parts(sample.text)
            answers, own, *_ = everything[query]
            assert sample.answer_prefix == " Answer:"
            assert list(sample.references) == answers
            assert set([own] if isinstance(own, str) else own) <= set(documents)
            assert sample.details["units"] == len(documents)
            assert (sample.suite, sample.task, sample.metric) == ("ruler", name, "part")
            assert sample.max_new_tokens == 32
            for depth in sample.details["depths"]:
                start = sample.text.index("Document 1:") + depth * (
                    sample.text.rindex(f"\n\n{INSTRUCTION}") - sample.text.index("Document 1:")
                )
                own_starts = [
                    sample.text.index(f"\n{document}")
                    for document in ([own] if isinstance(own, str) else own)
                ]
                assert min(abs(start - each) for each in own_starts) < 14


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_prompts_fill_their_length_and_never_pass_it(
    tasks: dict[str, QuestionTask], tokenizer: str, name: str
) -> None:
    encoder = PromptEncoder(TOKENIZERS[tokenizer]())
    # Ten paragraphs in single bytes do not fit in 2048.
    shortest = 3000 if (name, tokenizer) == ("qa_2", "bytes") else 2048
    for length in (shortest, 4000, 8192):
        samples = list(tasks[name].samples(encoder, length, 6, 1))
        for sample in samples:
            encoded = encoder.encode(sample.text, sample.answer_prefix)
            assert sample.prompt_tokens == len(encoded.input_ids)
            assert sample.bos_count == encoded.bos_count == 1
            assert 0.95 * length <= sample.prompt_tokens + 32 <= length


def test_a_chat_template_is_counted(tasks: dict[str, QuestionTask]) -> None:
    tokenizer = copy.deepcopy(demo_tokenizer())
    tokenizer.chat_template = (
        "{{ bos_token }}{% for each in messages %}[user]{{ each.content }}[end]{% endfor %}[assistant]"
    )
    encoder = PromptEncoder(tokenizer, chat=True)
    for sample in tasks["qa_1"].samples(encoder, 2048, 4, 0):
        ids = encoder.encode(sample.text, sample.answer_prefix).input_ids
        assert sample.prompt_tokens == len(ids)
        assert 0.95 * 2048 <= len(ids) + 32 <= 2048
        assert tokenizer.decode(ids).endswith("[end][assistant] Answer:")


def test_documents_of_a_few_bytes_fill_as_well(tmp_path: Path) -> None:
    # Numbers of four digits take a third more bytes than a document is counted with; repeated, there are thousands.
    paragraphs = [[str(number), ["a"]] for number in range(9)]
    questions = [{"question": "q", "answer": "a", "context": [each]} for each in paragraphs]
    (tmp_path / "short.json").write_text(json.dumps(questions))
    task = QuestionTask("qa_2", "hotpotqa", str(tmp_path / "short.json"))
    for sample in task.samples(PromptEncoder(TOKENIZERS["bytes"]()), 40_000, 2, 0):
        assert sample.details["units"] > 1000
        assert 0.95 * 40_000 <= sample.prompt_tokens + 32 <= 40_000


def test_paragraphs_of_the_same_article_come_first(tasks: dict[str, QuestionTask]) -> None:
    truth = squad_truth()
    encoder = PromptEncoder(demo_tokenizer())
    for sample in tasks["qa_1"].samples(encoder, 4096, 10, 0):
        documents, query = parts(sample.text)
        others = [each for each in documents if each not in truth[query][2]]
        assert truth[query][2] <= set(documents) or not others
    short = [
        set(parts(s.text)[0]) - truth[parts(s.text)[1]][2] for s in tasks["qa_1"].samples(encoder, 700, 10, 0)
    ]
    # The last ones, chosen for their size, may be of any article.
    assert sum(map(len, short)) <= 2 * len(short)


def test_own_documents_stand_anywhere_and_once(tasks: dict[str, QuestionTask]) -> None:
    encoder = PromptEncoder(demo_tokenizer())
    samples = list(tasks["qa_1"].samples(encoder, 2048, 30, 0))
    depths = [sample.details["depths"] for sample in samples]
    assert all(len(each) == 1 for each in depths)
    assert min(depths)[0] < 0.1
    assert max(depths)[0] > 0.75
    for sample in samples:
        documents, query = parts(sample.text)
        assert documents.count(squad_truth()[query][1]) == 1


def test_too_few_documents_are_repeated_but_for_the_own(tasks: dict[str, QuestionTask]) -> None:
    encoder = PromptEncoder(demo_tokenizer())
    total = len(tasks["qa_1"].questions().documents)
    for sample in tasks["qa_1"].samples(encoder, 32768, 3, 0):
        documents, query = parts(sample.text)
        assert sample.fill >= 0.95
        assert len(set(documents)) == total
        assert sample.details["repeated"] == len(documents) - total > 0
        assert documents.count(squad_truth()[query][1]) == 1
    for sample in tasks["qa_1"].samples(encoder, 2048, 3, 0):
        assert sample.details["repeated"] == 0


def test_sample_depends_on_seed_length_and_number_alone(tasks: dict[str, QuestionTask]) -> None:
    task, encoder = tasks["qa_1"], PromptEncoder(demo_tokenizer())
    many = list(task.samples(encoder, 2048, 40, 0))
    assert list(task.samples(PromptEncoder(demo_tokenizer()), 2048, 3, 0)) == many[:3]
    assert [s.index for s in many] == list(range(40))
    queries = [parts(s.text)[1] for s in many]
    assert len(set(queries)) == 40
    assert [parts(s.text)[1] for s in task.samples(encoder, 2048, 40, 1)] != queries
    # The same questions at every length, from everywhere in the file.
    assert [parts(s.text)[1] for s in task.samples(encoder, 4096, 40, 0)] == queries
    assert list(question_order("qa_1", 1000, 0)) != sorted(question_order("qa_1", 1000, 0))
    assert sorted(question_order("qa_1", 1000, 0)) == list(range(1000))


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
def test_shortest_length_is_named_and_possible(tasks: dict[str, QuestionTask], name: str) -> None:
    encoder = PromptEncoder(demo_tokenizer())
    with pytest.raises(RopewalkError, match=f"{name} does not fit in 50 tokens; the shortest") as caught:
        tasks[name].samples(encoder, 50, 5, 0)
    shortest = int(re.findall(r"\d+", str(caught.value))[-1])
    assert len(list(tasks[name].samples(encoder, shortest, 5, 0))) == 5
    with pytest.raises(RopewalkError, match=f"in {shortest - 1} tokens; the shortest .* is {shortest}$"):
        tasks[name].samples(encoder, shortest - 1, 5, 0)


def test_number_of_samples_is_checked(tasks: dict[str, QuestionTask]) -> None:
    encoder = PromptEncoder(demo_tokenizer())
    for count in (0, 13):
        with pytest.raises(RopewalkError, match=f"qa_2 has 12 questions, .* {count} samples"):
            tasks["qa_2"].samples(encoder, 4096, count, 0)
        with pytest.raises(RopewalkError, match=f"qa_2 has 12 questions, .* {count} samples"):
            upstream_qa_samples(tasks["qa_2"], encoder, 8192, count)
    with pytest.raises(RopewalkError, match="unknown dataset 'nq'; choose from squad, hotpotqa"):
        QuestionTask("qa_3", "nq")  # type: ignore[arg-type]


def test_questions_without_other_documents_are_refused(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(hotpotqa(1)))
    task = QuestionTask("qa_2", "hotpotqa", str(tmp_path / "one.json"))
    with pytest.raises(RopewalkError, match="no documents besides those of one question"):
        task.samples(PromptEncoder(demo_tokenizer()), 8192, 1, 0)


def test_what_is_not_named_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, task in qa_tasks().items():
        reason = task.unavailable()
        assert reason is not None
        assert {"qa_1": "with --squad", "qa_2": "with --hotpotqa"}[name] in reason
        with pytest.raises(RopewalkError, match="cannot run"):
            task.samples(PromptEncoder(demo_tokenizer()), 4096, 1, 0)


def test_settings_tell_data_apart(tasks: dict[str, QuestionTask], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps(squad(7)))
    known = tasks["qa_1"].settings()
    assert json.loads(json.dumps(known)) == known
    assert QuestionTask("qa_1", "squad", str(tmp_path / "other.json")).settings() != known
    assert tasks["qa_1"].unavailable() is None


def test_answers_score(tasks: dict[str, QuestionTask]) -> None:
    for name in ("qa_1", "qa_2"):
        for sample in tasks[name].samples(PromptEncoder(demo_tokenizer()), 4096, 6, 0):
            score = METRICS[sample.metric]
            assert score(f" {sample.references[-1].upper()}.", sample.references) == 1
            assert score("", sample.references) == 0


@pytest.mark.parametrize("case", UPSTREAM)
def test_samples_are_upstreams(tasks: dict[str, QuestionTask], case: str) -> None:
    name, length = case.split(" ")
    encoder = PromptEncoder(template_tokenizer())
    expected = UPSTREAM[case]
    if expected is None:
        # Upstream's script does not end.
        with pytest.raises(
            RopewalkError, match=f"NVIDIA's RULER script cannot make {name} fit in {length} tokens"
        ):
            upstream_qa_samples(tasks[name], encoder, int(length), 4)
        return
    made = upstream_qa_samples(tasks[name], encoder, int(length), 4)
    assert [digest(each.text + each.answer_prefix) for each in made] == [each["sha256"] for each in expected]
    assert [list(each.references) for each in made] == [each["references"] for each in expected]
    assert [each.details["upstream_tokens"] + 32 for each in made] == [each["length"] for each in expected]
    # One BOS more than upstream counts.
    assert [each.prompt_tokens + 31 for each in made] == [each["length"] for each in expected]


def sizes_of(indices: list[int]) -> list[int]:
    """Sizes that look like documents': 40 to 240 tokens."""
    return [40 + index * 97 % 200 for index in indices]


def endless(start: int = 0) -> Iterator[int]:
    while True:
        yield start
        start += 1


@pytest.mark.parametrize("room", [0, 39, 40, 300, 1000, 1013, 20_000])
def test_filling_takes_the_first_and_then_what_fits(room: int) -> None:
    slack = max(8, room // 50)
    chosen = filling(endless(), sizes_of, room, slack)
    taken = sum(sizes_of(chosen))
    assert taken <= room
    if room >= 300:
        assert taken >= room - slack
    # All but the last few are the first ones, in order.
    greedy = []
    for each in endless():
        if sum(sizes_of([*greedy, each])) > room:
            break
        greedy.append(each)
    kept = max(0, len(greedy) - 2)
    assert chosen[:kept] == greedy[:kept]
    assert len(set(chosen)) == len(chosen)


def test_filling_leaves_documents_alone_where_little_room_is_left() -> None:
    assert filling(endless(), lambda indices: [100] * len(indices), 1050, 60) == list(range(10))
    assert filling(iter([]), sizes_of, 1000, 10) == []
    assert filling(iter([5, 6]), lambda indices: [10] * len(indices), 1000, 10) == [5, 6]


def test_others_are_those_of_the_article_then_all_then_again() -> None:
    order = others_in_order([3], [1, 2, 3, 2, 4], 9, random.Random(0))
    first = [next(order) for _ in range(8)]
    assert set(first[:3]) == {1, 2, 4}
    assert set(first[3:]) == {0, 5, 6, 7, 8}
    assert [next(order) for _ in range(16)] == first * 2
    assert list(others_in_order([0, 1], [], 2, random.Random(0))) == []
    starts = [next(others_in_order([0], [], 5, random.Random(seed))) for seed in range(400)]
    # Each of four is first 100 times of 400, with a standard deviation of sqrt(400 / 4 * 3 / 4) = 8.7.
    assert all(abs(starts.count(each) - 100) < 4 * 8.7 for each in (1, 2, 3, 4))
