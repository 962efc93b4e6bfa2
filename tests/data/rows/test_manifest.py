"""A manifest says where every token went: the account adds up for any packing."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ropewalk.data import InterleaveSettings, MixtureSettings, PackingSettings, ValidationSettings
from ropewalk.data.rows.manifest import token_account
from ropewalk.errors import RopewalkError
from tests.data.rows.rows_cases import imbalance, job, prepare


def test_manifest_tells_how_the_rows_came_to_be(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = prepare(corpus, tokenizer, validation=ValidationSettings(documents=4))
    manifest = json.loads((rows.folder / "manifest.json").read_text())
    packing = manifest["counts"]["packing"]
    assert packing["rows"] == len(rows)
    assert imbalance(token_account(manifest["counts"])) == (0, 0)
    assert sum(source["tokens"] for source in manifest["sources"].values()) == packing["document_tokens"]
    assert sum(source["documents"] for source in manifest["sources"].values()) == 56
    assert manifest["tokenizer"]["bos_token_id"] == tokenizer.bos_token_id
    assert manifest["counts"]["reading"]["documents"] == 60


packings = st.builds(
    PackingSettings,
    context=st.integers(16, 200),
    pattern=st.sampled_from(["anchor", "full", "intra_document"]),
    positions=st.sampled_from(["continuous", "reset"]),
    eos=st.booleans(),
    long_documents=st.sampled_from(["split", "truncate", "skip"]),
    tag=st.sampled_from([None, "{source}: ", "x"]),
    packing=st.sampled_from(["sequential", "best_fit"]),
    remainder=st.sampled_from(["drop", "pad"]),
    interleave=st.sampled_from([None, InterleaveSettings(min_length=4, max_length=100)]),
)
mixtures = st.sampled_from(
    [
        None,
        MixtureSettings(shuffle=True, seed=3),
        MixtureSettings(weights={"a": 2.5, "b": 0.3}),
        MixtureSettings(shares={"a": 1, "b": 3}, tokens=5000),
        MixtureSettings(long_from=200, long_factor=2),
        MixtureSettings(length_shares=((0, 0.2), (100, 0.3), (300, 0.5)), shortage="cap", max_epochs=1),
    ]
)
validations = st.sampled_from([None, ValidationSettings(documents=7), ValidationSettings(fraction=0.1)])


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packings, mixtures, validations)
def test_every_token_is_accounted_for(
    corpus_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    packing: PackingSettings,
    mixture: MixtureSettings | None,
    validation: ValidationSettings | None,
) -> None:
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    work = job(corpus_folder, tokenizer, packing, mixture=mixture, validation=validation)
    try:
        rows = work.pack(tmp_path / "out", tokens=tmp_path / "tokens")
    except RopewalkError as error:
        # A document of 400 bytes is skipped where a row takes 16 of them.
        if "the documents do not fill one row" not in str(error):
            raise
        return
    account = token_account(rows.manifest["counts"])
    assert imbalance(account) == (0, 0)
    # And the rows hold what the account says, counted from the rows alone.
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    own = masked = total = padding = 0
    for index in range(len(rows)):
        row = rows.packed(index)
        total += len(row.input_ids)
        spans = zip(row.masked[::2], row.masked[1::2], strict=True)
        hidden = sum(stop - start for start, stop in spans)
        padding += row.segment_lengths[-1] if row.sources[-1] == "" else 0
        masked += hidden
        own += int(np.isin(row.input_ids, special, invert=True).sum())
    assert total == account["tokens_packed"] == len(rows) * packing.context
    assert padding == account["padding"]
    # Bytes of documents and of tags are alike in this tokenizer; tags are what is masked and no padding.
    assert own - (masked - padding) <= account["own"]
    if packing.remainder == "pad":
        assert account["tokens_remainder"] == 0
        assert own - (masked - padding) == account["own"]
        assert masked - padding == account["tags"]
