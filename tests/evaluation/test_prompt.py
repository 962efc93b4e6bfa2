"""Prompts have one BOS and the tokens that were counted, and the largest that fits is found with few trials."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.normalizers import Lowercase
from transformers import AutoTokenizer

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import ALPHABET, PromptEncoder, answer_in, largest_that_fits
from tests.evaluation.core_cases import CHAT, byte_tokenizer, letter_tokenizer

TEXTS = st.text(st.sampled_from("ab <s>/\n\t é🧵"), max_size=30)
ENCODERS = {
    "bos": PromptEncoder(byte_tokenizer()),
    "template": PromptEncoder(byte_tokenizer(template=True)),
    "no bos": PromptEncoder(byte_tokenizer(bos=None)),
    "chat": PromptEncoder(byte_tokenizer(template=True, chat=CHAT), chat=True),
    "chat without bos": PromptEncoder(byte_tokenizer(chat=CHAT.removeprefix("{{ bos_token }}")), chat=True),
    "thinking": PromptEncoder(byte_tokenizer(chat=CHAT), chat=True, system="a b", thinking=3),
    "merging": PromptEncoder(byte_tokenizer(merges=("aa", "bb", "aaaa"))),
}


@pytest.mark.parametrize("template", [False, True])
def test_bos_stands_once_in_front(template: bool) -> None:
    tokenizer = byte_tokenizer(template=template)
    prompt = PromptEncoder(tokenizer).encode("ab c", " d")
    assert prompt.bos_count == prompt.input_ids.count(tokenizer.bos_token_id) == 1
    assert prompt.input_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(prompt.input_ids[1:]) == prompt.text == "ab c d"


def test_no_bos_where_the_tokenizer_has_none() -> None:
    prompt = PromptEncoder(byte_tokenizer(bos=None)).encode("ab c")
    assert prompt.bos_count == 0
    assert len(prompt.input_ids) == 4


def test_chat_template_brings_its_own_bos_and_the_prefix_opens_the_answer() -> None:
    tokenizer = byte_tokenizer(template=True, chat=CHAT)
    prompt = PromptEncoder(tokenizer, chat=True).encode("ab c", " It is")
    assert prompt.text == "<s>[user]ab c[/][assistant] It is"
    assert prompt.bos_count == prompt.input_ids.count(tokenizer.bos_token_id) == 1


def test_chat_without_a_template_is_refused_and_a_template_alone_is_no_chat() -> None:
    with pytest.raises(RopewalkError, match="has no chat template; remove --chat"):
        PromptEncoder(byte_tokenizer(), chat=True)
    assert PromptEncoder(byte_tokenizer(chat=CHAT)).encode("ab").text == "ab"


THINKING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[/]{% endfor %}[assistant]"
    "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}"
)
"""As Qwen3's: the template writes empty thoughts where the model should not think."""


def test_a_thinking_model_is_told_not_to_think_unless_it_gets_tokens_for_it() -> None:
    tokenizer = byte_tokenizer(chat=THINKING)
    at_once = PromptEncoder(tokenizer, chat=True).encode("Which?", " It is")
    assert at_once.text == "[user]Which?[/][assistant]<think></think> It is"
    # Its turn begins with thoughts, so the beginning of the answer ends the question.
    thinking = PromptEncoder(tokenizer, chat=True, thinking=100).encode("Which?", " It is")
    assert thinking.text == "[user]Which? It is[/][assistant]"


def test_a_server_that_applies_the_template_gets_turns() -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=THINKING), chat=True, system="Be brief.", as_turns=True)
    assert encoder.turns("Which?", " It is") == (("system", "Be brief."), ("user", "Which? It is"))
    assert encoder.encode("Which?", " It is").text.endswith("[user]Which? It is[/][assistant]<think></think>")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>5? No, 7.</think>\n\n 7 ", "7"),
        ("<think>a</think> b <think>c</think> d", "d"),
        ("<think>5? No, 7", ""),
        ("7", "7"),
    ],
)
def test_only_what_follows_the_thoughts_is_the_answer(text: str, answer: str) -> None:
    for thinking in (9, 0):
        encoder = PromptEncoder(byte_tokenizer(chat=THINKING), chat=True, thinking=thinking)
        assert answer_in(text, encoder.thoughts_opened) == answer
    assert answer_in(text, PromptEncoder(byte_tokenizer(chat=THINKING)).thoughts_opened) == text


OPENED = "{% for m in messages %}{{ m.content }}{% endfor %}[assistant]<think>\n"
"""As DeepSeek-R1's and QwQ's: thoughts begin whatever ``enable_thinking`` says."""


def test_thoughts_that_the_template_opens_have_to_end() -> None:
    encoder = PromptEncoder(byte_tokenizer(chat=OPENED), chat=True, thinking=9)
    assert encoder.thoughts_opened
    assert answer_in("5? No, 7", True) == ""
    assert answer_in("5? No, 7</think>7", True) == "7"


def test_a_model_that_thinks_without_tokens_for_it_is_refused() -> None:
    opened, by_default = byte_tokenizer(chat=OPENED), byte_tokenizer(chat=THINKING)
    for as_turns in (False, True):
        with pytest.raises(RopewalkError, match=r"always starts the model's thoughts.*; give more"):
            PromptEncoder(opened, chat=True, as_turns=as_turns).check_thoughts("give more")
    with pytest.raises(
        RopewalkError, match=r"template lets the model think.*; give more, or turn .*server-extra"
    ):
        PromptEncoder(by_default, chat=True, as_turns=True).check_thoughts("give more")
    for tokenizer, settings in (
        (opened, {}),
        (opened, {"chat": True, "thinking": 9}),
        (by_default, {"chat": True}),
        (by_default, {"chat": True, "as_turns": True, "thinking": 9}),
        (by_default, {"chat": True, "as_turns": True, "own_variables": True}),
        # Kimi K2.5's template reads another variable, which only its user knows.
        (opened, {"chat": True, "as_turns": True, "own_variables": True}),
        (byte_tokenizer(chat=CHAT), {"chat": True, "as_turns": True}),
    ):
        PromptEncoder(tokenizer, **settings).check_thoughts("give more")


def test_variables_of_the_user_turn_thinking_off_only_without_tokens_for_it() -> None:
    tokenizer = byte_tokenizer(chat=OPENED)
    for thinking in (0, 9):
        encoder = PromptEncoder(tokenizer, True, thinking=thinking, as_turns=True, own_variables=True)
        assert encoder.thoughts_opened == (thinking > 0)


def test_a_system_prompt_comes_first_and_needs_a_template_that_takes_it() -> None:
    tokenizer = byte_tokenizer(chat=THINKING)
    prompt = PromptEncoder(tokenizer, chat=True, system="Be brief.").encode("Which?")
    assert prompt.text == "[system]Be brief.[/][user]Which?[/][assistant]<think></think>"
    for option, wanted in (
        ("--system-prompt", {"system": "Be brief."}),
        ("--thinking-tokens", {"thinking": 5}),
    ):
        with pytest.raises(RopewalkError, match=f"{option} works only with a chat template; add --chat"):
            PromptEncoder(tokenizer, **wanted)  # type: ignore[arg-type]
    without = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    )
    with pytest.raises(RopewalkError, match=r"System role not supported.*leave out --system-prompt"):
        PromptEncoder(byte_tokenizer(chat=without), chat=True, system="Be brief.")


@pytest.mark.parametrize("name", ENCODERS)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=4))
def test_what_is_counted_is_what_is_encoded(name: str, pieces: list[tuple[str, str]]) -> None:
    encoder = ENCODERS[name]
    prompts = [encoder.encode(text, prefix) for text, prefix in pieces]
    assert encoder.counts(pieces) == [len(prompt.input_ids) for prompt in prompts]
    assert [encoder.count(*piece) for piece in pieces] == encoder.counts(pieces)
    assert [encoder.bos_count(*piece) for piece in pieces] == [prompt.bos_count for prompt in prompts]


def test_truncation_and_padding_that_a_tokenizer_was_saved_with_do_not_count(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.enable_truncation(5)
    tokenizer.backend_tokenizer.enable_padding(pad_id=0, pad_token="!")
    tokenizer.save_pretrained(tmp_path)
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(tmp_path))
    assert encoder.counts([("abcdefghijk", ""), ("ab", "")]) == [12, 3]
    assert len(encoder.encode("abcdefghijk").input_ids) == 12


@pytest.mark.parametrize("before", [None, "false", "true"])
def test_counting_leaves_the_environment_as_it_was(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    if before is not None:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", before)
    ENCODERS["bos"].count("ab")
    assert os.environ.get("TOKENIZERS_PARALLELISM") == before


def test_tokenizer_without_some_letters_is_refused_by_their_names() -> None:
    PromptEncoder(byte_tokenizer()).check_alphabet()
    PromptEncoder(letter_tokenizer(ALPHABET)).check_alphabet()
    with pytest.raises(RopewalkError, match=r"no tokens for the characters '059', which"):
        PromptEncoder(letter_tokenizer("".join(c for c in ALPHABET if c not in "950\n"))).check_alphabet()


def test_tokenizer_that_writes_small_letters_alone_will_do() -> None:
    tokenizer = letter_tokenizer("".join(c for c in ALPHABET if not c.isupper()))
    tokenizer.backend_tokenizer.normalizer = Lowercase()
    PromptEncoder(tokenizer).check_alphabet()


@given(
    st.integers(0, 50),
    st.lists(st.integers(1, 9), min_size=1, max_size=7),
    st.integers(0, 3000),
)
def test_largest_that_fits_is_what_counting_up_finds(base: int, cycle: list[int], room: int) -> None:
    def tokens_of(count: int) -> int:
        whole, rest = divmod(count, len(cycle))
        return base + whole * sum(cycle) + sum(cycle[:rest])

    budget = base + room
    expected = 0
    while tokens_of(expected + 1) <= budget:
        expected += 1
    assert largest_that_fits(tokens_of, budget) == expected


@given(st.integers(0, 200), st.randoms(use_true_random=False))
def test_wild_counts_end_with_a_prompt_that_fits(budget: int, draw: object) -> None:
    """Tokens that rise and fall as they like, and beyond a point are too many."""
    known: dict[int, int] = {0: 0}

    def tokens_of(count: int) -> int:
        return known.setdefault(count, draw.randint(0, 2 * budget + 2))  # type: ignore[attr-defined]

    found = largest_that_fits(tokens_of, budget)
    assert known[found] <= budget
    # One halving in three trials: three times the binary logarithm of the bracket, and its first probe.
    assert len(known) <= 3 * (4 * budget + 16).bit_length() + 4


def test_tokens_that_come_all_at_once_are_found_in_halves() -> None:
    """A line through what is known would creep down one unit at a time."""
    trials: list[int] = []

    def tokens_of(count: int) -> int:
        trials.append(count)
        return 0 if count <= 1000 else 5001

    assert largest_that_fits(tokens_of, 5000) == 1000
    assert len(trials) <= 3 * (4 * 5000 + 16).bit_length() + 4


def test_long_prompts_need_few_trials() -> None:
    trials: list[int] = []

    def tokens_of(count: int) -> int:
        trials.append(count)
        return 60 + 4 * count + count // 3 + count % 7

    found = largest_that_fits(tokens_of, 131_062)
    assert tokens_of(found) <= 131_062 < tokens_of(found + 1)
    # The first trials give the slope; the count is known to within its wobble, and then bracketed.
    assert len(trials) <= 12


def test_prompt_that_never_fits_and_units_without_tokens_end() -> None:
    with pytest.raises(RopewalkError, match="has 9 tokens, more than the limit of 8"):
        largest_that_fits(lambda count: 9 + count, 8)
    assert largest_that_fits(lambda count: 5, 8) > 8


EARLIER = (("user", "a b"), ("assistant", "b"))


@pytest.mark.parametrize("name", ENCODERS)
def test_earlier_turns_are_counted_and_encoded_alike(name: str) -> None:
    encoder = ENCODERS[name]
    prompt = encoder.encode("ab c", " d", EARLIER)
    assert encoder.counts([("ab c", " d", EARLIER), ("ab c", " d")]) == [
        len(prompt.input_ids),
        len(encoder.encode("ab c", " d").input_ids),
    ]
    assert encoder.bos_count("ab c", " d", EARLIER) == prompt.bos_count
    assert encoder.turns("ab c", "", EARLIER)[-3:] == (*EARLIER, ("user", "ab c"))


def test_earlier_turns_are_those_of_the_tokenizers_own_template() -> None:
    tokenizer = byte_tokenizer(template=True, chat=CHAT)
    messages = [{"role": role, "content": text} for role, text in (*EARLIER, ("user", "ab c"))]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert PromptEncoder(tokenizer, chat=True).encode("ab c", "", EARLIER).text == expected


def test_a_base_model_reads_earlier_turns_with_their_roles() -> None:
    assert (
        PromptEncoder(byte_tokenizer()).encode("ab c", "", EARLIER).text
        == "User: a b\nAssistant: b\nUser: ab c\nAssistant:"
    )
