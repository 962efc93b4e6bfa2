"""What RULERv2's tasks among numbered texts share: samples that keep their question, and room for its answer."""

from pathlib import Path

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import LengthTooShort
from tests.evaluation.evaluation_cases import word_tokenizer
from tests.evaluation.tasks.ruler2.ruler2_cases import TEST_ROWS, samples_of, settings_of

LENGTH = 8000


def test_longer_prompts_have_the_same_question_and_fewer_samples_are_some_of_more(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    short, long = (samples_of(settings, "mv_niah_medium", length, 5) for length in (5000, 9000))
    assert [each.references for each in short] == [each.references for each in long]
    assert samples_of(settings, "mv_niah_medium", 5000, 2) == short[:2]


def test_the_shortest_length_is_enough_for_all_rooms(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    with pytest.raises(LengthTooShort) as caught:
        samples_of(settings, "mk_niah_easy", 300, TEST_ROWS)
    found = samples_of(settings, "mk_niah_easy", caught.value.shortest, TEST_ROWS)
    assert len({each.max_new_tokens for each in found}) > 1
    assert max(each.fill for each in found) == 1
    empty, *sizes = PromptEncoder(word_tokenizer()).counts(
        [("", ""), *((each.references[0], "") for each in found)]
    )
    for size, each in zip(sizes, found, strict=True):
        assert each.max_new_tokens / 4 < size - empty <= each.max_new_tokens / 2


def test_there_are_as_many_samples_as_questions(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match="has 6 questions, one per sample, and 7 samples are requested"):
        samples_of(settings_of(tmp_path), "mk_niah_easy", LENGTH, 7)
