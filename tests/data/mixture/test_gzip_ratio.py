"""Long documents at either end of the gzip ratio are dropped: against numpy's quantile and gzip itself."""

import gzip
import json
import random
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ropewalk.data import MixtureSettings, PackingSettings, SourceSpec, ValidationSettings
from ropewalk.data.mixture.gzip_ratio import drop_by_gzip_ratio, explain_gzip, gzip_ratio
from ropewalk.data.mixture.report import mixture_sentences
from ropewalk.data.read.documents import text_hash
from ropewalk.data.rows.manifest import token_account
from ropewalk.data.statistics import rows_report
from ropewalk.data.tokens.corpus import tokenise_splits
from ropewalk.errors import RopewalkError
from tests.data.cases import Job, refusal
from tests.data.rows.rows_cases import imbalance, interrupted, tree
from tests.data.tiny_tokenizer import make_tokenizer

SOURCES = ("a", "b", "none")
DROP = MixtureSettings(long_from=100, drop_gzip_low=0.2, drop_gzip_high=0.3)
ROWS = PackingSettings(context=64, remainder="pad")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    tokenizer, folder = make_tokenizer(first=0), tmp_path_factory.mktemp("bytes")
    tokenizer.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@given(st.text(min_size=1))
def test_the_ratio_is_that_of_gzip_without_its_larger_header(text):
    # gzip's header and trailer take 18 bytes, those of zlib 6.
    assert gzip_ratio(text) == len(text.encode()) / (len(gzip.compress(text.encode(), 6)) - 12)


DOCUMENTS = st.lists(
    st.tuples(
        st.integers(0, 200),
        st.sampled_from([0, 1]),
        st.sampled_from([1.0, 1.5, 2.0, 2.5, 3.0, 10.0, float("nan")]) | st.floats(0.5, 100),
    ),
    max_size=40,
)


@given(DOCUMENTS, st.floats(0, 0.49), st.floats(0, 0.5))
def test_all_but_long_documents_beyond_the_quantiles_of_their_source_are_kept(documents, low, high):
    if not (low or high):
        low = 0.1
    mixture = MixtureSettings(long_from=100, drop_gzip_low=low, drop_gzip_high=high)
    lengths, ids, ratios = (np.array([each[at] for each in documents]) for at in range(3))
    kept, dropped = drop_by_gzip_ratio(
        lengths.astype(np.int64), ids.astype(np.int32), SOURCES, ratios.astype(np.float64), mixture
    )
    for number, (length, source, ratio) in enumerate(documents):
        others = [r for n, s, r in documents if s == source and n >= 100 and r == r]
        inside = length < 100 or ratio != ratio
        if not inside:
            inside = np.quantile(others, low) <= ratio <= np.quantile(others, 1 - high)
        assert kept[number] == inside
    for index, each in enumerate(dropped):
        assert each.source == SOURCES[index]
        out = [n for (n, s, _), k in zip(documents, kept, strict=True) if s == index and not k]
        assert each.low_documents + each.high_documents == len(out)
        assert each.low_tokens + each.high_tokens == sum(out)


def text_of(number):
    """Texts that compress the better the higher their number."""
    draw, letters = random.Random(number), "abcdefghijklmnopqrstuvwxyz"
    return "".join(draw.choices(letters[: 26 - number], k=60 + 7 * number))


@pytest.fixture
def records(tmp_path):
    records = [{"text": text_of(number), "source": "ab"[number % 2]} for number in range(24)]
    random.Random(0).shuffle(records)
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return records


def job(folder, tokenizer, name="corpus.jsonl", mixture=DROP, rows=ROWS, **options):
    return Job.of([SourceSpec(path=str(folder / name))], tokenizer, rows, mixture=mixture, **options)


def kept_texts(records):
    """The records without those that numpy's quantiles drop; a token is a byte."""
    kept = []
    for each in records:
        own = [
            gzip_ratio(other["text"])
            for other in records
            if other["source"] == each["source"] and len(other["text"]) >= 100
        ]
        low, high = np.quantile(own, [0.2, 0.7])
        if len(each["text"]) < 100 or low <= gzip_ratio(each["text"]) <= high:
            kept.append(each["text"])
    return kept


def packed_texts(rows, tokenizer):
    ids = np.concatenate([rows.packed(n).input_ids[1:] for n in range(len(rows))])
    return [text for text in tokenizer.decode(ids.tolist()).split("</s>") if text]


def test_rows_hold_the_documents_that_are_left_in_order(tmp_path, records, tokenizer):
    rows = job(tmp_path, tokenizer).pack(tmp_path / "rows")
    assert packed_texts(rows, tokenizer) == kept_texts(records)
    assert len(kept_texts(records)) < 24
    manifest = rows.manifest
    report = manifest["gzip_ratios"]
    assert (report["zlib"], report["level"], report["long_from"]) == (zlib.ZLIB_RUNTIME_VERSION, 6, 100)
    assert imbalance(token_account(manifest["counts"])) == (0, 0)
    unread = manifest["counts"]["mixture"]["unread_tokens"]
    assert unread == sum(each["low_tokens"] + each["high_tokens"] for each in report["sources"]) > 0
    assert rows_report(rows)["gzip_ratios"] == report
    assert mixture_sentences(manifest) == explain_gzip(report)
    assert "of 100 tokens or more of source 'a'" in explain_gzip(report)[0]


def test_quantiles_are_those_of_documents_that_are_not_held_out(tmp_path, records, tokenizer):
    work = job(tmp_path, tokenizer, validation=ValidationSettings(documents=5))
    rows = work.pack(tmp_path / "rows")
    left = sorted(records, key=lambda each: text_hash(each["text"]))[5:]
    assert packed_texts(rows, tokenizer) == kept_texts([each for each in records if each in left])


def test_other_settings_of_the_mixture_apply_to_what_is_left(tmp_path, records, tokenizer):
    mixture = MixtureSettings(**{**dict(DROP), "long_share": 0.5, "seed": 2, "shortage": "cap"})
    rows = job(tmp_path, tokenizer, mixture=mixture, validation=ValidationSettings(documents=3)).pack(
        tmp_path / "rows"
    )
    report = rows.manifest["mixture"]
    dropped = rows.manifest["gzip_ratios"]["sources"]
    gone = sum(each["low_tokens"] + each["high_tokens"] for each in dropped)
    split = rows.manifest["counts"]["split"]
    assert (
        report["tokens_available"]
        == sum(len(each["text"]) for each in records) - gone - (split["validation_tokens"])
    )
    assert report["long_from"] == 100
    assert imbalance(token_account(rows.manifest["counts"])) == (0, 0)


def test_token_ids_are_decoded_and_give_the_documents_of_their_texts(tmp_path, records, tokenizer):
    ids = [
        {"input_ids": tokenizer(each["text"] + "</s>")["input_ids"], "source": each["source"]}
        for each in records
    ]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ids))
    rows = job(tmp_path, tokenizer, "ids.jsonl").pack(tmp_path / "rows")
    # EOS counts as a token, so a text of 99 characters would be long; there is none.
    assert packed_texts(rows, tokenizer) == kept_texts(records)


def test_a_tokenizer_that_changes_texts_is_refused_for_token_ids_before_anything_is_written(
    tmp_path, records, tokenizer
):
    from tokenizers import Tokenizer, normalizers

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    lower = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    lower.save_pretrained(tmp_path / "lower")
    ids = [{"input_ids": tokenizer(each["text"])["input_ids"]} for each in records]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ids))
    with pytest.raises(RopewalkError, match="so token ids do not tell their texts"):
        job(tmp_path, str(tmp_path / "lower"), "ids.jsonl").pack(tmp_path / "rows")
    assert not (tmp_path / "rows").exists()
    # Texts need no decoding.
    assert len(job(tmp_path, str(tmp_path / "lower")).pack(tmp_path / "texts"))


def test_ratios_that_are_kept_count_under_another_zlib(tmp_path, records, tokenizer, monkeypatch):
    first = job(tmp_path, tokenizer).pack(tmp_path / "first", tokens=tmp_path / "store")
    monkeypatch.setattr(zlib, "ZLIB_RUNTIME_VERSION", "2.2.4.zlib-ng")
    monkeypatch.setattr(zlib, "compress", lambda content, level: content[::2])
    wide = PackingSettings(context=128, remainder="pad")
    again = job(tmp_path, tokenizer, rows=wide).pack(tmp_path / "again", tokens=tmp_path / "store")
    assert again.manifest["gzip_ratios"] == first.manifest["gzip_ratios"]
    assert packed_texts(again, tokenizer) == packed_texts(first, tokenizer)
    other = job(tmp_path, tokenizer).pack(tmp_path / "other")
    assert other.manifest["gzip_ratios"]["zlib"] == "2.2.4.zlib-ng"


def test_ratios_of_two_versions_of_zlib_are_refused(tmp_path, records, tokenizer, monkeypatch):
    (tmp_path / "folder").mkdir()
    text = (tmp_path / "corpus.jsonl").read_text()
    (tmp_path / "folder" / "1.jsonl").write_text(text)
    job(tmp_path, tokenizer, "folder").pack(tmp_path / "first", tokens=tmp_path / "store")
    (tmp_path / "folder" / "2.jsonl").write_text(text)
    monkeypatch.setattr(zlib, "ZLIB_RUNTIME_VERSION", "2.2.4.zlib-ng")
    with pytest.raises(RopewalkError, match=r"zlib .* made the gzip ratios in .*, but zlib 2.2.4.zlib-ng"):
        job(tmp_path, tokenizer, "folder").pack(tmp_path / "again", tokens=tmp_path / "store")


def test_interrupted_and_resumed_the_rows_are_the_same(tmp_path, records, tokenizer, small_files):
    work = job(tmp_path, tokenizer)
    whole = work.pack(tmp_path / "whole")
    work.pack(interrupted(work, tmp_path / "resumed"), workers=2)
    assert tree(tmp_path / "resumed") == tree(whole.folder)


@pytest.fixture
def small_files(monkeypatch):
    monkeypatch.setattr("ropewalk.data.rows.writer.LEAST_FILE_TOKENS", 256)


def test_chats_have_no_ratio(tmp_path, tokenizer):
    from ropewalk.data.read.input_splits import plan_input_splits
    from tests.data.tokens.test_chat import CHATML, with_template

    record = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b" * 200}]}
    (tmp_path / "chats.jsonl").write_text(f'{json.dumps(record)}\n{{"text": "plain text"}}\n')
    splits = plan_input_splits([SourceSpec(path=str(tmp_path / "chats.jsonl"), messages_field="messages")])
    corpus = tokenise_splits(splits, with_template(CHATML), tmp_path / "tokens", gzip_ratios=True)
    assert np.isnan(corpus.gzip_ratios).tolist() == [True, False]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"drop_gzip_low": 0.2}, "give long_from, or length_shares with more than one length"),
        ({"drop_gzip_low": 0.2, "length_shares": [(0, 1)]}, "with more than one length"),
        ({"drop_gzip_low": 0.6, "drop_gzip_high": 0.4, "long_from": 8}, "must leave some documents"),
        ({"drop_gzip_high": 1.0, "long_from": 8}, "less than 1"),
        ({"drop_gzip_high": 0.1, "long_from": 8, "length_shares": [(0, 1), (4, 1)]}, "not both"),
        (
            {"drop_gzip_high": 0.1, "long_from": 8, "per": "corpus"},
            "per corpus needs long_factor, long_share or length_shares",
        ),
        ({"long_from": 8}, "long_from needs one of these"),
    ],
)
def test_settings_that_drop_nothing_are_refused(values, said):
    assert said in refusal(MixtureSettings, **values)


def test_where_long_documents_begin():
    bins = MixtureSettings(drop_gzip_low=0.1, length_shares=[(0, 1), (64, 1), (512, 2)])
    assert (DROP.long_length, bins.long_length) == (100, 512)
    # Alone, the length changes neither order nor shares.
    assert DROP.starts == (0,)
    assert DROP.as_is
    assert not DROP.unchanged
