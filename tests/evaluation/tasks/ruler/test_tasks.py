"""RULER's own samples: they fill their length, and whoever reads them finds the answers."""

import json
import math
import random
import re
from collections import Counter
from itertools import accumulate, product

import pytest

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.tasks.haystack_sources import sentence_ends
from ropewalk.evaluation.tasks.registry import METRICS
from ropewalk.evaluation.tasks.ruler import niah, word_counting
from ropewalk.evaluation.tasks.ruler.tasks import EMBEDDED, PUBLISHED, RULER, ruler_tasks
from ropewalk.evaluation.tasks.ruler.templates import NOISE_LINE
from ropewalk.evaluation.tasks.words import KeyNames, listed_words, words_unavailable
from tests.evaluation.ruler_cases import TOKENIZERS, demo_tokenizer, prose, template_tokenizer

pytestmark = pytest.mark.skipif(words_unavailable() is not None, reason="wonderwords is not installed")

GENERATED = [name for name in PUBLISHED if not name.startswith("qa")]
NEEDLE = re.compile(r"One of the special magic (?:numbers|uuids) for (\S+(?: \S+)*?) is: (\S+)\.")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    essays = tmp_path_factory.mktemp("essays") / "essays.txt"
    essays.write_text(prose(3000))
    return ruler_tasks(essays)


def encoder_of(name):
    return PromptEncoder(TOKENIZERS[name]())


def first_samples(task, length, count=3, seed=0):
    return list(task.samples(PromptEncoder(template_tokenizer()), length, count, seed))


def solved(name, prompt):
    """The answers, read off the prompt by other means than it was made."""
    if name.startswith("niah"):
        asked = re.search(r"special magic \w+ for (.+) mentioned in the provided text\?", prompt)[1]
        keys = re.split(r", and |, ", asked)
        said = NEEDLE.findall(prompt)
        return [value for key in keys for found, value in said if found == key]
    if name == "vt":
        question = prompt.rsplit("Memorize and track", 1)[1]
        value = re.search(r"assigned the value (\d+) in the text above", question)[1]
        names = re.findall(rf"^VAR (\w+) = {value}$", question, re.MULTILINE)
        for name in names:
            names += re.findall(rf"^VAR (\w+) = VAR {name} $", question, re.MULTILINE)
        return names
    if name == "cwe":
        counts = Counter(numbered_words(prompt.rsplit("Below is", 1)[1]))
        return [word for word, _ in counts.most_common(10)]
    text = re.search(r"coded words\. (.*)\nQuestion", prompt)[1]
    return [word for word, _ in Counter(text.split(" ")).most_common(4) if word != "..."]


def numbered_words(text):
    context = text.split("\n")[1]
    return re.split(r" \d+\. ", context.removeprefix("1. "))


@pytest.mark.parametrize(("name", "tokens", "metric"), [
    *((name, 128, "all") for name in GENERATED if name.startswith("niah")),
    ("vt", 30, "all"), ("cwe", 120, "all"), ("fwe", 50, "all"),
])  # fmt: skip
def test_room_for_the_answer_and_metric_are_the_papers(tasks, name, tokens, metric):
    assert tasks[name].max_new_tokens == tokens
    assert tasks[name].name == name
    assert tasks[name].suite == "ruler"
    assert {sample.metric for sample in first_samples(tasks[name], 3000, 1)} == {metric}


def test_all_tasks_of_the_paper_come_in_its_order_and_then_the_embedded_ones():
    assert list(RULER) == [*PUBLISHED, *EMBEDDED]
    assert PUBLISHED == (
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "tokenizer", "length"),
    [
        *product([*GENERATED, EMBEDDED[0]], TOKENIZERS, [2048]),
        # The search is that of short prompts: each task with one tokenizer, which are taken in turn.
        *zip([*GENERATED, EMBEDDED[0]], [*TOKENIZERS] * 4, [9000] * 12, strict=True),
    ],
)
def test_prompts_fill_the_length_and_never_more(tasks, name, tokenizer, length):
    encoder = encoder_of(tokenizer)
    found = list(tasks[name].samples(encoder, length, 3, 0))
    for sample in found:
        assert sample.prompt_tokens == len(encoder.encode(sample.text, sample.answer_prefix).input_ids)
        assert sample.fill <= 1
        # A line of two UUIDs takes more than a twentieth of 2048 bytes, and half a needle would be none.
        coarse = name == "niah_multikey_3" and tokenizer == "bytes" and length == 2048
        assert sample.fill >= (1 - 116 / 2048 if coarse else 0.95)


@pytest.mark.parametrize(("name", "tokenizer"), list(product(GENERATED, TOKENIZERS)))
def test_shortest_length_that_is_named_works_and_one_less_does_not(tasks, name, tokenizer):
    encoder = encoder_of(tokenizer)

    def asked(length):
        return tasks[name].samples(encoder, length, 2, 0)

    with pytest.raises(
        RopewalkError, match=f"^the task {name} does not fit in 100 tokens; the shortest length"
    ) as error:
        asked(100)
    shortest = int(str(error.value).split(" ")[-1])
    assert all(sample.fill <= 1 for sample in asked(shortest))
    with pytest.raises(RopewalkError, match=f"in {shortest - 1} tokens"):
        asked(shortest - 1)


@pytest.mark.parametrize("name", GENERATED)
def test_who_reads_the_prompt_finds_the_answers(tasks, name):
    for sample in first_samples(tasks[name], 6000):
        assert sorted(solved(name, sample.text)) == sorted(sample.references)
        if name == "fwe":
            assert solved(name, sample.text) == list(sample.references)


@pytest.mark.parametrize("name", GENERATED)
def test_all_half_and_none_of_the_references_score_as_many(tasks, name):
    (sample,) = first_samples(tasks[name], 4000, 1)
    score, references = METRICS[sample.metric], sample.references
    half = references[: len(references) // 2]
    assert score(" ".join(references), references) == 1
    assert score(", ".join(half).upper(), references) == len(half) / len(references)
    assert score("", references) == 0


@pytest.mark.parametrize("name", GENERATED)
def test_a_sample_depends_on_seed_length_and_its_own_index(tasks, name):
    found = first_samples(tasks[name], 3000, 3)
    assert first_samples(tasks[name], 3000, 2) == found[:2]
    assert len({sample.text for sample in found}) == 3
    assert not {s.references for s in found} & {
        s.references for s in first_samples(tasks[name], 3000, 3, seed=1)
    }
    assert not {s.references for s in found} & {s.references for s in first_samples(tasks[name], 3001, 3)}


@pytest.mark.parametrize("name", [name for name in GENERATED if name.startswith("niah")])
def test_what_is_asked_does_not_depend_on_the_number_of_units(tasks, name):
    few, many = (tasks[name].draft(random.Random(3), units) for units in (60, 200))
    assert few.references == many.references
    assert few.answer_prefix == many.answer_prefix
    assert len(few.text) < len(many.text)


@pytest.mark.parametrize("name", GENERATED)
def test_settings_and_samples_go_to_json(tasks, name):
    json.dumps(dict(tasks[name].settings()))
    (sample,) = first_samples(tasks[name], 3000, 1)
    json.dumps(sample.to_json())
    assert tasks[name].unavailable() is None


def test_essay_tasks_cannot_run_without_essays(monkeypatch):
    monkeypatch.setattr(niah, "essays_unavailable", lambda source: "no essays")
    without = [name for name in GENERATED if RULER[name].unavailable() == "no essays"]
    assert without == [name.removesuffix("_embedded") for name in EMBEDDED]


def test_prompts_of_a_chat_fit_with_its_template():
    tokenizer = type(demo_tokenizer()).from_pretrained(demo_tokenizer().name_or_path)
    tokenizer.chat_template = (
        "{% for message in messages %}<s>User: {{ message['content'] }}{% endfor %}\nAssistant:"
    )
    encoder = PromptEncoder(tokenizer, chat=True)
    for sample in RULER["niah_single_1"].samples(encoder, 2048, 3, 0):
        assert 0.95 <= sample.fill <= 1
        assert sample.prompt_tokens == encoder.count(sample.text, sample.answer_prefix)


# The haystacks


def context_of(text):
    """What stands between the first line and the last."""
    return text.split("\n", 1)[1].rsplit("\nWhat ", 1)[0]


def test_noise_is_one_line_repeated_with_the_needle_before_one_of_them(tasks):
    for sample in first_samples(tasks["niah_single_1"], 2048, 10):
        lines = context_of(sample.text).split("\n")
        (needle,) = (line for line in lines if line != NOISE_LINE)
        assert NEEDLE.fullmatch(needle)
        assert lines.count(NOISE_LINE) == sample.details["units"]
        assert lines[-1] == NOISE_LINE
        before = "\n".join([*lines[: lines.index(needle)], ""]) if lines[0] != needle else ""
        assert sample.details["depths"] == [round(len(before) / len("\n".join(lines)), 4)]


def test_essays_are_their_first_words_with_needles_between_sentences(tasks):
    words = prose(3000).split(" ") * 3
    for sample in first_samples(tasks["niah_multiquery"], 9000, 6):
        context = context_of(sample.text)
        needles = [match[0] for match in NEEDLE.finditer(context)]
        assert len(needles) == 4
        stretches = [part.split() for part in NEEDLE.split(context)[:: NEEDLE.groups + 1]]
        assert [word for part in stretches for word in part] == words[: sample.details["units"]]
        positions = list(accumulate(len(part) for part in stretches))
        assert set(positions) <= {0, *sentence_ends(words[: positions[-1]])}


def test_depths_reach_both_ends(tasks):
    depths = [s.details["depths"][0] for s in first_samples(tasks["niah_single_1"], 4096, 60)]
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert 0.35 < sum(depths) / 60 < 0.65  # uniform: 0.5 with a standard error of 0.037


def test_needles_among_needles_have_keys_that_nobody_asks_for(monkeypatch, tasks):
    names = KeyNames(["old"], ["tree", "sea", "sky"])
    monkeypatch.setattr(niah, "key_names", lambda: names)
    for index in range(20):
        draft = tasks["niah_multikey_2"].draft(random.Random(index), 50)
        assert solved("niah_multikey_2", draft.text) == list(draft.references)


def test_keys_of_one_prompt_are_distinct(monkeypatch, tasks):
    names = KeyNames(["old"], list("abcd"))
    monkeypatch.setattr(niah, "key_names", lambda: names)
    draft = tasks["niah_multiquery"].draft(random.Random(0), 50)
    assert sorted(draft.details["keys"]) == ["old-a", "old-b", "old-c", "old-d"]


# Variable tracking


def test_the_example_of_variable_tracking_is_right_and_short(tasks):
    encoder = PromptEncoder(template_tokenizer())
    for sample in first_samples(tasks["vt"], 4096):
        example, question = sample.text.split("\n\nMemorize")
        assert question.startswith(" and track")
        asked, answer = example.rsplit("they are:  ", 1)
        assert sorted(answer.split(" ")) == sorted(solved("vt", asked))
        assert all(len(name) == 3 for name in answer.split(" "))
        # The number of lines is found with other names of as many letters, each a token or more.
        assert 400 < encoder.count(example) <= 500 + 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name in sample.references)
        assert len(set(sample.references)) == 5


def test_the_example_takes_at_most_half_of_a_short_length(tasks):
    encoder = PromptEncoder(template_tokenizer())
    (sample,) = first_samples(tasks["vt"], 800, 1)
    assert encoder.count(sample.text.split("\n\nMemorize")[0]) <= 400 + 5


def test_statements_stand_in_order(tasks):
    for sample in first_samples(tasks["vt"], 2048, 5):
        depths = sample.details["depths"]
        assert depths == sorted(set(depths))


# Common words


@pytest.mark.parametrize(
    ("length", "common", "other", "example_words", "example_common", "example_other"),
    [(4095, 6, 1, 20, 3, 1), (4096, 30, 3, 40, 10, 3)],
)
def test_words_are_repeated_as_the_length_asks(
    tasks, length, common, other, example_words, example_common, example_other
):
    example, question = (
        tasks["cwe"].draft(random.Random(1), 60, word_counting.repeats_at(length)).text.split("\nBelow")
    )
    for text, words, most, least in (
        (example, example_words, example_common, example_other),
        ("Below" + question, 60, common, other),
    ):
        counts = Counter(numbered_words(text))
        assert sorted(counts.values()) == [least] * (words - 10) + [most] * 10
        assert set(counts) <= set(listed_words())


def test_the_answer_of_the_example_is_right(tasks):
    (sample,) = first_samples(tasks["cwe"], 3000, 1)
    example = sample.text.split("\nBelow")[0]
    answer = example.split("in the list are: ")[1]
    assert Counter(re.split(r" ?\d+\. ", answer)[1:]) == Counter(
        word for word, times in Counter(numbered_words(example)).items() if times == 3
    )


def test_lists_longer_than_wonderwords_go_on_with_made_up_words_and_say_so(tasks):
    units = len(listed_words()) + 100
    draft = tasks["cwe"].draft(random.Random(1), units, word_counting.SHORT)
    assert draft.details["made_up_words"] == 100
    assert set(draft.references) <= set(listed_words())
    counts = Counter(numbered_words(draft.text.split("\nBelow", 1)[1]))
    assert sorted(counts.values()) == [1] * (units - 10) + [6] * 10
    assert sorted(solved("cwe", draft.text)) == sorted(draft.references)


def test_numbers_go_on_from_one(tasks):
    (sample,) = first_samples(tasks["cwe"], 4000, 1)
    question = sample.text.split("\nBelow")[1]
    numbers = [int(each) for each in re.findall(r"(?:^|\n| )(\d+)\. ", question)]
    assert numbers == list(range(1, len(numbers) + 1))


# Frequent words


@pytest.mark.parametrize("units", [word_counting.FEWEST, 100, 5000])
def test_words_appear_by_zipfs_law(units):
    expected = [int(units / rank**2 / (math.pi**2 / 6)) for rank in range(1, 201)]
    assert word_counting.word_counts(units, 200) == expected


def test_words_that_answer_and_the_next_never_appear_equally_often():
    def in_order(words):
        _, first, second, third, fourth = word_counting.word_counts(words, 5)
        return first > second > third > fourth

    assert all(in_order(words) for words in range(word_counting.FEWEST, 3000))
    assert not in_order(word_counting.FEWEST - 1)


def test_vocabulary_grows_with_the_length_and_its_first_word_is_dots(tasks):
    for length in (2048, 9000):
        (sample,) = first_samples(tasks["fwe"], length, 1)
        assert sample.details["vocabulary"] == (length - 50) // 50
        text = re.search(r"coded words\. (.*)\nQuestion", sample.text)[1].split(" ")
        counts = Counter(text)
        assert counts.most_common(1)[0][0] == "..."
        assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")
        assert sample.details["units"] == len(text)
