"""HELMET's RAG and re-ranking: prompts, what is asked and cut, and scores by task."""

import re
from collections import Counter
from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import Settings
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import LengthTooShort, Sample
from ropewalk.evaluation.tasks.published.helmet import RAG_SUITE, PassageTask
from ropewalk.evaluation.tasks.suite import EVERY_ROW
from tests.evaluation.evaluation_cases import word_tokenizer
from tests.evaluation.tasks.published.helmet_cases import passages, rag_folder, ranking_folder
from tests.evaluation.tasks.published.published_cases import results_of


def samples_of(task: PassageTask, length: int = 8192, count: int = EVERY_ROW, seed: int = 0) -> list[Sample]:
    return list(task.samples(PromptEncoder(word_tokenizer()), length, count, seed))


def test_the_prompt_is_the_published_one_with_two_examples_of_other_questions(tmp_path: Path) -> None:
    task = PassageTask("helmet_rag", "nq", rag_folder(tmp_path))
    for sample in samples_of(task):
        number = sample.index // 2
        shown = [
            f"Document (Title: {each['title']}): {each['text']}"
            for each in passages(50, 49 * (sample.index % 2), 3)
        ]
        shot = (
            r"(?:Document \(Title: T\d+ \{x\}\): (?:right |other ){3}\n\n){3}Question: question (\d)\? of examples\n"
            r"Answer: answer (\d)\n\n"
        )
        found = re.fullmatch(
            "Use the given documents to write a concise and short answer to the question. Write your answer in the "
            rf"following format:\nAnswer: \[answer\]\n\n{shot}{shot}(.+)\n\nQuestion: question {number}\?\n",
            sample.text,
            re.DOTALL,
        )
        assert found is not None
        assert found[1] == found[2] != found[3] == found[4]
        assert found[5] == "\n\n".join(shown)
        assert (sample.answer_prefix, sample.max_new_tokens) == ("Answer:", 20)
        assert sample.references == (f"answer {number}", "The yes")
        assert sample.details["groups"] == {"depth": float(sample.index % 2)}


def test_all_depths_of_a_question_are_asked_together(tmp_path: Path) -> None:
    task = PassageTask("helmet_rag", "nq", rag_folder(tmp_path, 8))
    all_of_them = samples_of(task)
    assert len(all_of_them) == 16
    some = samples_of(task, count=6)
    assert {each.index for each in some} < {each.index for each in all_of_them}
    assert [*Counter(each.details["context"] for each in some).values()] == [2, 2, 2]
    assert samples_of(task, count=4, seed=1) != samples_of(task, count=4)


def test_a_hundred_questions_are_asked_unless_a_number_is_given(tmp_path: Path) -> None:
    task = PassageTask("helmet_rag", "nq", rag_folder(tmp_path, 103, words=1))
    assert len(samples_of(task)) == 200
    assert len(samples_of(task, count=206)) == 206


def test_popular_subjects_are_not_asked_about_and_no_question_is_its_own_example(tmp_path: Path) -> None:
    task = PassageTask("helmet_rag", "popqa", rag_folder(tmp_path, name="popqa"))
    found = samples_of(task)
    assert {each.index // 2 for each in found} == {0, 1, 2, 3}
    for sample in found:
        asked = re.findall(r"Question: question (\d)", sample.text)
        assert len(asked) == len(set(asked)) == 3
        assert "4" not in asked


def test_a_context_that_is_too_long_loses_its_end(tmp_path: Path) -> None:
    task = PassageTask("helmet_rag", "nq", rag_folder(tmp_path, words=60))
    for sample in samples_of(task):
        assert 0.98 < sample.fill <= 1
        assert sample.details["tokens_cut"] > 0
        assert "Document (Title: T0 {x}): " in sample.text
        assert "(Title: T49 {x})" not in sample.text
        assert sample.text.endswith(f"\n\nQuestion: question {sample.index // 2}?\n")


def test_a_length_has_the_passages_of_the_longest_published_length_within_it(tmp_path: Path) -> None:
    rag_folder(tmp_path, count=50)
    rag_folder(tmp_path, count=105)
    task = PassageTask("helmet_rag", "nq", tmp_path)
    for length, count in ((8192, 50), (16383, 50), (16384, 105), (32767, 105)):
        (sample,) = samples_of(task, length, 1)
        assert len(re.findall(r"Document \(Title", sample.text)) == count + 6
    with pytest.raises(
        RopewalkError, match=r"nq at 32768 tokens needs .*k220_dep6\.jsonl, which does not exist"
    ):
        samples_of(task, 32768, 1)
    with pytest.raises(LengthTooShort) as caught:
        samples_of(task, 8191, 1)
    assert caught.value.shortest == 8192


def test_rankings_are_scored_by_what_is_relevant(tmp_path: Path) -> None:
    folder = ranking_folder(tmp_path)
    sample = samples_of(PassageTask("helmet_rerank", "msmarco", folder))[0]
    assert "\n\n[ID: 7] Document: text 7\n\n[ID: 8] Document: text 8\n\n" in sample.text
    assert len(re.findall(r"Query: query \d\nRanking: 2 > 1 > 0\n\n", sample.text)) == 2
    assert sample.text.endswith("\n\nQuery: query 0\n")
    assert sample.answer_prefix == "Ranking:"
    best = " > ".join(str(each) for each in range(3, 43, 4))

    def score(answer: str) -> float:
        return results_of("helmet_rerank", folder, 8192, lambda text: answer)["msmarco"].score

    assert score(f" {best}\nand more") == 100
    assert 0 < score(f" 0 > {best}") < 100
    assert score("0 > 4 > 8") == 0


def test_the_mean_of_rag_is_that_of_all_four(tmp_path: Path) -> None:
    for name in ("nq", "triviaqa", "hotpotqa", "popqa"):
        rag_folder(tmp_path, name=name)
    right = results_of(
        "helmet_rag", tmp_path, 8192, lambda text: "It is answer " + re.findall(r"question ([0-9])", text)[-1]
    )
    assert right["overall"].score == 100
    assert {name: result.score for name, result in right.items()} == dict.fromkeys(right, 100)
    some = results_of("helmet_rag", tmp_path, 8192, lambda text: "yes", ["nq", "popqa"])
    assert [*some] == ["nq", "popqa"]


def test_without_files_it_says_where_they_are(tmp_path: Path) -> None:
    tasks = RAG_SUITE.tasks(Settings(suites=("helmet_rag",)))
    assert tasks["nq"].unavailable() == (
        "it needs --benchmark-data helmet_rag=PATH, the folder data/kilt of data.tar.gz of "
        "https://huggingface.co/datasets/princeton-nlp/HELMET"
    )
    reason = PassageTask("helmet_rag", "nq", tmp_path).unavailable()
    assert reason is not None
    assert "has no nq-train-multikilt_1000_k3_dep6.jsonl, the examples of nq" in reason
