"""Samples are made once for all they depend on, and never taken for those of anything else."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.sample_cache import cached_samples, sample_identity
from ropewalk.evaluation.samples import Sample
from tests.disk_cases import files_no_larger_than
from tests.evaluation.core_cases import CHAT, WILD_TEXTS, asked_sample, byte_tokenizer


@dataclass(frozen=True)
class MadeTask:
    """Wild texts, and a count of how often they were made."""

    suite: str = "ruler"
    name: str = "made"
    max_new_tokens: int = 8
    words: int = 1
    asked: list[int] = field(default_factory=list, compare=False)
    fails_at: int | None = None

    def settings(self) -> Mapping[str, Any]:
        return {"words": self.words}

    def unavailable(self) -> str | None:
        return None

    def samples(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        self.asked.append(length)
        return self._made(encoder, length, count, seed)

    def _made(self, encoder: PromptEncoder, length: int, count: int, seed: int) -> Iterator[Sample]:
        for index in range(count):
            if index == self.fails_at:
                raise RopewalkError("the essays are gone")
            text = WILD_TEXTS[index % len(WILD_TEXTS)].replace("\ud800", "").replace("\udfff", "")
            yield asked_sample(encoder, index, f"{seed} {text * self.words}", length=length, task=self.name)


ENCODER = PromptEncoder(byte_tokenizer(chat=CHAT))
TASK = MadeTask()


def stored(
    task: MadeTask, folder: Path | None, encoder: PromptEncoder = ENCODER, **extra: int
) -> list[Sample]:
    return list(
        cached_samples(task, encoder, **{"length": 256, "count": 6, "seed": 0, **extra}, folder=folder)
    )


def test_samples_are_made_once_and_read_back_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "samples"
    task = MadeTask()
    made = stored(task, None)
    assert stored(task, folder) == made
    (file,) = folder.iterdir()
    content = file.read_bytes()
    assert task.asked == [256, 256]
    assert stored(task, folder) == made
    assert stored(MadeTask(asked=task.asked), folder) == made
    assert task.asked == [256, 256]
    assert (list(folder.iterdir()), file.read_bytes()) == ([file], content)
    # What they are, the samples, and how many there are.
    assert len(content.splitlines()) == 8


@pytest.mark.parametrize("text", WILD_TEXTS)
def test_sample_survives_json(text: str) -> None:
    sample = replace(
        asked_sample(ENCODER, 3), text=text, references=(text, "b"), details={"a": [1, {"b": None}]}
    )
    assert Sample.from_json(json.loads(json.dumps(sample.to_json()))) == sample


def test_nothing_is_kept_without_a_folder_and_nothing_made_before_it_is_asked_for(tmp_path: Path) -> None:
    task = MadeTask()
    stream = cached_samples(task, ENCODER, 256, 6, 0, None)
    assert task.asked == []
    assert next(stream).index == 0
    assert list(tmp_path.iterdir()) == []


DIFFERENT = {
    "seed": (TASK, ENCODER, {"seed": 1}),
    "length": (TASK, ENCODER, {"length": 257}),
    "count": (TASK, ENCODER, {"count": 5}),
    "settings": (MadeTask(words=2), ENCODER, {}),
    "suite": (MadeTask(suite="needle"), ENCODER, {}),
    "task": (MadeTask(name="other"), ENCODER, {}),
    "tokens": (TASK, PromptEncoder(byte_tokenizer(merges=("ab",), chat=CHAT)), {}),
    "bos": (TASK, PromptEncoder(byte_tokenizer(bos=None, chat=CHAT)), {}),
    "chat": (TASK, PromptEncoder(byte_tokenizer(chat=CHAT), chat=True), {}),
    "template": (TASK, PromptEncoder(byte_tokenizer(chat="." + CHAT), chat=True), {}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_whatever_samples_depend_on_makes_them_anew(what: str, tmp_path: Path) -> None:
    task, encoder, extra = DIFFERENT[what]
    stored(TASK, tmp_path)
    stored(TASK, tmp_path, PromptEncoder(byte_tokenizer(chat=CHAT), chat=True))
    found = stored(task, tmp_path, encoder, **extra)
    assert found == stored(task, None, encoder, **extra)
    assert len(list(tmp_path.iterdir())) == (2 if what == "chat" else 3)


def test_a_tokenizer_of_another_name_shares_its_samples(tmp_path: Path) -> None:
    """Also where it has a chat template that is not in use."""
    other = byte_tokenizer(chat="." + CHAT)
    other.name_or_path = "elsewhere"
    task = MadeTask()
    stored(task, tmp_path)
    stored(task, tmp_path, PromptEncoder(other))
    assert task.asked == [256]


def test_identity_is_json_and_names_no_place() -> None:
    identity = sample_identity(TASK, ENCODER, 256, 6, 0)
    assert json.loads(json.dumps(identity)) == identity
    assert identity["settings"] == {"words": 1}


def test_failure_in_the_middle_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"^the essays are gone$"):
        stored(MadeTask(fails_at=3), tmp_path)
    assert list(tmp_path.iterdir()) == []
    with files_no_larger_than(500), pytest.raises(RopewalkError, match=r"cannot write .*: File too large"):
        stored(TASK, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert len(stored(TASK, tmp_path)) == 6


@pytest.mark.parametrize(
    "line", ["{", "{}", "[]", "5", "", '{"suite": 1, "references": []}', '{"references": 3}', "\x00"]
)
def test_file_that_is_damaged_is_named(line: str, tmp_path: Path) -> None:
    stored(TASK, tmp_path)
    (file,) = tmp_path.iterdir()
    lines = file.read_text().split("\n")
    file.write_text("\n".join([*lines[:3], line, *lines[4:]]))
    with pytest.raises(
        RopewalkError, match=r"^cannot read the samples in .*; delete the file to generate the samples again$"
    ):
        stored(TASK, tmp_path)


def test_file_that_ends_early_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    """As when someone copies half of it."""
    stored(TASK, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    with pytest.raises(RopewalkError, match="delete the file"):
        stored(TASK, tmp_path)


def test_file_of_other_samples_under_this_name_is_refused_in_one_sentence(tmp_path: Path) -> None:
    stored(TASK, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text().replace('"seed": 0', '"seed": 1', 1))
    with pytest.raises(
        RopewalkError,
        match=r"were generated with settings that do not match the file's name; delete the file",
    ) as caught:
        stored(TASK, tmp_path)
    assert str(caught.value).count(file.name) == 1
