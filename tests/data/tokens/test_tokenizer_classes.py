"""Tokenizer classes of transformers that make parts themselves, read without transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoTokenizer

from ropewalk.data.tokens import tokenizer_classes
from ropewalk.data.tokens.light_tokenizer import light_tokenizer
from ropewalk.data.tokens.tokenise import tokenizer_identity
from ropewalk.data.tokens.tokenizer_classes import (
    AS_IN_FILE,
    OWN_PARTS,
    own_parts,
)
from ropewalk.versions import older_transformers
from tests.data.tokens.tokenizer_classes import table
from tests.versions import NEWEST, needs_transformers

MERGES = [("t", "h"), ("Ġ", "th"), ("Ġth", "e"), ("▁", "th"), ("1", "2"), ("'", "s")]
WORDS = ["<unk>", "<s>", "</s>", "<pad>", "<bos>", "<eos>", "<mask>", "<|endoftext|>", "▁"]
VOCABULARY = {
    token: number
    for number, token in enumerate(
        dict.fromkeys(
            [
                *WORDS,
                *(f"<0x{byte:02X}>" for byte in range(256)),
                *sorted(pre_tokenizers.ByteLevel.alphabet()),
                *map("".join, MERGES),
            ]
        )
    )
}
TEXT = st.lists(
    st.one_of(
        st.text(max_size=6),
        st.sampled_from(
            [
                "the",
                " the",
                "  ",
                "12",
                "123's",
                "\n\n",
                "é",
                "é",
                "▁",
                "नि",
                "</s>",
                "<x>",
                "<bos>",
                " <0x00>",
            ]
        ),
    ),
    max_size=6,
).map("".join)
STATED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "a prefix space": {"add_prefix_space": True},
    "no prefix space": {"add_prefix_space": False},
    "legacy": {"legacy": True},
    "tokens as objects": {
        "unk_token": {"__type": "AddedToken", "content": "<0x00>", "lstrip": True, "normalized": False}
    },
    "no unknown token": {"unk_token": None, "bos_token": None, "add_bos_token": False},
    "added tokens": {
        "eos_token": "<x>",
        "additional_special_tokens": ["<x>", "<y>"],
        "added_tokens_decoder": {
            str(len(VOCABULARY)): {"content": "<x>", "special": True, "normalized": False},
            str(len(VOCABULARY) + 1): {"content": "<y>", "special": True, "normalized": False},
        },
    },
}


def write(folder: Path, declared: str | None, stated: dict[str, Any], model_type: str | None = None) -> Path:
    """A checkpoint whose tokenizer.json has other parts than any class makes."""
    backend = Tokenizer(BPE(VOCABULARY, MERGES, byte_fallback=True))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.Digits()
    backend.add_tokens([AddedToken("<x>", special=True), AddedToken("<y>", special=True)])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    named = {} if declared is None else {"tokenizer_class": declared}
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, **stated}))
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    folder = tmp_path_factory.mktemp("classes")
    found = {}
    for name in OWN_PARTS:
        for number, (what, stated) in enumerate(STATED.items()):
            path = write(folder / f"{name}{number}", f"{name}Fast", stated)
            found[name, what] = getattr(transformers, name).from_pretrained(path), light_tokenizer(str(path))
    return found


@pytest.mark.parametrize("what", STATED)
@pytest.mark.parametrize("name", OWN_PARTS)
@given(text=TEXT)
@example(text="The the\n12's é नि<x>  <bos> </s>")
def test_a_class_that_makes_parts_gives_the_tokens_of_transformers(
    name: str, what: str, text: str, checkpoints: dict[tuple[str, str], Any]
) -> None:
    of_transformers, light = checkpoints[name, what]
    assert light.special_tokens_map == of_transformers.special_tokens_map
    assert tokenizer_identity(light) == tokenizer_identity(of_transformers)
    for add in (True, False):
        ids = of_transformers(text, add_special_tokens=add, verbose=False)["input_ids"]
        assert light(text, add_special_tokens=add)["input_ids"] == ids
        assert light.decode(ids) == of_transformers.decode(ids, clean_up_tokenization_spaces=False)


DECLARED = [
    "GPT2Tokenizer",
    "LlamaTokenizerFast",
    "Qwen2Tokenizer",
    "GemmaTokenizer",
    "PreTrainedTokenizerFast",
    None,
]
TYPES = [
    "llama",
    "mistral",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "gemma3_text",
    "olmo2",
    "gpt2",
    "smollm3",
    "",
]


@pytest.mark.parametrize("declared", DECLARED)
@pytest.mark.parametrize("model_type", TYPES)
def test_the_class_is_the_one_that_transformers_takes(
    declared: str | None, model_type: str, tmp_path: Path
) -> None:
    if model_type == "qwen3_5":
        needs_transformers("5.24", "the class that is taken for Qwen 3.5")
    path = write(tmp_path / "m", declared, {}, model_type or None)
    of_transformers, light = AutoTokenizer.from_pretrained(path), light_tokenizer(str(path))
    text = "The the\n12's é नि<x>  <bos> </s>"
    assert light(text)["input_ids"] == of_transformers(text, verbose=False)["input_ids"]
    assert tokenizer_identity(light) == tokenizer_identity(of_transformers)


def test_the_table_of_model_types_is_that_of_transformers() -> None:
    if (installed := older_transformers(NEWEST)) is not None:
        pytest.skip(f"transformers {installed} knows fewer types than {NEWEST}")
    assert tokenizer_classes._table() == table()


def test_a_checkpoint_that_names_no_class_has_that_of_its_type() -> None:
    assert own_parts("", "gemma2", byte_level=False) is OWN_PARTS["GemmaTokenizer"]
    with pytest.raises(KeyError, match="GPTNeoXTokenizer"):
        own_parts("", "gpt_neox", byte_level=True)


def test_a_class_that_only_transformers_knows_is_named() -> None:
    with pytest.raises(KeyError, match="T5Tokenizer"):
        own_parts("T5TokenizerFast", "", byte_level=False)
    assert all(own_parts(name, "", byte_level=False) is None for name in AS_IN_FILE)
