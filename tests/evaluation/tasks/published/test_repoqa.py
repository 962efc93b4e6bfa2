"""RepoQA's prompts are the authors', as full as whole lines allow, and its answers are functions of the text."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import LengthTooShort, Sample
from ropewalk.evaluation.tasks.published.repoqa import (
    INSTRUCTION,
    LANGUAGES,
    RepoQa,
    around,
    needles_of,
    ordered,
)
from tests.evaluation.core_cases import byte_tokenizer
from tests.evaluation.evaluation_cases import word_tokenizer
from tests.evaluation.tasks.published.published_cases import results_of
from tests.evaluation.tasks.published.repoqa_cases import code_of, data

RECORDED = json.loads((Path(__file__).parent / "repoqa_upstream.json").read_text())
BYTES = PromptEncoder(byte_tokenizer(bos=None))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("repoqa") / "repoqa-2024-06-23.json"
    path.write_text(json.dumps(data()))
    return path


def samples_of(
    path: Path, length: int, encoder: PromptEncoder = BYTES, language: str = "python"
) -> list[Sample]:
    return list(RepoQa(language, path).samples(encoder, length, 1000, 0))


def context_of(sample: Sample) -> str:
    assert sample.text.startswith(INSTRUCTION)
    assert sample.text.endswith(INSTRUCTION)
    context, between, _ = sample.text.removeprefix(INSTRUCTION).rpartition("\nFunction Description:")
    assert between
    return context


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_stands_around_a_function_is_what_the_authors_put_there(language: str, file: Path) -> None:
    needles = list(needles_of(data(), language))
    recorded = [row for row in RECORDED["prompts"] if row[0] == language]
    assert len(recorded) == 72
    contexts = set()
    for _, number, place, size, sha256 in recorded:
        needle = needles[6 * number + place]
        before, after = around(needle, BYTES, size)
        context = before + needle.code + after
        contexts.add(context)
        assert hashlib.sha256(context.encode()).hexdigest() == sha256, (number, place, size)
    assert len(contexts) > 60


def test_files_are_in_the_authors_order() -> None:
    # Also in cycles, and of a file that imports itself.
    graph = {"a": ["b", "c"], "b": ["c", "a"], "c": ["d", "c"], "d": [], "e": ["b"]}
    assert ordered(graph) == ["d", "c", "b", "a", "e"]
    deep = {str(number): [str(number + 1)] for number in range(5000)}
    assert ordered(deep) == [str(number) for number in range(5000, -1, -1)]


@pytest.mark.parametrize(
    "encoder",
    [BYTES, PromptEncoder(byte_tokenizer(merges=("ee", "..", "::"))), PromptEncoder(word_tokenizer())],
)
def test_prompts_are_as_full_as_whole_lines_allow(file: Path, encoder: PromptEncoder) -> None:
    shortest = max(sample.prompt_tokens for sample in samples_of(file, 2500, encoder)) + 1024
    for length in (2500, shortest, shortest + 77, shortest + 500):
        samples = samples_of(file, length, encoder)
        assert len(samples) == 12
        for sample in samples:
            assert sample.prompt_tokens == encoder.count(sample.text) <= length - 1024
            ((start, end),) = sample.details["spans"]
            right = dict(map(tuple, sample.details["functions"]))[sample.references[0]]
            assert sample.text[start:end].strip() == right.strip()
            assert context_of(sample).count(sample.text[start:end]) == 1


def test_a_length_that_a_function_does_not_fit_is_refused(file: Path) -> None:
    with pytest.raises(LengthTooShort, match="the task python does not fit in 1100 tokens") as raised:
        samples_of(file, 1100)
    assert len(samples_of(file, raised.value.shortest)) == 12
    with pytest.raises(LengthTooShort):
        samples_of(file, raised.value.shortest - 1)


def test_bytes_after_other_characters_are_the_function(tmp_path: Path) -> None:
    value = data(1)
    repo, needle = value["python"][0], value["python"][0]["needles"][0]
    code, path = code_of(repo, needle), needle["path"]
    repo["content"][path] = "# ünïcödé\n" + repo["content"][path]
    for other in repo["needles"]:
        if other["path"] == path:
            for field, more in (("start_byte", 14), ("end_byte", 14), ("start_line", 1), ("end_line", 1)):
                other[field] += more
    (tmp_path / "r.json").write_text(json.dumps(value))
    sample = samples_of(tmp_path / "r.json", 9000)[0]
    ((start, end),) = sample.details["spans"]
    assert sample.text[start:end] == code


def answering(change: Callable[[str], str]) -> Callable[[str], str]:
    """A model that knows which function a prompt describes, and says it changed."""
    known = {
        needle["description"]: code_of(repo, needle)
        for repos in data().values()
        for repo in repos
        for needle in repo["needles"]
    }

    def say(prompt: str) -> str:
        described = re.search(r"Function Description:(.*?)\nBased on", prompt, re.DOTALL)
        assert described is not None
        return f"It is this one:\n```\n{change(known[described[1]])}\n```"

    return say


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with descriptions that tell functions apart."""
    path = tmp_path_factory.mktemp("told") / "data.json.gz"
    with gzip.open(path, "wt") as stream:
        json.dump(data(), stream)
    return path


def test_scores_are_between_nothing_and_all(told: Path) -> None:
    all_right = results_of("repoqa", told, 4000, answering(lambda code: code))
    assert {name: result.score for name, result in all_right.items()} == {
        **dict.fromkeys(LANGUAGES, 100),
        **{f"{language}.repoqa_most_like": 100 for language in LANGUAGES},
        "overall": 100,
    }
    # Half of the code is like its function, but not enough.
    half = results_of("repoqa", told, 4000, answering(lambda code: code[: len(code) // 2]))
    assert {half[language].score for language in LANGUAGES} == {0}
    assert half["rust.repoqa_most_like"].score > 50
    nothing = results_of("repoqa", told, 4000, lambda prompt: "")
    assert {result.score for result in nothing.values()} == {0}
    assert {result.n for name, result in nothing.items() if name in LANGUAGES} == {12}


def test_a_language_without_described_functions_does_not_run(told: Path) -> None:
    found = results_of("repoqa", told, 4000, lambda prompt: "", tasks=["rust", "go"])
    assert found["rust"].status == "ok"
    assert found["go"].status == "not run"
    assert found["go"].reason == f"{told} has no described functions of go"


def without(field: str) -> Any:
    value = data(1)
    del value["python"][0]["needles"][0][field]
    return value


def moved() -> Any:
    value = data(1)
    value["python"][0]["needles"][0] |= {"start_byte": 10**6, "end_byte": 10**6 + 9}
    return value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (without("description"), r"a repository of .* has no 'description'; give repoqa-2024-06-23\.json"),
        (moved(), r"odd values \(.* is not at bytes 1000000 to 1000009 of src/"),
        ({"python": [{"needles": [{}]}]}, "has no 'dependency'"),
        ({"python": 3}, "has odd values"),
    ],
)
def test_a_file_of_another_form_is_refused(value: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(json.dumps(value))
    with pytest.raises(RopewalkError, match=said):
        RepoQa("python", tmp_path / "r.json").unavailable()


def test_missing_packages_are_named(told: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ropewalk.evaluation.tasks.published import repoqa_scores

    monkeypatch.setattr(repoqa_scores, "find_spec", lambda name: None if name.endswith("rust") else name)
    assert RepoQa("python", told).unavailable() == (
        "it needs tree-sitter-rust; run pip install ropewalk[repoqa]"
    )
    assert "--benchmark-data repoqa=PATH" in str(RepoQa("python", None).unavailable())
