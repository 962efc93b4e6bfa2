"""Woven documents: what a row holds of them, told from its text, and how little they depend on anything else."""

import json
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from ropewalk.attention.layout import IGNORED
from ropewalk.data import MixtureSettings, PackingSettings, SourceSpec, ValidationSettings
from ropewalk.data.mixture.report import mixture_sentences
from ropewalk.data.read.embedded import EMBEDDED
from ropewalk.data.rows.manifest import token_account
from ropewalk.data.rows.weave import WovenDocument, WovenReader
from ropewalk.data.statistics import rows_report
from ropewalk.data.tokens.tokenise import load_tokenizer
from ropewalk.errors import RopewalkError
from tests.data.cases import Job
from tests.data.mixture.exams import made_text, right_answer
from tests.data.rows.rows_cases import imbalance, interrupted, tree

TOKENIZER = load_tokenizer(EMBEDDED)
ROWS = PackingSettings(context=1024, packing="best_fit", remainder="pad", pattern="intra_document")
ALL = MixtureSettings(long_from=100, synthetic_share={"a": 1}, synthetic_loss="answers")
TASK = re.compile(r"(.*)\n\nQuestion: ([^\n]*)\nAnswer: ([^\n]*)", re.DOTALL)


def corpus_of(folder, documents, words=(60, 220), name="corpus.jsonl"):
    draw = random.Random(0)
    texts = [f"{number}\n{made_text(draw, draw.randint(*words))}" for number in range(documents)]
    write(folder / name, [{"text": text, "source": "a"} for text in texts])
    return texts


def write(path, records):
    path.write_text("".join(json.dumps(each) + "\n" for each in records))


def job(folder, mixture=ALL, rows=ROWS, name="corpus.jsonl", spec=None, **options):
    return Job.of(
        [SourceSpec(path=str(folder / name), **(spec or {}))], TOKENIZER, rows, mixture=mixture, **options
    )


def documents_of(rows):
    """Text and targets of each document of the rows, without special tokens and padding, by its row."""
    for index in range(len(rows)):
        packed, labels = rows.packed(index), rows[index].labels.tolist()
        at = 0
        for length, number in zip(packed.segment_lengths, packed.numbers, strict=True):
            # The label at a token is the token behind it.
            targets = [each for each in labels[at : at + length - 1] if each != IGNORED]
            ids = packed.input_ids[at : at + length].tolist()
            at += length
            if number >= 0:
                assert (ids[0], ids[-1]) == (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id)
                yield TOKENIZER.decode(ids[1:-1]), TOKENIZER.decode(targets)


def bare(document):
    """The text of a woven document without what was woven into it."""
    return re.sub(r"Registry note: [^\n]*\n| Registry note: [^.]*\.", "", TASK.fullmatch(document)[1])


def test_of_a_thousand_woven_documents_each_is_whole_and_has_its_answer(tmp_path):
    texts = corpus_of(tmp_path, 1000)
    rows = job(tmp_path).pack(tmp_path / "rows")
    kinds, seen, answers = {"needle": 0, "count": 0}, [], 0
    for document, targets in documents_of(rows):
        task = TASK.fullmatch(document)
        before, question, answer = task.groups()
        assert answer == right_answer(before, question)
        # The answer alone is trained, with the EOS behind it.
        assert targets == f" {answer}</s>"
        assert before.count("Registry note") in (0, 4)
        kind = "needle" if "Registry note" in before else "count"
        kinds[kind] += 1
        answers += len(TOKENIZER.backend_tokenizer.encode(f": {answer}", add_special_tokens=False).ids) - 1
        seen.append(bare(document))
    assert sorted(seen) == sorted(texts)
    assert min(kinds.values()) > 400
    (report,) = rows.manifest["synthetic"]["sources"]
    assert {kind: each["documents"] for kind, each in report["tasks"].items()} == kinds
    assert sum(each["answer_tokens"] for each in report["tasks"].values()) == answers
    assert (report["long_documents"], report["too_long"], report["masked"]) == (1000, 0, 0)
    assert rows_report(rows)["synthetic"] == rows.manifest["synthetic"]
    assert "Synthetic tasks in 1,000 readings" in mixture_sentences(rows.manifest)[-1]
    counts = rows.manifest["counts"]
    assert imbalance(token_account(counts)) == (0, 0)
    assert counts["mixture"]["synthetic_tokens"] == rows.manifest["synthetic"]["added_tokens"] > 0


def test_the_text_around_answers_is_trained_by_default(tmp_path):
    corpus_of(tmp_path, 20)
    mixture = MixtureSettings(long_from=100, synthetic_share={"a": 1})
    rows = job(tmp_path, mixture).pack(tmp_path / "rows")
    for document, targets in documents_of(rows):
        assert TASK.fullmatch(document)
        assert targets == f"{document}</s>"


@pytest.mark.parametrize("policy", ["skip", "split", "truncate"])
def test_a_document_that_is_longer_than_a_row_is_truncated_or_left_as_it_is(tmp_path, policy):
    texts = corpus_of(tmp_path, 12, (100, 900))
    rows = job(tmp_path, rows=PackingSettings(**{**dict(ROWS), "long_documents": policy})).pack(
        tmp_path / "rows"
    )
    (report,) = rows.manifest["synthetic"]["sources"]
    counts = rows.manifest["counts"]
    assert imbalance(token_account(counts)) == (0, 0)
    if policy == "truncate":
        found = list(documents_of(rows))
        assert len(found) == 12
        for document, targets in found:
            before, question, answer = TASK.fullmatch(document).groups()
            assert answer == right_answer(before, question)
            assert targets == f" {answer}</s>"
            assert any(text.startswith(bare(document)) for text in texts)
        assert report["too_long"] == counts["packing"]["long_documents"] == 0
        assert rows.manifest["synthetic"]["cut_tokens"] > 0
        # Truncated to fill the row: what is left of it is less than a word.
        full = [row for row in map(rows.packed, range(len(rows))) if len(row.sources) == 1]
        assert len(full) > 3
    else:
        assert report["too_long"] > 3
        assert rows.manifest["synthetic"]["cut_tokens"] == 0
        woven = sum(each["documents"] for each in report["tasks"].values())
        assert woven + report["too_long"] == 12
        text = "".join(TOKENIZER.decode(rows.packed(n).input_ids.tolist()) for n in range(len(rows)))
        assert text.count("Question: ") == woven


@pytest.mark.parametrize("changes", [{"eos": False}, {"tag": "{source}> "}, {"bos": "none"}, {"bos": "row"}])
def test_with_other_special_tokens_documents_are_whole_too(tmp_path, changes):
    corpus_of(tmp_path, 60, (150, 500))
    settings = PackingSettings(**{**dict(ROWS), "long_documents": "truncate", **changes})
    rows = job(tmp_path, rows=settings).pack(tmp_path / "rows")
    assert imbalance(token_account(rows.manifest["counts"])) == (0, 0)
    assert rows.manifest["counts"]["packing"]["long_documents"] == 0
    assert rows.manifest["counts"]["packing"]["cut_documents"] == 0
    text = "".join(TOKENIZER.decode(rows.packed(n).input_ids.tolist()) for n in range(len(rows)))
    assert text.count("Question: ") == text.count("\nAnswer: ") == 60


def test_tasks_depend_on_the_document_and_the_reading_alone(tmp_path):
    texts = corpus_of(tmp_path, 30)
    write(tmp_path / "some.jsonl", [{"text": text, "source": "a"} for text in texts[10:20]])
    twice = MixtureSettings(**{**dict(ALL), "weights": {"a": 2}})
    half = MixtureSettings(**{**dict(ALL), "synthetic_share": {"a": 0.5}})
    found = {}
    for name, mixture, file in (
        ("all", ALL, "corpus.jsonl"),
        ("some", ALL, "some.jsonl"),
        ("twice", twice, "corpus.jsonl"),
        ("half", half, "corpus.jsonl"),
        ("seed", MixtureSettings(**{**dict(ALL), "seed": 1}), "corpus.jsonl"),
    ):
        rows = job(tmp_path, mixture, name=file).pack(tmp_path / name)
        found[name] = [document for document, _ in documents_of(rows)]
    assert set(found["some"]) < set(found["all"]) < set(found["twice"])
    assert len(set(found["twice"])) == 60
    woven = {document for document in found["half"] if TASK.fullmatch(document)}
    assert woven < set(found["all"])
    assert 5 < len(woven) < 25
    assert set(found["half"]) - woven < set(texts)
    assert set(found["seed"]).isdisjoint(found["all"])


def test_rows_do_not_depend_on_workers_machines_or_interruptions(tmp_path, small_files):
    corpus_of(tmp_path, 60)
    work = job(tmp_path)
    whole = tree(work.pack(tmp_path / "whole").folder)
    assert len([name for name in whole if name.endswith(".arrow")]) > 3
    work.pack(interrupted(work, tmp_path / "resumed"), workers=2)
    assert tree(tmp_path / "resumed") == whole
    assert tree(work.pack(tmp_path / "second", shard=(1, 2)).folder) == whole


def test_held_out_documents_and_those_with_masks_have_no_task(tmp_path):
    texts = corpus_of(tmp_path, 30)
    records = [
        {"text": text, "source": "a", **({"loss_spans": [[0, 3]]} if number % 3 == 0 else {})}
        for number, text in enumerate(texts)
    ]
    write(tmp_path / "masked.jsonl", records)
    work = job(
        tmp_path,
        rows=PackingSettings(**{**dict(ROWS), "long_documents": "skip"}),
        name="masked.jsonl",
        spec={"loss_spans_field": "loss_spans"},
        validation=ValidationSettings(documents=6),
    )
    rows = work.pack(tmp_path / "rows")
    held = [TOKENIZER.decode(each.input_ids.tolist()) for each in rows.validation]
    assert len(held) == 6
    assert set(held) <= set(texts)
    (report,) = rows.manifest["synthetic"]["sources"]
    masked = [text for text in texts[::3] if text not in held]
    assert report["masked"] == len(masked)
    plain = [document for document, _ in documents_of(rows) if not TASK.fullmatch(document)]
    assert sorted(plain) == sorted(masked)


@pytest.mark.parametrize(
    ("policies", "said"),
    [
        ({"packing": "sequential"}, "packing sequential would cut documents with synthetic tasks"),
        ({"interleave": {}}, "interleave true would cut documents with synthetic tasks"),
    ],
)
def test_policies_that_cut_documents_are_refused_before_anything_is_written(tmp_path, policies, said):
    corpus_of(tmp_path, 3)
    with pytest.raises(RopewalkError, match=said):
        job(tmp_path, rows=PackingSettings(**{**dict(ROWS), **policies})).pack(tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_an_unknown_source_is_refused(tmp_path):
    corpus_of(tmp_path, 3)
    mixture = MixtureSettings(long_from=100, synthetic_share={"b": 1})
    with pytest.raises(RopewalkError, match="unknown source 'b' in synthetic_share; the sources are a"):
        job(tmp_path, mixture).pack(tmp_path / "rows")


class Counting:
    """A corpus whose document n has the tokens 100 n, 100 n + 1, …"""

    def read_tokens(self, number, first, out):
        out[:] = 100 * number + first + np.arange(len(out))


@given(st.data(), st.booleans())
def test_any_part_of_a_woven_document_is_that_part_of_the_whole(data, alone):
    own = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(lambda pair: (pair[0], sum(pair)))
    task = st.lists(st.integers(-9, -1), max_size=5).map(lambda ids: np.array(ids, np.int32))
    parts = tuple(data.draw(st.lists(own | task, min_size=1, max_size=6)))
    reader = WovenReader(Counting(), 3, (WovenDocument(2, parts, alone),))
    whole = []
    for part in parts:
        if isinstance(part, tuple):
            ids = [200 + at for at in range(*part)]
            whole += [~each for each in ids] if alone else ids
        else:
            whole += part.tolist()
    first = data.draw(st.integers(0, len(whole)))
    out = np.zeros(data.draw(st.integers(0, len(whole) - first)), np.int32)
    reader.read_tokens(3, first, out)
    assert out.tolist() == whole[first : first + len(out)]
    reader.read_tokens(1, first, out)
    assert out.tolist() == [100 + first + at for at in range(len(out))]


def test_without_lines_sentences_stand_between_those_of_the_text(tmp_path):
    draw = random.Random(1)
    texts = [
        ". ".join(made_text(draw, 6).replace("\n", " ").replace(".", "") + "3.5 knots" for _ in range(20))
        + "."
        for _ in range(40)
    ]
    write(tmp_path / "prose.jsonl", [{"text": text, "source": "a"} for text in texts])
    mixture = MixtureSettings(**{**dict(ALL), "synthetic_tasks": ("needle",)})
    rows = job(tmp_path, mixture, name="prose.jsonl").pack(tmp_path / "rows")
    found = [document for document, _ in documents_of(rows)]
    assert sorted(map(bare, found)) == sorted(texts)
    for document in found:
        before, question, answer = TASK.fullmatch(document).groups()
        assert answer == right_answer(before, question)
        # Each stands behind a whole sentence.
        assert len(re.findall(r"\. Registry note: [^.]*\. ", before)) == before.count("Registry note") == 4


def test_a_tokenizer_that_changes_texts_is_refused_before_anything_is_written(tmp_path):
    corpus_of(tmp_path, 3)
    backend = Tokenizer.from_str(TOKENIZER.backend_tokenizer.to_str())
    backend.normalizer = normalizers.Lowercase()
    lower = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    lower.save_pretrained(tmp_path / "lower")
    work = Job.of(
        [SourceSpec(path=str(tmp_path / "corpus.jsonl"))], str(tmp_path / "lower"), ROWS, mixture=ALL
    )
    with pytest.raises(RopewalkError, match="so token ids do not tell their texts"):
        work.pack(tmp_path / "rows")
    assert not (tmp_path / "rows").exists()


def test_a_short_document_stays_short(tmp_path):
    """Rows of short documents keep the model's own RoPE, which ends at their limit."""
    corpus_of(tmp_path, 40)
    settings = PackingSettings(**{**dict(ROWS), "documents_up_to": 500})
    rows = job(tmp_path, rows=settings).pack(tmp_path / "rows")
    packed = [rows.packed(n) for n in range(len(rows))]
    lengths = [
        length
        for each in packed
        for length, number in zip(each.segment_lengths, each.numbers, strict=True)
        if number >= 0
    ]
    (report,) = rows.manifest["synthetic"]["sources"]
    assert report["too_long"] > 0
    assert sum(task["documents"] for task in report["tasks"].values()) > 3
    assert max(lengths) <= 500
