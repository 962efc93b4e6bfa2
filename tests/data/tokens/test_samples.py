"""Samples of token files tell ids of this tokenizer from those of another."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from ropewalk.data import PackingSettings, StatsConfig, stats
from ropewalk.data.settings import SourceSpec
from ropewalk.data.tokens.samples import name_differs, sample_tokens
from ropewalk.errors import RopewalkError
from ropewalk.parallel.context import RunContext
from ropewalk.reporting.data_tables import samples_sentence, samples_table
from tests.data.cases import Job
from tests.data.read.read_cases import write_parquet

WORDS = ["the cat", "the hat on the cat", "a cat sat on the hat, and that was that"]


def with_merges(*pairs: str, lower: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer that merges these pairs of characters first."""
    pieces = [*sorted(ByteLevel.alphabet()), "th", "at", "ha"]
    backend = Tokenizer(BPE({piece: n for n, piece in enumerate(pieces)}, [tuple(pair) for pair in pairs]))  # type: ignore[misc]
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    if lower:
        backend.normalizer = Lowercase()
    backend.add_special_tokens(["<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


OWN = with_merges("th", "at")
OTHER = with_merges("ha")


def store(path: Path, documents: list[list[int]]) -> SourceSpec:
    """A .ds file with an index and metadata."""
    path.write_bytes(np.array([i for ids in documents for i in ids], "<u2").tobytes())
    path.with_name(path.name + ".index").write_bytes(
        np.cumsum(list(map(len, documents))).astype("<u8").tobytes()
    )
    count = sum(map(len, documents))
    path.with_name(path.name + ".metadata").write_text(f"someone/own|2\n{count}\n{count} T")
    return SourceSpec(path=str(path))


def encoded(tokenizer: Any, *texts: str) -> list[list[int]]:
    return [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]


def test_ids_of_this_tokenizer_come_back(tmp_path: Path) -> None:
    samples = sample_tokens([store(tmp_path / "a.ds", encoded(OWN, *WORDS))], OWN)
    assert [sample.comparison for sample in samples] == ["same"] * 3
    assert [sample.text for sample in samples] == WORDS
    assert {sample.stated_tokenizer for sample in samples} == {"someone/own"}


def test_ids_of_another_tokenizer_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    spec = store(tmp_path / "a.ds", encoded(OTHER, *WORDS))
    pattern = (
        r"a\.ds: document 0: at token \d+, the document has id .*, but .* gives .*\(3 of 3 .*'someone/own'"
    )
    with pytest.raises(RopewalkError, match=pattern):
        sample_tokens([spec], OWN)
    with pytest.raises(RopewalkError, match=pattern):
        Job.of([spec], OWN, PackingSettings(context=8)).pack(tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_a_document_that_was_cut_differs_only_at_its_ends(tmp_path: Path) -> None:
    ids = OWN("that hat, that cat, that hat")["input_ids"]
    # The cut merges differently: `h`, `at` where the whole has `th`.
    assert OWN.backend_tokenizer.token_to_id("th") == ids[0]
    cut = [*OWN("t")["input_ids"], *OWN("h")["input_ids"], *ids[1:]]
    samples = sample_tokens([store(tmp_path / "a.ds", [cut])], OWN)
    assert [sample.comparison for sample in samples] == ["same"]


def test_some_documents_may_have_been_tokenised_in_pieces(tmp_path: Path) -> None:
    spec = store(tmp_path / "a.ds", [*encoded(OWN, WORDS[2]), *encoded(OTHER, WORDS[1])])
    assert [sample.comparison for sample in sample_tokens([spec], OWN)] == ["same", "different"]


def test_one_repetitive_document_does_not_excuse_the_others(tmp_path: Path) -> None:
    spec = store(tmp_path / "a.ds", encoded(OTHER, "s" * 99, *WORDS[1:]))
    with pytest.raises(
        RopewalkError, match=r"document 1: .* \(2 of 3 sampled documents of .* differ\); give"
    ):
        sample_tokens([spec], OWN)


def test_a_tokenizer_that_changes_the_text_proves_nothing(tmp_path: Path) -> None:
    spec = store(tmp_path / "a.ds", encoded(OWN, "THE CAT SAT"))
    samples = sample_tokens([spec], with_merges("th", "at", lower=True))
    assert [sample.comparison for sample in samples] == ["lossy"]


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RopewalkError, match=r"a\.ds: document 0: .*token id 9999"):
        sample_tokens([store(tmp_path / "a.ds", [[1, 9999]])], OWN)


def test_texts_have_no_samples(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "words"}))
    assert sample_tokens([SourceSpec(path=str(tmp_path / "a.jsonl"))], OWN) == []


def as_records(path: Path, documents: list[list[int]]) -> SourceSpec:
    """A file of records with a column of token ids, in the format of its suffix."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"input_ids": ids}) + "\n" for ids in documents))
    elif path.suffix == ".parquet":
        write_parquet(path, {"input_ids": documents})
    else:
        Dataset.from_dict({"input_ids": documents}).save_to_disk(str(path))
    return SourceSpec(path=str(path))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "saved"])
def test_records_with_token_ids_are_sampled_too(tmp_path: Path, name: str) -> None:
    own = as_records(tmp_path / f"own-{name}", [*encoded(OWN, *WORDS), []])
    assert [sample.comparison for sample in sample_tokens([own], OWN)] == ["same"] * 3
    other = as_records(tmp_path / f"other-{name}", encoded(OTHER, *WORDS))
    with pytest.raises(
        RopewalkError,
        match=rf"{name}.*: at token \d+, the document has id .* the given tokenizer gives .*\(3 of 3 sampled",
    ):
        Job.of([other], OWN, PackingSettings(context=8)).pack(tmp_path / "rows")
    large = as_records(tmp_path / f"large-{name}", [[1, 9999]])
    with pytest.raises(RopewalkError, match=rf"{name}.*: .*token id 9999"):
        Job.of([large], OWN, PackingSettings(context=8)).pack(tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_statistics_show_the_samples(tmp_path: Path) -> None:
    OWN.save_pretrained(tmp_path / "mine")
    spec = store(tmp_path / "a.ds", [*encoded(OWN, WORDS[2]), *encoded(OTHER, WORDS[1])])
    config = StatsConfig(sources=[spec], tokenizer=str(tmp_path / "mine"), workers=1, length=64)
    report = stats(config, RunContext()).to_json()
    assert samples_table(report).rows[0][1:] == (
        f"{report['samples'][0]['tokens']}",
        "the same ids",
        WORDS[2],
    )
    sentence = samples_sentence(report)
    assert "other ids of 1 of 2 sampled texts" in sentence
    assert "The metadata name the tokenizer someone/own, but you gave" in sentence
    assert samples_sentence({**report, "samples": None}) == ""


@pytest.mark.parametrize(
    ("stated", "given", "differs"),
    [(None, "x", False), ("a/GPT2", "/models/gpt2", False), ("gpt2", "llama", True)],
)
def test_names_are_compared_without_folders(stated: str | None, given: str, differs: bool) -> None:
    assert name_differs(stated, given) is differs
