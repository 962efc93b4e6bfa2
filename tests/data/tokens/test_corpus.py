"""The corpus is what reading everything and tokenising one by one gives, however it came about."""

import hashlib
import json
import os
import pickle
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

from ropewalk.data.read.documents import Document, Record, TokenisedDocument
from ropewalk.data.read.input_splits import InputSplit
from ropewalk.data.settings import SourceSpec, WorkSettings
from ropewalk.data.tokens import corpus as corpus_module
from ropewalk.data.tokens import token_shards as token_shards
from ropewalk.data.tokens.corpus import Corpus, tokenise_splits
from ropewalk.data.tokens.tokenise import load_tokenizer, tokenizer_identity
from ropewalk.errors import RopewalkError
from tests.data.tiny_tokenizer import TEXTS, make_tokenizer
from tests.places import ROOT
from tests.programs import Program

Records = list[Record]


def text(content: str, source: str = "a") -> Record:
    return Record((Document(content, source, "here"),))


def tokens(*ids: int, source: str = "tokens") -> TokenisedDocument:
    return TokenisedDocument(np.array(ids, np.int32), source)


BINARY = Record((), binary=True)
BLANK_LINE = Record(())
INPUTS: list[Records] = [
    [text(content, "prose") for content in TEXTS] + [BINARY, text(" \n"), text("b" * 30, "b")],
    [text("x" * n, f"source {n % 3}") for n in range(1, 40)],
    [Record((tokens(1, 2, 3), tokens(4), tokens())), BLANK_LINE, text("last", "prose")],
    [BLANK_LINE, text("")],
    [text(content, "end") for content in TEXTS * 3],
]


class Reader:
    """Records by split, in place of files; it notes what was asked for."""

    def __init__(self, inputs: list[Records]) -> None:
        self.inputs = inputs
        self.asked: list[int] = []

    def __call__(self, split: InputSplit) -> Iterator[Record]:
        number = split.identity["number"]
        self.asked.append(number)
        yield from self.inputs[number]

    @property
    def splits(self) -> list[InputSplit]:
        return [split(number) for number in range(len(self.inputs))]


def split(number: int, path: str = "all") -> InputSplit:
    return InputSplit(SourceSpec(path=path), (), 0, None, {"number": number}, 0)


def naive(inputs: list[Records], tokenizer: Any) -> dict[str, Any]:
    """What the corpus must be, one document at a time."""
    expected: dict[str, Any] = {
        "tokens": [],
        "sources": [],
        "hashes": [],
        "characters": [],
        "empty": 0,
        "binary": 0,
    }
    for record in (record for records in inputs for record in records):
        expected["binary"] += record.binary
        for document in record.documents:
            if isinstance(document, TokenisedDocument):
                ids, content, characters = document.input_ids.tolist(), document.input_ids.tobytes(), 0
                blank = not ids
            else:
                ids = tokenizer(document.text, add_special_tokens=False).input_ids
                content, characters = document.text.encode(), len(document.text)
                blank = not document.text.strip()
            if blank:
                expected["empty"] += 1
                continue
            expected["tokens"].append(ids)
            expected["sources"].append(document.source)
            digest = hashlib.blake2b(content, digest_size=8).digest()
            expected["hashes"].append(int.from_bytes(digest, "big"))
            expected["characters"].append(characters)
    return expected


def check(corpus: Corpus, expected: dict[str, Any]) -> None:
    assert [corpus.tokens(n).tolist() for n in range(len(corpus))] == expected["tokens"]
    assert corpus.lengths.tolist() == [len(ids) for ids in expected["tokens"]]
    assert corpus.first_ids.tolist() == [ids[0] if ids else -1 for ids in expected["tokens"]]
    assert corpus.last_ids.tolist() == [ids[-1] if ids else -1 for ids in expected["tokens"]]
    assert corpus.sources == tuple(dict.fromkeys(expected["sources"]))
    assert [corpus.sources[n] for n in corpus.source_ids.tolist()] == expected["sources"]
    assert corpus.hashes.tolist() == expected["hashes"]
    assert corpus.characters.tolist() == expected["characters"]
    reading = corpus.reading
    assert (reading.documents, reading.empty_documents, reading.binary_files) == (
        len(expected["tokens"]), expected["empty"], expected["binary"]
    )  # fmt: skip
    kinds = (np.int64, np.int32, np.uint64, np.int64, np.int32, np.int32)
    names = ("lengths", "source_ids", "hashes", "characters", "first_ids", "last_ids")
    for name, kind in zip(names, kinds, strict=True):
        assert getattr(corpus, name).dtype == kind
        assert not getattr(corpus, name).flags.writeable


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several batches a shard."""
    monkeypatch.setattr("ropewalk.data.tokens.tokenise.BATCH_CHARACTERS", 50)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_corpus_is_what_reading_and_tokenising_one_by_one_gives(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, workers: int
) -> None:
    calls: list[tuple[int, int]] = []
    reader = Reader(INPUTS)
    corpus = tokenise_splits(
        reader.splits,
        tokenizer,
        tmp_path,
        work=WorkSettings(workers=workers),
        progress=lambda *totals: calls.append(totals),
        read=reader,
    )
    check(corpus, naive(INPUTS, tokenizer))
    assert corpus.splits == len(INPUTS)
    assert calls == sorted(calls)
    assert calls[-1] == (len(corpus), int(corpus.lengths.sum()))
    assert len(calls) == len(INPUTS)
    # With more processes, each reads for itself.
    assert reader.asked == [*range(len(INPUTS))] * (workers == 1)
    again: list[tuple[int, int]] = []
    reopened = tokenise_splits(
        reader.splits, tokenizer, tmp_path, progress=lambda *totals: again.append(totals), read=reader
    )
    check(reopened, naive(INPUTS, tokenizer))
    assert reopened.digest == corpus.digest
    assert reader.asked == [*range(len(INPUTS))] * (workers == 1), "what is on disk is not read again"
    assert again == calls[-1:]


def name_of(split: InputSplit, tokenizer: Any) -> str:
    made_by = [token_shards.FORMAT, tokenizers.__version__, tokenizer_identity(tokenizer)]
    key = json.dumps([*made_by, split.identity], sort_keys=True)
    return hashlib.sha256(key.encode()).hexdigest()[:32] + ".tokens"


def test_the_digest_is_that_of_the_shards_in_order(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    reader = Reader(INPUTS)
    tokenise_splits(reader.splits, tokenizer, tmp_path, read=reader)
    paths = [tmp_path / name_of(split, tokenizer) for split in reader.splits]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for splits, order in ((reader.splits, paths), (reader.splits[::-1], paths[::-1])):
        digests = b"".join(bytes.fromhex(token_shards.open_shard(path).digest) for path in order)
        corpus = tokenise_splits(splits, tokenizer, tmp_path, read=reader)
        assert corpus.digest == hashlib.sha256(digests).hexdigest()
    assert len(reader.asked) == len(INPUTS)


DOCUMENT = st.one_of(
    st.builds(Document, st.text(max_size=30), st.sampled_from("abc"), st.just("")),
    st.builds(Document, st.integers(1, 300).map(lambda n: "x" * n), st.sampled_from("abc"), st.just("")),
    st.builds(
        lambda ids, source: tokens(*ids, source=source), st.lists(st.integers(0, 257)), st.sampled_from("cd")
    ),
)
RECORD = st.one_of(
    st.builds(lambda document: Record((document,)), DOCUMENT),
    st.builds(lambda documents: Record(tuple(documents)), st.lists(DOCUMENT, max_size=3)),
    st.just(BINARY),
)


@given(
    inputs=st.lists(st.lists(RECORD, max_size=12), max_size=4),
    order=st.randoms(use_true_random=False),
    shards=st.integers(1, 3),
)
@settings(max_examples=60)
def test_any_records_by_any_shard_are_as_one_by_one(
    tmp_path_factory: pytest.TempPathFactory, inputs: list[Records], order: random.Random, shards: int
) -> None:
    tokenizer = make_tokenizer()
    folder = tmp_path_factory.mktemp("shards")
    inputs = [*inputs, [text("so that there is one")]]
    reader = Reader(inputs)
    for index in order.sample(range(shards), shards):
        corpus = tokenise_splits(
            reader.splits, tokenizer, folder, work=WorkSettings(shard=(index, shards), workers=1), read=reader
        )
        check(corpus, naive(inputs, tokenizer))
    assert sorted(reader.asked) == list(range(len(inputs)))


def test_shards_in_one_folder_and_in_two_give_one_run_s_bytes(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    reader = Reader(INPUTS)
    whole = tokenise_splits(reader.splits, tokenizer, tmp_path / "whole", read=reader)
    for folders in (("both", "both"), ("first", "second")):
        reader.asked.clear()
        for index, name in enumerate(folders):
            part = tokenise_splits(
                reader.splits,
                tokenizer,
                tmp_path / name,
                work=WorkSettings(shard=(index, 2), workers=1),
                read=reader,
            )
            assert part.digest == whole.digest
            assert part.sources == whole.sources
            assert content(tmp_path / name) == content(tmp_path / "whole")
    # Own splits first, then the other machine's from the last to the first.
    assert reader.asked == [0, 2, 4, 3, 1, 1, 3, 4, 2, 0]


@pytest.mark.parametrize("fails", [False, True])
def test_splits_that_another_machine_makes_meanwhile_are_taken_over(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, fails: bool
) -> None:
    """Also the one that fails here while the other commits it."""
    calls: list[tuple[int, int]] = []

    class Overtaken(Reader):
        def __call__(self, split: InputSplit) -> Iterator[Record]:
            for count, record in enumerate(super().__call__(split)):
                if self.asked == [0] and count == 3:
                    self.asked.append(-1)
                    tokenise_splits(
                        self.splits,
                        tokenizer,
                        tmp_path,
                        work=WorkSettings(shard=(1, 2), workers=1),
                        read=Reader(INPUTS),
                    )
                    if fails:
                        raise RopewalkError("this machine cannot go on")
                yield record

    reader = Overtaken(INPUTS)
    corpus = tokenise_splits(
        reader.splits,
        tokenizer,
        tmp_path,
        work=WorkSettings(shard=(0, 2), workers=1),
        progress=lambda *totals: calls.append(totals),
        read=reader,
    )
    check(corpus, naive(INPUTS, tokenizer))
    assert reader.asked[:2] == [0, -1]
    assert len(reader.asked) <= 3, "neither the others' nor its own later ones are made again"
    assert calls[-1] == (len(corpus), int(corpus.lengths.sum()))
    alone = tokenise_splits(reader.splits, tokenizer, tmp_path / "alone", read=Reader(INPUTS))
    assert alone.digest == corpus.digest


def test_a_failed_split_leaves_nothing_and_the_others_are_kept(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    whole = tokenise_splits(Reader(INPUTS).splits, tokenizer, tmp_path / "whole", read=Reader(INPUTS))

    class Broken(Reader):
        def __call__(self, split: InputSplit) -> Iterator[Record]:
            yield from super().__call__(split)
            if self.asked[-1] == 2:
                raise RopewalkError("b.jsonl:31: broken JSON line")

    with pytest.raises(RopewalkError, match=r"b\.jsonl:31: broken JSON line"):
        tokenise_splits(Reader(INPUTS).splits, tokenizer, tmp_path / "again", read=Broken(INPUTS))
    left = content(tmp_path / "again")
    # One process has no task in advance.
    assert len(left) == 2
    assert left.items() <= content(tmp_path / "whole").items()
    leftover = tmp_path / "again" / f".{next(iter(left)).removesuffix('.tokens')}.{'0' * 32}.tokens"
    leftover.write_bytes(b"half")
    calls: list[tuple[int, int]] = []
    reader = Reader(INPUTS)
    corpus = tokenise_splits(
        reader.splits,
        tokenizer,
        tmp_path / "again",
        progress=lambda *totals: calls.append(totals),
        read=reader,
    )
    assert reader.asked == [2, 3, 4]
    shards = [token_shards.open_shard(tmp_path / "again" / name) for name in left]
    assert calls[0] == (sum(len(shard.lengths) for shard in shards), sum(shard.tokens for shard in shards))
    assert calls[-1] == (len(corpus), int(corpus.lengths.sum()))
    assert corpus.digest == whole.digest
    assert content(tmp_path / "again") == content(tmp_path / "whole")


def test_a_damaged_block_stops_the_run_before_it_begins(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    reader = Reader(INPUTS)
    corpus = tokenise_splits(reader.splits, tokenizer, tmp_path, read=reader)
    reader.asked.clear()
    path = tmp_path / name_of(reader.splits[1], tokenizer)
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 1]) + whole[201:])
    with pytest.raises(RopewalkError, match=r"\.tokens is damaged; delete it and run again"):
        tokenise_splits(reader.splits, tokenizer, tmp_path, read=reader)
    assert reader.asked == []
    path.unlink()
    assert tokenise_splits(reader.splits, tokenizer, tmp_path, read=reader).digest == corpus.digest
    assert path.read_bytes() == whole


def test_a_portion_given_twice_is_tokenised_once(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    reader = Reader(INPUTS)
    twice = [split(0), split(1), split(0)]
    corpus = tokenise_splits(twice, tokenizer, tmp_path, read=reader)
    check(corpus, naive([INPUTS[0], INPUTS[1], INPUTS[0]], tokenizer))
    assert corpus.splits == 3
    assert sorted(reader.asked) == [0, 1]


def test_another_tokenizer_has_blocks_of_its_own(tmp_path: Path) -> None:
    first, second = make_tokenizer(), make_tokenizer()
    second.add_tokens(["document"])
    for tokenizer in (first, second, first):
        corpus = tokenise_splits([split(0)], tokenizer, tmp_path, read=Reader(INPUTS))
        check(corpus, naive(INPUTS[:1], tokenizer))


@pytest.mark.parametrize("shard", [(0, 1), (1, 2)])
def test_a_source_without_documents_is_refused(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, shard: tuple[int, int]
) -> None:
    inputs = [[text("a document")], [text(" "), BINARY], [BLANK_LINE, text("")], [text("\n")]]
    splits = [split(0, "good.jsonl"), split(1, "bad"), split(2, "bad"), split(3, "good.jsonl")]
    message = r"^no documents in bad \(2 empty documents, 1 binary files skipped\)$"
    for _ in range(2):
        with pytest.raises(RopewalkError, match=message):
            tokenise_splits(
                splits, tokenizer, tmp_path, work=WorkSettings(shard=shard, workers=1), read=Reader(inputs)
            )
    with pytest.raises(RopewalkError, match=r"^no documents in nothing$"):
        tokenise_splits([split(0, "nothing")], tokenizer, tmp_path / "other", read=Reader([[]]))


def test_bad_requests_are_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    reader = Reader(INPUTS)
    for shard in ((1, 1), (-1, 2), (0, 0)):
        with pytest.raises(ValidationError, match=r"shard\n.*must be i/n with i from 0 to n-1"):
            WorkSettings(shard=shard)
    with pytest.raises(RopewalkError, match="no documents: give at least one"):
        tokenise_splits([], tokenizer, tmp_path, read=reader)
    with pytest.raises(ValidationError, match=r"workers\n.*greater than or equal to 0"):
        WorkSettings(workers=-1)
    for wrong in (-1, 258):
        foreign = Reader([[Record((tokens(0, 257, wrong, 7),))]])
        with pytest.raises(
            RopewalkError, match=rf"source 'tokens' contains token id {wrong}, .* ids from 0 to 257"
        ):
            tokenise_splits([split(0)], tokenizer, tmp_path / "foreign", read=foreign)
    (tmp_path / "file").touch()
    with pytest.raises(RopewalkError, match=r"cannot write .*\.tokens: "):
        tokenise_splits([split(4)], tokenizer, tmp_path / "file", read=reader)


def test_few_blocks_are_open_at_a_time(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "OPEN_SHARDS", 2)
    opened: list[Path] = []
    real = corpus_module.ShardFile
    monkeypatch.setattr(corpus_module, "ShardFile", lambda path: opened.append(path) or real(path))
    corpus = tokenise_splits(Reader(INPUTS).splits, tokenizer, tmp_path, read=Reader(INPUTS))
    first_of = np.flatnonzero(np.diff(np.cumsum(corpus.lengths), prepend=0) > 0)
    last = len(corpus) - 1
    descriptors = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else 0
    kept = corpus.tokens(0)
    assert corpus.tokens(0).tolist() == kept.tolist()
    assert len(opened) == 1
    corpus.tokens(last)
    corpus.tokens(0)
    assert len(opened) == 2
    corpus.tokens(last // 2)  # the last one used least recently gives way
    corpus.tokens(0)
    assert len(opened) == 3
    corpus.tokens(last)
    assert len(opened) == 4
    assert [len(corpus.tokens(int(n))) for n in first_of] == corpus.lengths[first_of].tolist()
    assert kept.tolist() == corpus.tokens(0).tolist()
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) == descriptors + 2
        corpus.close()
        assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_corpus_goes_to_another_process_without_its_tokens(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    reader = Reader(INPUTS)
    corpus = tokenise_splits(reader.splits, tokenizer, tmp_path, read=reader)
    before = len(pickle.dumps(corpus))
    everything = [corpus.tokens(n).tolist() for n in range(len(corpus))]
    assert len(pickle.dumps(corpus)) == before
    copy = pickle.loads(pickle.dumps(corpus))
    assert [copy.tokens(n).tolist() for n in range(len(copy))] == everything
    assert corpus.tokens(-1).tolist() == everything[-1]
    for number in (len(corpus), -len(corpus) - 1):
        with pytest.raises(IndexError):
            corpus.tokens(number)


SCRIPT = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from ropewalk.data.tokens.corpus import tokenise_splits
from ropewalk.data.settings import SourceSpec, WorkSettings
from ropewalk.data.read import input_splits
from ropewalk.data.read.input_splits import plan_input_splits
from ropewalk.errors import RopewalkError
if __name__ == "__main__":
    _, _, inputs, output, workers, limit = sys.argv
    from tests.data.tiny_tokenizer import make_tokenizer
    input_splits.SPLIT_BYTES = 3000
    splits = plan_input_splits([SourceSpec(path=str(path)) for path in sorted(Path(inputs).iterdir())])
    if int(limit):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
    print("begin", flush=True)
    try:
        corpus = tokenise_splits(splits, make_tokenizer(), Path(output), work=WorkSettings(workers=int(workers)))
    except RopewalkError as error:
        sys.exit(f"refused: {error}")
    print(corpus.digest, len(corpus), corpus.lengths.sum())
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Program]:
    """Tokenise the files of ``inputs`` in a process of its own."""
    (tmp_path / "inputs").mkdir()

    def start(output: str, workers: int = 1, limit: int = 0) -> Program:
        return Program(SCRIPT, ROOT, tmp_path / "inputs", tmp_path / output, workers, limit)

    return start


def write_inputs(folder: Path, files: int, documents: int, long: int = 0) -> None:
    for number in range(files):
        choice = random.Random(number)
        lines = [
            json.dumps({"text": choice.choice(TEXTS) * choice.randrange(9), "source": f"s{n % 5}"})
            for n in range(documents)
        ]
        if long:
            lines[documents // 2] = json.dumps({"text": "long " * long})
        (folder / f"{number}.jsonl").write_text("\n".join(lines))


@pytest.mark.slow
def test_runs_that_are_killed_lose_no_block_and_end_with_the_same_bytes(
    tmp_path: Path, run: Callable[..., Program]
) -> None:
    write_inputs(tmp_path / "inputs", files=4, documents=300)
    undisturbed = run("undisturbed").communicate()[0]
    expected = content(tmp_path / "undisturbed")
    assert len(expected) > 20
    kept: dict[str, bytes] = {}
    in_between = 0
    for part, workers in ((0.2, 1), (0.5, 2), (0.8, 1)):
        process = run("killed", workers)
        while process.poll() is None and len(list((tmp_path / "killed").glob("*.tokens"))) < part * len(
            expected
        ):
            time.sleep(0.001)
        # Anywhere in the writing of a shard.
        time.sleep(random.uniform(0, 0.02))
        process.kill()
        process.communicate()
        found = content(tmp_path / "killed")
        whole = {name: data for name, data in found.items() if not Path(name).name.startswith(".")}
        assert kept.items() <= whole.items() <= expected.items()
        in_between += kept.items() < whole.items() < expected.items()
        kept = whole
    # A busy machine may see too late that little is left to do, but not each time.
    assert in_between
    assert run("killed", 2).communicate()[0] == undisturbed
    assert content(tmp_path / "killed") == expected


def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path, run: Callable[..., Program]) -> None:
    write_inputs(tmp_path / "inputs", files=2, documents=60, long=20_000)
    undisturbed = run("whole").communicate()[0]
    expected = content(tmp_path / "whole")
    output, errors = run("full", limit=100_000).communicate()
    assert output == "begin\n"
    assert re.fullmatch(r"refused: cannot write .*\.tokens: File too large\n", errors), errors
    left = content(tmp_path / "full")
    assert 2 < len(left) < len(expected)
    assert left.items() <= expected.items()
    assert run("full").communicate()[0] == undisturbed
    assert content(tmp_path / "full") == expected


@pytest.mark.slow
def test_a_text_of_megabytes_is_one_document(stories260k: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(stories260k))
    words = "Once upon a time there was a little dog. "
    inputs = [[text("short"), text(words * 40_000), text("end")]]
    corpus = tokenise_splits(
        [split(0)], tokenizer, tmp_path, work=WorkSettings(workers=2), read=Reader(inputs)
    )
    check(corpus, naive(inputs, tokenizer))
    assert corpus.characters[1] == len(words) * 40_000
