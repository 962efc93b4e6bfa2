"""LongEval lines: the published prompts of base and chat models, records that fill a length, and their scores."""

import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import ClassVar

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import evaluate_model
from ropewalk.evaluation.backends import Answer, GenerationRequest
from ropewalk.evaluation.model_under_test import ModelUnderTest
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample
from ropewalk.evaluation.settings import Settings
from ropewalk.evaluation.tasks.longeval import PUBLISHED_LINES, LinesTask, Protocol
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.evaluation.tasks.words import key_words
from ropewalk.reporting import evaluation_tables
from tests.evaluation.ruler_cases import TOKENIZERS, demo_tokenizer

HEADER = (
    "Below is a record of lines I want you to remember. Each line begins with 'line <line index>' and contains a "
    "'<REGISTER_CONTENT>' at the end of the line as a numerical value. For each line index, memorize its "
    "corresponding <REGISTER_CONTENT>. At the end of the record, I will ask you to retrieve the corresponding "
    "<REGISTER_CONTENT> of a certain line index. Now the record start:\n\n"
)


def made(
    length: int, count: int, seed: int = 0, lines: int | None = None, protocol: Protocol = "base"
) -> list[Sample]:
    return list(LinesTask(lines, protocol).samples(PromptEncoder(demo_tokenizer()), length, count, seed))


def record(sample: Sample) -> tuple[dict[str, str], str]:
    """Numbers by index in order of the lines, and the index that is asked for, by the published form."""
    assert sample.text.startswith(HEADER)
    body, tail = sample.text.removeprefix(HEADER).split("\n\n")
    asked = re.fullmatch(
        r"Now the record is over\. Tell me what is the <REGISTER_CONTENT> in line (.+)\? I need the number\.",
        tail,
    )
    assert asked is not None
    lines = [re.fullmatch(r"line (.+): REGISTER_CONTENT is <(\d+)>", line) for line in body.split("\n")]
    numbers = {line[1]: line[2] for line in lines if line is not None}
    assert len(numbers) == len(lines), "an index stands twice, or a line is none"
    return numbers, asked[1]


@pytest.mark.parametrize("protocol", ["base", "chat"])
def test_prompt_is_the_published_one(protocol: Protocol) -> None:
    adjectives, nouns = map(set, key_words())
    for sample in made(2048, 8, protocol=protocol):
        numbers, asked = record(sample)
        assert sample.references == (numbers[asked],)
        assert all(1 <= int(number) <= 50_000 for number in numbers.values())
        for name in numbers:
            cuts = [at for at, letter in enumerate(name) if letter == "-"]
            assert any(name[:at] in adjectives and name[at + 1 :] in nouns for at in cuts)
        place = list(numbers).index(asked)
        assert sample.details["line"] == place
        assert sample.details["units"] == len(numbers)
        assert sample.details["depth"] == place / (len(numbers) - 1)
        assert (sample.suite, sample.task) == ("longeval", "lines")
        # LongChat's longeval/utils.py: what it appends for MPT-7B-StoryWriter, and how many tokens it lets it write.
        asks = {
            "base": (f" Line <{asked}>: <REGISTER_CONTENT> is", 15, "first integer"),
            "chat": ("", 100, "last integer"),
        }
        assert (sample.answer_prefix, sample.max_new_tokens, sample.metric) == asks[protocol]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(("length", "protocol"), [(2048, "base"), (3000, "chat"), (8192, "base")])
def test_prompts_fill_their_length_and_never_pass_it(tokenizer: str, length: int, protocol: Protocol) -> None:
    encoder = PromptEncoder(TOKENIZERS[tokenizer]())
    for sample in LinesTask(None, protocol).samples(encoder, length, 5, 1):
        encoded = encoder.encode(sample.text, sample.answer_prefix)
        assert sample.prompt_tokens == len(encoded.input_ids)
        assert sample.bos_count == encoded.bos_count
        assert 0.95 * length <= sample.prompt_tokens + sample.max_new_tokens <= length


def test_a_number_of_lines_is_kept_whatever_the_length() -> None:
    assert PUBLISHED_LINES == (200, 300, 400, 500, 600, 680)
    task, encoder = LinesTask(60), PromptEncoder(demo_tokenizer())
    needed = task.needed_length(encoder, 4, 0)
    samples = made(needed, 4, 0, 60)
    assert [len(record(each)[0]) for each in samples] == [60] * 4
    assert max(each.prompt_tokens for each in samples) + 15 == needed
    for sample in samples:
        assert sample.prompt_tokens == len(encoder.encode(sample.text, sample.answer_prefix).input_ids)
    # More room changes nothing but its own number.
    roomy = made(2 * needed, 4, 0, 60)
    assert [each.text for each in roomy] == [each.text for each in samples]
    assert {each.length for each in roomy} == {2 * needed}
    assert {each.task for each in roomy} == {"lines_60"}
    with pytest.raises(
        RopewalkError, match=f"lines_60 does not fit in {needed - 1} tokens; .* tokenizer is {needed}$"
    ):
        task.samples(encoder, needed - 1, 4, 0)


def test_shortest_length_is_named_and_possible() -> None:
    with pytest.raises(
        RopewalkError, match=r"lines does not fit in 99 tokens; the shortest .* is \d+"
    ) as caught:
        made(99, 6, 3)
    shortest = int(re.findall(r"\d+", str(caught.value))[-1])
    assert len(made(shortest, 6, 3)) == 6
    with pytest.raises(RopewalkError, match="shortest"):
        made(shortest - 1, 6, 3)


def test_sample_depends_on_seed_length_and_number_alone() -> None:
    many = made(2048, 6)
    assert made(2048, 3) == many[:3]
    asked = [record(each)[1] for each in many]
    assert len(set(asked)) == 6
    assert [record(each)[1] for each in made(2048, 6, 1)] != asked
    assert [record(each)[1] for each in made(2049, 6)] != asked
    fixed = made(8192, 4, 0, 40)
    assert made(8192, 2, 0, 40) == fixed[:2]


def test_the_line_is_uniform_over_all_lines() -> None:
    places = [sample.details["line"] for sample in made(8192, 400, 0, 10)]
    # Each of ten lines is asked for 40 times of 400, with a standard deviation of sqrt(400 * 0.1 * 0.9) = 6.
    assert sorted(set(places)) == list(range(10))
    assert all(abs(places.count(line) - 40) < 4 * 6 for line in range(10))


def test_the_last_integer_of_a_chat_models_answer_counts() -> None:
    (sample,) = made(2048, 1, protocol="chat")
    judge = METRICS[sample.metric]
    (number,) = sample.references
    named = f"The <REGISTER_CONTENT> in line 7 is <{number}>."
    for answer, score in ((named, 1), (f"{named} 8", 0), ("", 0), ("none", 0), (number, 1)):
        assert judge(answer, sample.references) == score


def test_the_first_integer_counts_where_a_base_model_goes_on_with_the_record() -> None:
    (sample,) = made(2048, 1)
    judge = METRICS[sample.metric]
    (number,) = sample.references
    for answer, score in (
        (f" <{number}>\nline a-b: REGISTER_CONTENT is <7>", 1),
        (f" <8> <{number}>", 0),
        ("", 0),
    ):
        assert judge(answer, sample.references) == score


def test_the_chat_template_chooses_the_protocol_and_the_result_says_which() -> None:
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[answer]"

    class GoesOn:
        """A model that knows every line and writes as the prompt reads: on with the answer, else on with the record."""

        description: ClassVar[dict[str, str]] = {"kind": "test"}

        def answers(self, requests: Sequence[GenerationRequest]) -> Iterator[Answer]:
            for index, request in enumerate(requests):
                prompt = tokenizer.decode(request.input_ids)
                asked = re.search(r"in line (\S+)\? I need", prompt)
                assert asked is not None
                known = re.search(rf"line {asked[1]}: REGISTER_CONTENT is <(\d+)>", prompt)
                assert known is not None
                begun = prompt.endswith(f" Line <{asked[1]}>: <REGISTER_CONTENT> is")
                answer = f" <{known[1]}>" if begun or "[answer]" in prompt else ""
                more = "" if "[answer]" in prompt else "\nline new-line: REGISTER_CONTENT is <1>"
                yield Answer(index, answer + more)

    for chat, protocol in ((False, "base"), (True, "chat")):
        settings = Settings(suites=("longeval",), lengths=(1024,), samples=3, chat=chat)
        (result,) = evaluate_model(ModelUnderTest(tokenizer, GoesOn()), settings)
        assert (result.score, result.to_json()["details"]["protocol"]) == (100, protocol)
        (table,) = evaluation_tables({"model": [result]})
        assert any(note.startswith(f"{protocol}-model protocol") for note in table.notes)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(RopewalkError, match="lines must be 1 or more, got 0"):
        LinesTask(0)
    with pytest.raises(RopewalkError, match="needs a task with a fixed number of lines"):
        LinesTask().needed_length(PromptEncoder(demo_tokenizer()), 1, 0)
    for task in (LinesTask(), LinesTask(5)):
        with pytest.raises(RopewalkError, match="1 or more, got 0"):
            task.samples(PromptEncoder(demo_tokenizer()), 4096, 0, 0)
    with pytest.raises(RopewalkError, match="unknown LongEval protocol 'auto'; choose base or chat"):
        LinesTask(None, "auto")  # type: ignore[arg-type]
    settings = [LinesTask(lines, way).settings() for lines in (None, 200) for way in ("base", "chat")]
    assert all(a != b for a, b in combinations(settings, 2))
    assert LinesTask().unavailable() is None
