"""A folder of rows: the same to the last byte however often it was interrupted and by how many it was made."""

import json
import resource
import signal
import time
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from ropewalk.data import (
    MixtureSettings,
    PackingSettings,
    SourceSpec,
    ValidationSettings,
    open_rows,
)
from ropewalk.data.rows.manifest import token_account
from ropewalk.data.tokens import corpus as corpus_module
from ropewalk.errors import RopewalkError
from tests.data.cases import Job, changed
from tests.data.rows.rows_cases import SHARD_SETTINGS, imbalance, interrupted, job, tree
from tests.programs import Program


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("machines", [2, 3, 50])
def test_machines_in_one_folder_are_one_run(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, machines: int
) -> None:
    work = job(corpus_folder, tokenizer, validation=ValidationSettings(documents=3))
    alone = work.pack(tmp_path / "alone")
    assert len(alone.manifest["row_files"]) > 5
    # Each is killed after a file of its own, and the last one does what is missing.
    for number in range(min(machines, 4) - 1):
        interrupted(work, tmp_path / "shared", files=number + 1, shard=(number, machines))
        with pytest.raises(RopewalkError, match=r"are incomplete; to complete them, repeat the command"):
            open_rows(tmp_path / "shared")
    work.pack(tmp_path / "shared", shard=(machines - 1, machines))
    assert tree(tmp_path / "shared") == tree(tmp_path / "alone")


@pytest.mark.usefixtures("small_files")
def test_two_machines_at_once_make_one_folder(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work, rows_on_disk, others = job(corpus_folder, tokenizer), [], []

    def meanwhile(done: int, total: int) -> None:
        rows_on_disk.append(done)
        if len(rows_on_disk) == 2:
            others.append(work.pack(tmp_path / "out", shard=(1, 2)))

    rows = work.pack(tmp_path / "out", shard=(0, 2), written=meanwhile)
    # What the other has finished is not written again.
    assert len(rows_on_disk) == 2
    assert len(others) == 1
    assert rows.manifest == others[0].manifest
    work.pack(tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.usefixtures("small_files")
def test_a_folder_of_another_job_is_refused_by_the_setting(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    interrupted(job(corpus_folder, tokenizer), out)
    other = job(corpus_folder, tokenizer, changed(SHARD_SETTINGS, eos=False))
    with pytest.raises(
        RopewalkError, match=r"holds unfinished rows packed with eos: true, but you gave eos: false"
    ):
        other.pack(out)
    job(corpus_folder, tokenizer).pack(out)
    before = tree(out)
    for another in (
        other,
        job(corpus_folder, tokenizer, mixture=MixtureSettings(shuffle=True)),
        job(corpus_folder, tokenizer, validation=ValidationSettings(documents=1)),
    ):
        with pytest.raises(
            RopewalkError,
            match=r"holds rows packed with (eos: |mixture: none, but you gave mixture: per |validation\.documents: )",
        ):
            another.pack(out)
    assert tree(out) == before
    with (corpus_folder / "0.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(
        RopewalkError, match=r"holds rows made from other files, or from files that have changed since"
    ):
        job(corpus_folder, tokenizer).pack(out)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(RopewalkError, match=r"contains other files; give a new or empty folder"):
        job(corpus_folder, tokenizer).pack(tmp_path / "full")
    assert tree(tmp_path / "full") == {"thesis.txt": b"mine"}


def test_kept_tokens_are_not_made_again(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = job(corpus_folder, tokenizer)
    work.pack(tmp_path / "first", tokens=tmp_path / "tokens")
    longer = job(corpus_folder, tokenizer, PackingSettings(context=128, pattern="full"))
    longer.pack(tmp_path / "fresh")

    def fail(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr("ropewalk.data.tokens.tokenise.Encoder.encode", fail)
    with pytest.raises(AssertionError, match="tokenised again"):
        longer.pack(tmp_path / "third")
    longer.pack(tmp_path / "second", tokens=tmp_path / "tokens")
    assert tree(tmp_path / "second") == tree(tmp_path / "fresh")


COMMAND = """
import sys
import ropewalk.data.rows.writer
import ropewalk.data.read.input_splits
from ropewalk.cli.app import main
ropewalk.data.rows.writer.LEAST_FILE_TOKENS = 1024
ropewalk.data.read.input_splits.SPLIT_BYTES = 2000
main(sys.argv[1:])
"""


def command(corpus_folder: Path, tokenizer_folder: str, out: Path) -> list[str]:
    options = ["--length", "64", "--out", str(out), "--workers", "1", "--tag", "{source}: ", "--shuffle"]
    return ["data", "pack", str(corpus_folder), "--tokenizer", tokenizer_folder, *options]


@pytest.mark.slow
def test_a_run_killed_at_any_moment_ends_with_the_same_bytes(
    corpus_folder: Path, tokenizer_folder: str, tmp_path: Path
) -> None:
    def begin(out: Path) -> Program:
        return Program(COMMAND, *command(corpus_folder, tokenizer_folder, out))

    whole = tmp_path / "whole"
    process = begin(whole)
    assert process.communicate()[1] == ""
    assert process.returncode == 0
    expected = tree(whole)
    out = tmp_path / "killed"
    deaths = 0
    # As soon as so many files are there, so that each stage meets a kill whatever the machine's speed.
    for wanted in (1, 3, 6, 12, 40):
        process = begin(out)
        while process.poll() is None and len([*out.rglob("*.arrow"), *out.rglob("*.tokens")]) < wanted:
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            deaths += 1
        process.communicate()
    assert deaths >= 3
    process = begin(out)
    assert process.communicate()[1] in ("", "These rows are already packed; nothing to do.\n")
    assert process.returncode == 0
    assert tree(out) == expected


def test_a_full_disk_loses_nothing(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work = job(corpus_folder, tokenizer)
    work.pack(tmp_path / "whole")
    sizes = [len(content) for content in tree(tmp_path / "whole").values()]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (500, max(sizes) // 2, max(sizes) - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(RopewalkError, match=r"^cannot write .*: File too large$"):
                work.pack(tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    work.pack(tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_run_that_another_has_finished_meanwhile_uses_its_rows(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work, inner = job(corpus_folder, tokenizer), []

    def race(documents: int, tokens: int) -> None:
        if not inner:
            inner.append(work.pack(tmp_path / "out"))

    work.pack(tmp_path / "out", progress=race)
    work.pack(tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.usefixtures("small_files")
def test_two_jobs_at_once_in_one_folder_never_mix(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    one = job(corpus_folder, tokenizer, mixture=MixtureSettings(shuffle=True, seed=1))
    other = job(corpus_folder, tokenizer, mixture=MixtureSettings(shuffle=True, seed=2))
    refused: list[str] = []

    def meanwhile(documents: int, tokens: int) -> None:
        if not refused:
            with pytest.raises(
                RopewalkError, match=r"with mixture\.seed: 1, but you gave mixture\.seed: 2"
            ) as caught:
                other.pack(tmp_path / "out")
            refused.append(str(caught.value))

    interrupted(one, tmp_path / "out", progress=meanwhile)
    assert refused
    # And where the claim itself is another's, each file still says what it belongs to.
    claim = tmp_path / "out" / "unfinished" / "job.json"
    claim.write_text(claim.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(RopewalkError, match=r"belongs to other rows"):
        other.pack(tmp_path / "out")


def test_a_job_that_fails_before_a_row_is_there_leaves_the_folder_to_others(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(RopewalkError, match=r"the documents do not fill one row"):
        job(corpus_folder, tokenizer, PackingSettings(context=1 << 20)).pack(tmp_path / "out")
    job(corpus_folder, tokenizer).pack(tmp_path / "out")
    job(corpus_folder, tokenizer).pack(tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("kept", [False, True])
def test_a_file_that_changes_and_comes_back_is_read_again(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kept: bool
) -> None:
    path = corpus_folder / "2.jsonl"
    content = path.read_bytes()
    options = {"tokens": tmp_path / "tokens"} if kept else {}
    real = corpus_module.read_input_split

    def poisoned(split: object) -> object:
        path.write_bytes(content.replace(b"a", b"b"))
        return real(split)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module.tokenise_splits, "__kwdefaults__", {
            **(corpus_module.tokenise_splits.__kwdefaults__ or {}), "read": poisoned
        })  # fmt: skip
        with pytest.raises(RopewalkError, match=r"changed during packing"):
            job(corpus_folder, tokenizer).pack(tmp_path / "out", **options)
    path.write_bytes(content)
    job(corpus_folder, tokenizer).pack(tmp_path / "out", **options)
    job(corpus_folder, tokenizer).pack(tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_what_only_the_making_needed_goes_away_after_a_late_kill(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    job(corpus_folder, tokenizer).pack(tmp_path / "out")
    before = tree(tmp_path / "out")
    (tmp_path / "out" / "unfinished" / "tokens").mkdir(parents=True)
    (tmp_path / "out" / "unfinished" / "job.json").write_text("{}")
    job(corpus_folder, tokenizer).pack(tmp_path / "out")
    assert tree(tmp_path / "out") == before


def test_neither_rows_nor_tokens_are_kept_among_the_documents(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for out, tokens in ((corpus_folder / "rows", None), (tmp_path / "out", corpus_folder / "tokens")):
        with pytest.raises(RopewalkError, match=r"the output folder .* lies inside the source"):
            job(corpus_folder, tokenizer).pack(out, tokens=tokens)
    assert {path.name for path in corpus_folder.iterdir()} == {f"{n}.jsonl" for n in range(4)}


def test_hidden_entries_are_counted(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    (corpus_folder / ".git").mkdir()
    (corpus_folder / ".hidden.txt").write_text("x")
    rows = job(corpus_folder, tokenizer).pack(tmp_path / "out")
    assert rows.manifest["counts"]["reading"]["hidden_entries"] == 2


def test_a_held_out_text_is_not_trained_on_as_token_ids(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    texts = [f"text number {n} of its kind" for n in range(40)]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    frames = [
        [tokenizer.bos_token_id, *each, tokenizer.eos_token_id] if n % 2 else each
        for n, each in enumerate(ids)
    ]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"input_ids": each}) + "\n" for each in frames))
    specs = [SourceSpec(path=str(tmp_path / name)) for name in ("texts.jsonl", "ids.jsonl")]
    work = Job.of(specs, tokenizer, PackingSettings(context=32), validation=ValidationSettings(documents=10))
    rows = work.pack(tmp_path / "out")

    def plain(document: object) -> str:
        return tokenizer.decode(document.input_ids, skip_special_tokens=True)

    held = [plain(document) for document in rows.validation]
    assert len(set(held)) == len(held)
    trained = "".join(tokenizer.decode(row.input_ids, skip_special_tokens=True) for row in rows)
    assert not [text for text in held if text in trained]
    split = rows.manifest["counts"]["split"]
    # Every text comes twice, and its copy goes with it.
    assert split["withheld_duplicates"] == 2 * len(held) - len(held)
    assert split["training_documents"] == 80 - 2 * len(held)
    assert imbalance(token_account(rows.manifest["counts"])) == (0, 0)


def test_a_tag_is_tokenised_by_what_the_identity_is_of(
    corpus_folder: Path, tokenizer_folder: str, tmp_path: Path
) -> None:
    tagged = changed(SHARD_SETTINGS, tag="<s>{source}: ")
    with pytest.raises(RopewalkError, match=r"contains a BOS or EOS token for the source 'a'"):
        job(corpus_folder, tokenizer_folder, tagged).pack(tmp_path / "out")
    job(corpus_folder, tokenizer_folder, changed(SHARD_SETTINGS, tag="{source}: ")).pack(tmp_path / "out")
