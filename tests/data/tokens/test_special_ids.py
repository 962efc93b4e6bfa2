"""Tokens that settings choose are the tokenizer's own by their text, and are told apart from those of chats."""

import pytest
from transformers import PreTrainedTokenizerFast

from ropewalk.data import PackingSettings, special_ids
from ropewalk.data.settings import RowPolicies
from ropewalk.data.tokens.special_ids import doubtful_tokens, tokens_of_rows
from ropewalk.data.tokens.tokenise import SpecialTokens
from ropewalk.errors import RopewalkError
from tests.data.cases import refusal
from tests.data.tiny_tokenizer import make_tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
END = "<|endoftext|>"


def chat_tokenizer(bos: str | None = "<|im_start|>", eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """A tokenizer like SmolLM2's and Qwen's: bos and eos for chats, and the separator of pretraining."""
    tokenizer = make_tokenizer(bos, eos)
    tokenizer.add_special_tokens({"additional_special_tokens": [END, "<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def test_without_a_choice_the_tokens_are_the_tokenizers() -> None:
    for bos, eos in (("<s>", "</s>"), (None, "</s>"), ("<s>", None)):
        tokenizer = make_tokenizer(bos, eos)
        own = tokenizer.bos_token_id, tokenizer.eos_token_id
        anchor = own[1] if bos is None else own[0]
        assert special_ids(tokenizer) == special_ids(tokenizer, RowPolicies()) == SpecialTokens(*own, anchor)


def test_a_chosen_token_comes_before_the_tokenizers() -> None:
    tokenizer = chat_tokenizer()
    start, end, text = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>", END])
    assert len({start, end, text}) == 3
    for chosen, ids in (
        ({"eos_token": END}, (start, text, start)),
        ({"bos_token": END}, (text, end, text)),
        ({"anchor_token": END}, (start, end, text)),
        ({"bos_token": END, "anchor_token": "<|im_end|>"}, (text, end, end)),
    ):
        assert special_ids(tokenizer, RowPolicies(**chosen)) == SpecialTokens(*ids)
    neither = make_tokenizer(None, None)
    neither.add_special_tokens({"additional_special_tokens": [END]})
    assert special_ids(neither, RowPolicies(bos_token=END)).anchor == neither.convert_tokens_to_ids(END)


def test_what_is_no_special_token_is_refused() -> None:
    tokenizer = chat_tokenizer()
    for text, words in (
        ("<|endoftxt|>", r"'<\|endoftxt\|>' is 12 tokens .* did you mean <\|endoftext\|>\?"),
        # A word of every text marks nothing.
        ("a", r"'a' is an ordinary token of the tokenizer .*; choose from "),
        ("two words", r"'two words' is 9 tokens of"),
    ):
        with pytest.raises(RopewalkError, match=f"^anchor_token: {words}"):
            special_ids(tokenizer, RowPolicies(anchor_token=text))
    with pytest.raises(
        RopewalkError, match=r"neither a BOS nor an EOS .* choose one of its tokens with bos_tok"
    ):
        special_ids(make_tokenizer(None, None))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bos_token": "none"}, "to add no token, set bos to none or eos to false"),
        ({"bos_token": ""}, "bos_token must not be empty"),
        ({"bos_token": END, "bos": "none", "pattern": "full"}, "has no effect with bos none"),
        ({"eos_token": END, "eos": False}, "has no effect with eos false"),
        (
            {"anchor_token": END, "pattern": "full"},
            "has no effect on the pattern full; set pattern to anchor",
        ),
    ],
)
def test_tokens_without_a_use_are_refused(values: dict, message: str) -> None:
    assert message in refusal(PackingSettings, context=8, **values)


def test_settings_without_a_choice_are_written_as_before() -> None:
    before = ["bos", "eos", "tag", "long_documents", "packing", "remainder", "interleave"]
    assert list(RowPolicies().model_dump()) == before
    assert list(PackingSettings(context=8).model_dump()) == [*before, "context", "pattern", "positions"]
    chosen = PackingSettings(context=8, anchor_token=END)
    assert PackingSettings.model_validate(chosen.model_dump()) == chosen


def test_the_tokens_of_rows_in_words() -> None:
    tokenizer = chat_tokenizer()

    def words(tokenizer: PreTrainedTokenizerFast = tokenizer, **settings: object) -> str:
        return ", ".join(map(str, tokens_of_rows(tokenizer, PackingSettings(context=8, **settings))))

    assert words() == "anchor <|im_start|> (bos_token), document end <|im_end|> (eos_token)"
    assert (
        words(eos_token=END)
        == "anchor <|im_start|> (bos_token), document end <|endoftext|> (chosen with eos_token)"
    )
    assert words(anchor_token=END, eos=False) == "anchor <|endoftext|> (chosen with anchor_token)"
    assert words(bos_token=END, eos=False) == "anchor <|endoftext|> (chosen with bos_token)"
    assert words(pattern="full", eos=False) == "document start <|im_start|> (bos_token)"
    assert words(pattern="full", bos="row", eos=False) == "row start <|im_start|> (bos_token)"
    assert words(pattern="full", bos="none", eos=False) == ""
    without = make_tokenizer(None, "</s>")
    assert words(without) == "anchor </s> (eos_token), document end </s> (eos_token)"
    assert words(without, pattern="full") == "document end </s> (eos_token)"


def test_only_marks_of_chats_beside_a_separator_are_doubtful() -> None:
    def doubts(tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
        return [(each.setting, each.likely) for each in doubtful_tokens(tokenizer)]

    assert doubts(chat_tokenizer()) == [("bos_token", END), ("eos_token", END)]
    # Qwen names no BOS; base models name the separator itself.
    assert doubts(chat_tokenizer(bos=None)) == [("eos_token", END)]
    assert doubts(chat_tokenizer(bos=END, eos=END)) == []
    # Without a separator of its own, the mark of chats is the only end that there is.
    chats = make_tokenizer("<|im_start|>", "<|im_end|>")
    chats.chat_template = CHATML
    assert doubts(chats) == []
    assert doubts(make_tokenizer()) == []
    base = chat_tokenizer()
    base.chat_template = None
    assert doubts(base) == []
