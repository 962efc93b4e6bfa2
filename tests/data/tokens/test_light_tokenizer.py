"""Without transformers, a tokenizer has the tokens, the names and the digest that it has with it."""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer, Whitespace
from transformers import AutoTokenizer

from ropewalk.data.read.embedded import demo_model_path, retrieval_model_path
from ropewalk.data.tokens import tokenise
from ropewalk.data.tokens.chat import chat_template
from ropewalk.data.tokens.light_tokenizer import LightTokenizer, light_tokenizer
from ropewalk.data.tokens.tokenise import load_tokenizer, tokenizer_identity
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from tests.data.tiny_tokenizer import TEXTS, make_tokenizer
from tests.places import ROOT, SHARED

FOLDERS = [
    demo_model_path(),
    retrieval_model_path(),
    ROOT / "tests" / "recorded" / "inputs" / "bytes",
    *([SHARED / "models" / "stories260k"] if SHARED.is_dir() else []),
]


@cache
def both(folder: Path) -> tuple[Any, LightTokenizer]:
    return AutoTokenizer.from_pretrained(folder), light_tokenizer(str(folder))


def assert_same(folder: Path, texts: list[str]) -> None:
    of_transformers, light = both(folder)
    assert tokenizer_identity(light) == tokenizer_identity(of_transformers)
    assert light.get_vocab() == of_transformers.get_vocab()
    assert light.get_added_vocab() == of_transformers.get_added_vocab()
    assert light.special_tokens_map == of_transformers.special_tokens_map
    assert light.unk_token_id == of_transformers.unk_token_id
    assert light.chat_template == of_transformers.chat_template
    assert light.name_or_path == of_transformers.name_or_path
    for add in (True, False):
        ids = of_transformers(texts, add_special_tokens=add, verbose=False)["input_ids"]
        assert light(texts, add_special_tokens=add)["input_ids"] == ids
        assert [light(text, add_special_tokens=add)["input_ids"] for text in texts] == ids
        for skip in (True, False):
            options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert [light.decode(each, **options) for each in ids] == of_transformers.batch_decode(
                ids, **options
            )
    # The prompts of an evaluation, and their counts, which size the haystacks.
    one, other = PromptEncoder(light), PromptEncoder(of_transformers)
    assert [one.encode(text) for text in texts] == [other.encode(text) for text in texts]
    assert one.counts([(text, " x") for text in texts]) == other.counts([(text, " x") for text in texts])


SPELLED = [
    "<s>",
    "</s>",
    "<unk>",
    "<0x0A>",
    "<s",
    "▁",
    "The pass key is",
    " ",
    "\n\n",
    "\t",
    "\u00a0",
    "\u200b",
    "é",
    "é",
]
TEXT = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(SPELLED)), max_size=8).map("".join)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@given(texts=st.lists(TEXT, min_size=1, max_size=4))
@example(texts=TEXTS)
def test_tokens_are_those_of_transformers(folder: Path, texts: list[str]) -> None:
    assert_same(folder, texts)


WORDS = {word: number for number, word in enumerate(["[UNK]", "a", "b", "##b", "long", "text", "</s>"])}
BACKENDS = {
    "WordLevel": lambda: Tokenizer(WordLevel(WORDS, unk_token="[UNK]")),
    "WordPiece": lambda: Tokenizer(WordPiece(WORDS, unk_token="[UNK]")),
    "BPE": lambda: Tokenizer(BPE(WORDS, [], unk_token="[UNK]")),
    "Unigram": lambda: Tokenizer(Unigram([(word, -float(n)) for word, n in WORDS.items()], unk_id=0)),
}
FILES: dict[str, dict[str, Any]] = {
    "nothing beside": {},
    "named tokens that the vocabulary lacks": {
        "tokenizer_config.json": {"bos_token": "<b>", "pad_token": "<p>"}
    },
    "no special tokens in text": {
        "tokenizer_config.json": {"bos_token": "<b>", "split_special_tokens": True}
    },
    "named tokens of the vocabulary": {"tokenizer_config.json": {"eos_token": "</s>", "unk_token": "[UNK]"}},
    "tokens as objects": {
        "tokenizer_config.json": {
            "bos_token": {
                "__type": "AddedToken",
                "content": "<b>",
                "lstrip": True,
                "normalized": False,
                "special": True,
            },
            "add_bos_token": True,
        }
    },
    "added tokens by id": {
        "tokenizer_config.json": {
            "eos_token": "<e>",
            "added_tokens_decoder": {
                "8": {"content": "<late>", "special": False, "normalized": True, "rstrip": True},
                "7": {"content": "<e>", "special": False, "normalized": False},
                "1": {"content": "a", "special": True, "normalized": False},
            },
        },
        "special_tokens_map.json": {"eos_token": "ignored beside added_tokens_decoder"},
    },
    "older files": {
        "tokenizer_config.json": {"bos_token": "<b>"},
        "special_tokens_map.json": {"bos_token": {"content": "<c>", "lstrip": False, "normalized": False}},
        "added_tokens.json": {"<y>": 8, "<c>": 7},
    },
    "more special tokens": {
        "tokenizer_config.json": {"additional_special_tokens": ["<x>", "a"], "image_token": "<i>"}
    },
    "special tokens by name": {"tokenizer_config.json": {"extra_special_tokens": {"sound_token": "<z>"}}},
}


@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
@pytest.mark.parametrize("kind", BACKENDS)
def test_every_file_of_a_tokenizer_counts_as_for_transformers(
    kind: str, files: dict[str, Any], tmp_path: Path
) -> None:
    backend = BACKENDS[kind]()
    backend.pre_tokenizer = BertPreTokenizer() if kind == "WordPiece" else Whitespace()
    backend.add_tokens([AddedToken("own", special=False)])
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    backend.save(str(tmp_path / "tokenizer.json"))
    for name, value in {"config.json": {"model_type": "llama"}, **files}.items():
        (tmp_path / name).write_text(json.dumps(value))
    of_transformers, light = AutoTokenizer.from_pretrained(tmp_path), light_tokenizer(str(tmp_path))
    assert tokenizer_identity(light) == tokenizer_identity(of_transformers)
    assert light.special_tokens_map == of_transformers.special_tokens_map
    for text in ("a <b>long <e> text", "<late>  a<c>b<x>ownown <y>", "<i><z></s>[UNK]zz"):
        for add in (True, False):
            ids = of_transformers(text, add_special_tokens=add, verbose=False)["input_ids"]
            assert light(text, add_special_tokens=add)["input_ids"] == ids


def saved(folder: Path, **files: Any) -> Path:
    """A copy of a small tokenizer whose files beside ``tokenizer.json`` are replaced."""
    make_tokenizer().save_pretrained(folder)
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


TEMPLATES = {
    "in the config": ({"tokenizer_config": {"chat_template": "{{ a }}"}}, {}),
    "several in the config": (
        {
            "tokenizer_config": {
                "chat_template": [{"name": "default", "template": "d"}, {"name": "t", "template": "u"}]
            }
        },
        {},
    ),
    "a file before the config": (
        {"tokenizer_config": {"chat_template": "old"}},
        {"chat_template.jinja": "ü{{ b }}"},
    ),
    "several files": ({}, {"chat_template.jinja": "d", "additional_chat_templates/rag.jinja": "r"}),
    "none named default": ({}, {"additional_chat_templates/rag.jinja": "r"}),
}


@pytest.mark.parametrize(("config", "files"), TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_is_found_where_transformers_finds_it(
    config: Any, files: Any, tmp_path: Path
) -> None:
    saved(tmp_path, **config)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    of_transformers, light = AutoTokenizer.from_pretrained(tmp_path), light_tokenizer(str(tmp_path))
    assert light.chat_template == of_transformers.chat_template
    if "default" in files or light.chat_template != {"rag": "r"}:
        assert chat_template(light) == chat_template(of_transformers)
    else:
        with pytest.raises(RopewalkError, match="several chat templates, and none with the name default"):
            chat_template(light)


def test_it_is_loaded_where_transformers_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenise, "is_installed", lambda package: package != "transformers")
    assert type(load_tokenizer(str(demo_model_path()))) is LightTokenizer
    assert type(load_tokenizer("embedded")) is LightTokenizer
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(
        RopewalkError, match=r"there is no tokenizer.json in .*empty, and without transformers"
    ):
        load_tokenizer(str(empty))
    with pytest.raises(
        RopewalkError, match=r"there is no folder no/such, and no tokenizer could be loaded for it"
    ):
        load_tokenizer("no/such")


def test_what_it_cannot_read_as_transformers_does_is_refused(tmp_path: Path) -> None:
    def refused(match: str, **files: Any) -> None:
        with pytest.raises(RopewalkError, match=match):
            light_tokenizer(str(saved(tmp_path / "t", **files)))
        shutil.rmtree(tmp_path / "t")

    refused(
        "has a T5Tokenizer, which only transformers builds",
        tokenizer_config={"tokenizer_class": "T5TokenizerFast"},
    )
    refused(r"tokenizer_config.json must contain a JSON object, got list", tokenizer_config=[])
    refused(r"cannot load a tokenizer from '.*t'", tokenizer={"version": "1.0"})
    refused(
        r"cannot load a tokenizer from '.*t'", tokenizer_config={"added_tokens_decoder": {"9": {"text": "x"}}}
    )
    refused(r"cannot load a tokenizer from '.*t'", tokenizer_config={"bos_token": 3})


def test_the_hub_is_asked_for_the_files_of_a_tokenizer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(demo_model_path())

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert light_tokenizer("org/model").name_or_path == "org/model"
    ((name, patterns),) = asked
    assert name == "org/model"
    assert all("token" in each or "template" in each or each == "config.json" for each in patterns)
