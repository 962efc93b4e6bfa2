"""Tokens are those of transformers without special ones, in order."""

import json
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ropewalk.data.read.documents import Document
from ropewalk.data.tokens.special_ids import special_ids
from ropewalk.data.tokens.tokenise import (
    Encoder,
    SpecialTokens,
    TokenisedDocument,
    load_tokenizer,
    tokenise,
    tokenizer_identity,
)
from ropewalk.errors import RopewalkError
from tests.checkpoint_cases import path_of
from tests.data.tiny_tokenizer import TEXTS, make_tokenizer

DOCUMENTS = [Document(text, f"source {n}", "") for n, text in enumerate([*TEXTS, " ", "end"] * 3)]


def same(first: list[TokenisedDocument], second: list[TokenisedDocument]) -> bool:
    return all(
        a.source == b.source and np.array_equal(a.input_ids, b.input_ids)
        for a, b in zip(first, second, strict=True)
    )


def test_tokens_are_those_of_transformers_without_special_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenised = list(tokenise(DOCUMENTS, tokenizer))
    for document, result in zip(DOCUMENTS, tokenised, strict=True):
        assert result.input_ids.tolist() == tokenizer(document.text, add_special_tokens=False).input_ids
        assert result.input_ids.dtype == np.int32
        assert result.source == document.source


def test_tokens_of_a_real_tokenizer(shared: Path) -> None:
    tokenizer = load_tokenizer(str(shared / "models" / "stories260k"))
    lines = (shared / "text" / "stories.jsonl").read_text(encoding="utf-8").splitlines()[:50]
    documents = [Document(line, "", "") for line in [*lines, *TEXTS]]
    for document, result in zip(documents, tokenise(documents, tokenizer), strict=True):
        assert result.input_ids.tolist() == tokenizer(document.text, add_special_tokens=False).input_ids


def test_batches_change_nothing(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list(tokenise(DOCUMENTS, tokenizer))
    assert same(list(tokenise(DOCUMENTS, tokenizer, batch_documents=1)), alone)
    monkeypatch.setattr("ropewalk.data.tokens.tokenise.BATCH_CHARACTERS", 30)
    assert same(list(tokenise(DOCUMENTS, tokenizer)), alone)
    assert list(tokenise([], tokenizer)) == []


def test_tokenised_documents_pass_through_in_their_places(tokenizer: PreTrainedTokenizerFast) -> None:
    ready = [TokenisedDocument(np.arange(n, dtype=np.int32), f"ready {n}") for n in (0, 3, 258)]
    mixed = [ready[0], DOCUMENTS[0], ready[1], ready[2], *DOCUMENTS[1:], ready[1]]
    result = list(tokenise(mixed, tokenizer, batch_documents=2))
    places = [0, 2, 3, len(mixed) - 1]
    assert [result[place] for place in places] == [mixed[place] for place in places]
    texts = [document for place, document in enumerate(result) if place not in places]
    assert same(texts, list(tokenise(DOCUMENTS, tokenizer)))
    assert same(list(tokenise(ready, tokenizer, batch_documents=1)), ready)


@pytest.mark.parametrize("wrong", [-1, 258, 2**31 - 1])
def test_ids_beyond_the_vocabulary_are_refused(tokenizer: PreTrainedTokenizerFast, wrong: int) -> None:
    foreign = TokenisedDocument(np.array([0, 257, wrong], np.int32), "books")
    message = rf"source 'books' contains token id {wrong}, .* ids from 0 to 257; give"
    with pytest.raises(RopewalkError, match=message):
        list(tokenise([DOCUMENTS[0], foreign], tokenizer))


def test_an_encoder_gives_ids_in_any_process(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = pickle.loads(pickle.dumps(Encoder.of(tokenizer)))
    texts = ["one", "two words", ""]
    encoded = encoder.encode(texts)
    assert [ids.tolist() for ids in encoded] == [
        tokenizer(text, add_special_tokens=False).input_ids for text in texts
    ]
    assert encoder.encode([]) == []
    assert encoder.vocabulary == 258


def test_documents_are_read_no_further_ahead_than_a_batch(tokenizer: PreTrainedTokenizerFast) -> None:
    read = 0

    def endless() -> Iterator[Document]:
        nonlocal read
        while True:
            read += 1
            yield Document("x", "", "")

    stream = tokenise(endless(), tokenizer, batch_documents=10)
    for _ in range(100):
        next(stream)
    assert read <= 100 + 10


def test_truncation_padding_and_post_processing_of_a_tokenizer_file_are_not_applied() -> None:
    plain, loaded = make_tokenizer(), make_tokenizer()
    backend = loaded.backend_tokenizer
    backend.enable_truncation(5)
    backend.enable_padding(length=900)
    backend.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", loaded.bos_token_id)])
    assert same(list(tokenise(DOCUMENTS, loaded)), list(tokenise(DOCUMENTS, plain)))
    assert backend.truncation is not None, "the caller's tokenizer stays as it was"


def test_identity_follows_what_changes_ids_and_nothing_else(tokenizer_folder: str) -> None:
    identity = tokenizer_identity(make_tokenizer())
    assert identity == tokenizer_identity(load_tokenizer(tokenizer_folder))
    assert identity["vocab_size"] == 258
    cut = make_tokenizer()
    cut.backend_tokenizer.enable_truncation(5)
    assert tokenizer_identity(cut) == identity
    grown = make_tokenizer()
    grown.add_tokens(["zz"])
    assert tokenizer_identity(grown)["sha256"] != identity["sha256"]
    assert tokenizer_identity(make_tokenizer(eos=None)) != identity


def test_anchor_is_bos_or_else_eos() -> None:
    full = make_tokenizer()
    assert special_ids(full) == SpecialTokens(full.bos_token_id, full.eos_token_id, full.bos_token_id)
    qwen = make_tokenizer(bos=None)
    assert special_ids(qwen) == SpecialTokens(None, qwen.eos_token_id, qwen.eos_token_id)
    with pytest.raises(RopewalkError, match="neither a BOS nor an EOS"):
        special_ids(make_tokenizer(bos=None, eos=None))


def test_bad_requests_are_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"there is no folder or file .*nowhere"):
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(RopewalkError, match=r"there is no folder or file \./nope"):
        load_tokenizer("./nope")
    with pytest.raises(RopewalkError, match=r"no folder nope/nope, and no tokenizer could be loaded for it"):
        load_tokenizer("nope/nope")
    with pytest.raises(RopewalkError, match="there is no tokenizer in"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    )
    with pytest.raises(RopewalkError, match=r"tokenizer\.json is a Git LFS pointer instead of the file"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_may_lie_beside_weights_and_an_adapter(tokenizer_folder: str, tmp_path: Path) -> None:
    folder = shutil.copytree(tokenizer_folder, tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(RopewalkError, match="an adapter and no model"):
        load_tokenizer(str(folder))
    (folder / "model.safetensors").write_bytes(b"")
    load_tokenizer(str(folder))


@pytest.mark.parametrize("name", ["gemma-3-1b", "phi-2"])
def test_a_tokenizer_that_a_config_alone_makes_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(path_of(name).read_bytes())
    with pytest.raises(
        RopewalkError, match=r"there is no tokenizer in '.*'; add the model's tokenizer\.json"
    ):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "contents", "said"),
    [
        ("tokenizer.json", [], r"tokenizer\.json must contain a JSON object, got list"),
        ("tokenizer.json", 3, r"tokenizer\.json must contain a JSON object, got int"),
        ("tokenizer_config.json", [], r"tokenizer_config\.json must contain a JSON object, got list"),
        ("tokenizer_config.json", {"bos_token": {"a": 1}}, "bos_token has to be either str or AddedToken"),
        ("tokenizer_config.json", {"bos_token": ["<s>"]}, "bos_token has to be either str or AddedToken"),
        ("config.json", {"model_type": "llama", "bos_token_id": {"a": 1}}, "bos_token_id"),
    ],
)
def test_files_that_no_tokenizer_can_be_made_of_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str, contents: object, said: str
) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_text(json.dumps(contents))
    with pytest.raises(RopewalkError, match=f"^cannot load a tokenizer from .*{said}") as caught:
        load_tokenizer(str(tmp_path))
    assert len(str(caught.value).splitlines()) == 1


def test_numbers_of_thousands_of_digits_are_refused_without_advice_on_python(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": ' + 5000 * "9" + "}")
    with pytest.raises(RopewalkError, match=r"value has 5000 digits$"):
        load_tokenizer(str(tmp_path))


def test_more_tokens_than_the_embedding_has_rows_are_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    tokens = len(tokenizer)
    assert len(load_tokenizer(str(tmp_path), tokens)) == tokens
    with pytest.raises(
        RopewalkError, match=f"the tokenizer has {tokens} tokens, .* embedding has only {tokens - 1} "
    ):
        load_tokenizer(str(tmp_path), tokens - 1)
    # A placeholder of images in the tokenizer of a model of texts, as in Gemma 3.
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    image = {"image_token": "<image>", "extra_special_tokens": {"image_token": "<image>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, **image}))
    assert len(load_tokenizer(str(tmp_path), tokens)) == tokens + 1
    # transformers adds a token for a name that the vocabulary lacks.
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": "<new>"}))
    with pytest.raises(RopewalkError, match=f"the tokenizer has {tokens + 1} tokens"):
        load_tokenizer(str(tmp_path), tokens)
