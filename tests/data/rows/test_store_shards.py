"""A folder of rows: the same to the last byte however often it was interrupted and by how many it was made."""

import json
import resource
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from ropewalk.data import (
    InterleaveSettings,
    MixtureSettings,
    PackedRows,
    PackingSettings,
    SourceSpec,
    ValidationSettings,
    merge_parts,
    open_rows,
)
from ropewalk.data.rows.manifest import imbalance, token_account
from ropewalk.data.rows.store import Part
from ropewalk.data.settings import WorkSettings
from ropewalk.data.tokens import corpus as corpus_module
from ropewalk.errors import RopewalkError
from tests.data.cases import Job, changed, refusal
from tests.programs import Program

SETTINGS = PackingSettings(context=64, pattern="anchor")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for file in range(4):
        with (folder / f"{file}.jsonl").open("w", encoding="utf-8") as out:
            for number, length in enumerate(random.integers(0, 400, 40)):
                text = f"[{file}.{number}] ".ljust(int(length), "abc"[number % 3])
                out.write(json.dumps({"text": text, "source": "ab"[number % 2]}) + "\n")
    return folder


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many files of rows from few tokens."""
    monkeypatch.setattr("ropewalk.data.rows.store.LEAST_FILE_TOKENS", 1024)


def tree(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def job(corpus: Path, tokenizer: object, packing: PackingSettings = SETTINGS, **options: object) -> Job:
    return Job.of([SourceSpec(path=str(corpus))], tokenizer, packing, **options)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("machines", [2, 3, 50])
def test_shards_in_one_folder_are_one_run(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, machines: int
) -> None:
    work = job(corpus, tokenizer, validation=ValidationSettings(documents=3))
    alone = work.pack(tmp_path / "alone")
    assert isinstance(alone, PackedRows)
    assert len(alone.manifest["row_files"]) > 5
    for number in range(machines):
        result = work.pack(tmp_path / "shared", shard=(number, machines))
        assert isinstance(result, Part) == (number < machines - 1)
        if isinstance(result, Part):
            assert result.total == len(alone)
            with pytest.raises(RopewalkError, match=r"are not complete; run the same command again"):
                open_rows(tmp_path / "shared")
    assert tree(tmp_path / "shared") == tree(tmp_path / "alone")


@pytest.mark.usefixtures("small_files")
def test_parts_in_folders_of_their_own_merge_to_one_run(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work = job(corpus, tokenizer, validation=ValidationSettings(documents=3))
    alone = work.pack(tmp_path / "alone")
    parts = [tmp_path / f"part{number}" for number in range(3)]
    for number in (2, 0, 1):
        written = work.pack(parts[number], shard=(number, 3))
        assert isinstance(written, Part)
    names = [{path.name for path in part.glob("rows-*.arrow")} for part in parts]
    assert set.union(*names) == {path.name for path in (tmp_path / "alone").glob("rows-*.arrow")}
    assert sum(map(len, names)) == len(set.union(*names)), "each file is written by one machine"
    with pytest.raises(RopewalkError, match=r"rows-\d+\.arrow .*in none of the parts"):
        merge_parts(parts[:2], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merged = merge_parts([parts[1], parts[2], parts[0]], tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(tmp_path / "alone")
    assert len(merged) == len(alone)
    with pytest.raises(RopewalkError, match=r"holds something already"):
        merge_parts(parts, tmp_path / "merged")
    merge_parts([parts[0], tmp_path / "alone"], tmp_path / "with a complete one")
    assert tree(tmp_path / "with a complete one") == tree(tmp_path / "alone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RopewalkError, match=r"holds no finished part of rows"):
        merge_parts([parts[0], tmp_path / "empty"], tmp_path / "again")
    other = tmp_path / "other"
    job(corpus, tokenizer, changed(SETTINGS, context=65)).pack(other, shard=(0, 3))
    with pytest.raises(
        RopewalkError, match=r"is no part of the same rows .*with settings\.context 65, not 64"
    ):
        merge_parts([parts[0], parts[1], other], tmp_path / "again")


HOSTILE = (
    "../victim.arrow",
    "sub/rows.arrow",
    "..\\victim.arrow",
    "C:victim.arrow",
    "",
    ".",
    "..",
    "a\0b",
    7,
    None,
)


def part_of_two(corpus: Path, tokenizer: object, folder: Path) -> Path:
    assert isinstance(job(corpus, tokenizer).pack(folder, shard=(0, 2)), Part)
    return folder


@pytest.mark.usefixtures("small_files")
def test_manifests_lead_to_no_file_outside_their_folder(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    first = job(corpus, tokenizer).pack(whole).manifest["row_files"][0]
    part = part_of_two(corpus, tokenizer, tmp_path / "part")
    # What a traversal would read, and what it would overwrite beside the merged folder.
    outside, victim = tmp_path / "outside" / "victim.arrow", tmp_path / "victim.arrow"
    outside.parent.mkdir()
    shutil.copyfile(whole / first["name"], outside)
    victim.write_text("mine")
    manifest, plan = whole / "manifest.json", part / "unfinished" / "plan.json"
    known = {path: json.loads(path.read_text()) for path in (manifest, plan)}
    for name in (*HOSTILE, str(outside), "manifest.json", "rows-00001.arrow"):
        rows = known[manifest]["row_files"]
        manifest.write_text(json.dumps(known[manifest] | {"row_files": [first | {"name": name}, *rows[1:]]}))
        for read in (lambda: open_rows(whole), lambda: merge_parts([whole], tmp_path / "merged")):
            with pytest.raises(RopewalkError, match=r"manifest\.json (lists the file|is damaged: it lists)"):
                read()
        validation = known[manifest]["validation_file"] | {"name": name}
        manifest.write_text(json.dumps(known[manifest] | {"validation_file": validation}))
        with pytest.raises(
            RopewalkError, match=r"manifest\.json (lists the file|is damaged: its validation)"
        ):
            open_rows(whole)
        rows = known[plan]["row_files"]
        plan.write_text(json.dumps(known[plan] | {"row_files": [[name, rows[0][1]], *rows[1:]]}))
        with pytest.raises(RopewalkError, match=r"plan\.json (lists the file|is damaged: it lists)"):
            merge_parts([part], tmp_path / "merged")
    assert victim.read_text() == "mine"
    assert not (tmp_path / "merged").exists()


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize(
    "change",
    [
        {"row_files": None},
        {"row_files": [7]},
        {"row_files": [["rows-00000.arrow"]]},
        {"row_files": [["rows-00000.arrow", -1]]},
        {"row_files": [["rows-00000.arrow", "many"]]},
        {"settings": None},
    ],
)
def test_a_part_with_a_damaged_plan_is_told(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, change: dict[str, object]
) -> None:
    part = part_of_two(corpus, tokenizer, tmp_path / "part")
    plan = part / "unfinished" / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | change))
    with pytest.raises(RopewalkError, match=r"damaged|belongs to other rows"):
        merge_parts([part], tmp_path / "merged")
    plan.write_text("[]")
    with pytest.raises(RopewalkError, match=r"holds no JSON object"):
        merge_parts([part], tmp_path / "merged")


def test_links_in_a_part_become_files_and_bring_nothing_that_was_not_recorded(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    part, stored, secret = tmp_path / "part", tmp_path / "stored.arrow", tmp_path / "secret"
    rows = job(corpus, tokenizer).pack(part).manifest["row_files"]
    file = part / rows[0]["name"]
    file.rename(stored)
    # As in the Hub's cache, where files are links.
    file.symlink_to(stored)
    merge_parts([part], tmp_path / "merged")
    assert not (tmp_path / "merged" / file.name).is_symlink()
    secret.write_bytes(b"s" * rows[0]["bytes"])
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(RopewalkError, match=r"is damaged; run its shard again"):
        merge_parts([part], tmp_path / "again")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "corpus",
        "merged",
        "part",
        "secret",
        "stored.arrow",
    ]


@pytest.mark.usefixtures("small_files")
def test_a_folder_of_another_job_is_refused_by_the_setting(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    job(corpus, tokenizer).pack(out, shard=(0, 2))
    other = job(corpus, tokenizer, changed(SETTINGS, eos=False))
    with pytest.raises(RopewalkError, match=r"holds unfinished rows with settings\.eos true, not false"):
        other.pack(out)
    complete = job(corpus, tokenizer).pack(out)
    before = tree(out)
    for another in (
        other,
        job(corpus, tokenizer, mixture=MixtureSettings(shuffle=True)),
        job(corpus, tokenizer, validation=ValidationSettings(documents=1)),
    ):
        with pytest.raises(
            RopewalkError,
            match=r"holds rows with (settings\.eos|mixing none, not per source|validation\.documents)",
        ):
            another.pack(out)
    assert tree(out) == before
    with (corpus / "0.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(
        RopewalkError, match=r"holds rows made of other files, or of files that have changed since"
    ):
        job(corpus, tokenizer).pack(out)
    assert isinstance(complete, PackedRows)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("mine")
    with pytest.raises(RopewalkError, match=r"holds something else; give a new or empty folder"):
        job(corpus, tokenizer).pack(tmp_path / "full")
    assert tree(tmp_path / "full") == {"thesis.txt": b"mine"}


def test_kept_tokens_are_not_made_again(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = job(corpus, tokenizer)
    work.pack(tmp_path / "first", tokens=tmp_path / "tokens")
    longer = job(corpus, tokenizer, PackingSettings(context=128, pattern="full"))
    longer.pack(tmp_path / "fresh")

    def fail(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr("ropewalk.data.tokens.tokenise._encode", fail)
    with pytest.raises(AssertionError, match="tokenised again"):
        longer.pack(tmp_path / "third")
    longer.pack(tmp_path / "second", tokens=tmp_path / "tokens")
    assert tree(tmp_path / "second") == tree(tmp_path / "fresh")


COMMAND = """
import sys
import ropewalk.data.rows.store
import ropewalk.data.tokens.token_shards
from ropewalk.cli.app import main
ropewalk.data.rows.store.LEAST_FILE_TOKENS = 1024
ropewalk.data.tokens.token_shards.SHARD_TOKENS = 2000
main(sys.argv[1:])
"""


def command(corpus: Path, tokenizer_folder: str, out: Path) -> list[str]:
    options = ["--length", "64", "--out", str(out), "--workers", "1", "--tag", "{source}: ", "--shuffle"]
    return ["data", "pack", str(corpus), "--tokenizer", tokenizer_folder, *options]


def test_a_run_killed_at_any_moment_ends_with_the_same_bytes(
    corpus: Path, tokenizer_folder: str, tmp_path: Path
) -> None:
    def begin(out: Path) -> Program:
        return Program(COMMAND, *command(corpus, tokenizer_folder, out))

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
        while process.poll() is None and len(list(out.rglob("*.arrow"))) < wanted:
            time.sleep(0.001)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            deaths += 1
        process.communicate()
    assert deaths >= 3
    process = begin(out)
    assert process.communicate()[1] in ("", "These rows were packed before; nothing was done.\n")
    assert process.returncode == 0
    assert tree(out) == expected


def test_a_full_disk_loses_nothing(corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    work = job(corpus, tokenizer)
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
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work, inner = job(corpus, tokenizer), []

    def race(documents: int, tokens: int) -> None:
        if not inner:
            inner.append(work.pack(tmp_path / "out"))

    rows = work.pack(tmp_path / "out", progress=race)
    assert isinstance(rows, PackedRows)
    work.pack(tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.usefixtures("small_files")
def test_two_jobs_at_once_in_one_folder_never_mix(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    one = job(corpus, tokenizer, mixture=MixtureSettings(shuffle=True, seed=1))
    other = job(corpus, tokenizer, mixture=MixtureSettings(shuffle=True, seed=2))
    refused: list[str] = []

    def meanwhile(documents: int, tokens: int) -> None:
        if not refused:
            with pytest.raises(RopewalkError, match=r"with mixing\.seed 1, not 2") as caught:
                other.pack(tmp_path / "out", shard=(1, 2))
            refused.append(str(caught.value))

    assert isinstance(one.pack(tmp_path / "out", shard=(0, 2), progress=meanwhile), Part)
    assert refused
    # And where the claim itself is another's, each file still says what it belongs to.
    claim = tmp_path / "out" / "unfinished" / "job.json"
    claim.write_text(claim.read_text().replace('"seed": 1', '"seed": 2'))
    with pytest.raises(RopewalkError, match=r"belongs to other rows"):
        other.pack(tmp_path / "out", shard=(1, 2))


def test_a_job_that_fails_before_a_row_is_there_leaves_the_folder_to_others(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(RopewalkError, match=r"not one row is full"):
        job(corpus, tokenizer, PackingSettings(context=1 << 20)).pack(tmp_path / "out")
    assert isinstance(job(corpus, tokenizer).pack(tmp_path / "out"), PackedRows)
    job(corpus, tokenizer).pack(tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.parametrize("kept", [False, True])
def test_a_file_that_changes_and_comes_back_is_read_again(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kept: bool
) -> None:
    path = corpus / "2.jsonl"
    content = path.read_bytes()
    options = {"tokens": tmp_path / "tokens"} if kept else {}
    real = corpus_module.read_input_split

    def poisoned(portion: object, skip: int) -> object:
        path.write_bytes(content.replace(b"a", b"b"))
        return real(portion, skip)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module.tokenise_splits, "__kwdefaults__", {
            **(corpus_module.tokenise_splits.__kwdefaults__ or {}), "read": poisoned
        })  # fmt: skip
        with pytest.raises(RopewalkError, match=r"changed while it was being packed"):
            job(corpus, tokenizer).pack(tmp_path / "out", **options)
    path.write_bytes(content)
    job(corpus, tokenizer).pack(tmp_path / "out", **options)
    job(corpus, tokenizer).pack(tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.usefixtures("small_files")
def test_damage_to_a_part_is_found_where_it_is_used(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work = job(corpus, tokenizer, validation=ValidationSettings(documents=3))
    work.pack(tmp_path / "whole")
    parts = [tmp_path / "part0", tmp_path / "part1"]
    for number, part in enumerate(parts):
        work.pack(part, shard=(number, 2))
    damaged = sorted(parts[0].glob("rows-*.arrow"))[1]
    content = damaged.read_bytes()
    for broken in (content[: len(content) // 2], content[:-1] + b"x", b""):
        damaged.write_bytes(broken)
        with pytest.raises(RopewalkError, match=rf"{damaged.name} is damaged; run its shard again"):
            merge_parts(parts, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
    # Running the shard again mends it, and so does a run that goes on in its folder.
    assert isinstance(work.pack(parts[0], shard=(0, 2)), Part)
    assert damaged.read_bytes() == content
    damaged.write_bytes(content[:-1])
    shutil.copytree(parts[0], tmp_path / "resumed")
    work.pack(tmp_path / "resumed")
    assert tree(tmp_path / "resumed") == tree(tmp_path / "whole")
    # A machine that completes the folder reads what the others wrote.
    with pytest.raises(RopewalkError, match=rf"{damaged.name} is damaged; delete it and run its shard again"):
        work.pack(parts[0], shard=(1, 2))
    damaged.unlink()
    assert isinstance(work.pack(parts[0], shard=(1, 2)), Part)
    work.pack(parts[0], shard=(0, 2))
    assert tree(parts[0]) == tree(tmp_path / "whole")


def test_held_out_documents_are_checked_like_rows(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    job(corpus, tokenizer, validation=ValidationSettings(documents=3)).pack(tmp_path / "out")
    path = tmp_path / "out" / "validation.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RopewalkError, match=r"validation\.arrow is damaged"):
        open_rows(tmp_path / "out", verify=True)
    path.write_bytes(content[:-8])
    with pytest.raises(RopewalkError, match=r"validation\.arrow has \d+ bytes"):
        open_rows(tmp_path / "out")


def test_what_only_the_making_needed_goes_away_after_a_late_kill(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    job(corpus, tokenizer).pack(tmp_path / "out")
    before = tree(tmp_path / "out")
    (tmp_path / "out" / "unfinished" / "tokens").mkdir(parents=True)
    (tmp_path / "out" / "unfinished" / "job.json").write_text("{}")
    job(corpus, tokenizer).pack(tmp_path / "out")
    assert tree(tmp_path / "out") == before


def test_neither_rows_nor_tokens_are_kept_among_the_documents(
    corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    for out, tokens in ((corpus / "rows", None), (tmp_path / "out", corpus / "tokens")):
        with pytest.raises(RopewalkError, match=r"cannot be kept in .*, inside the source"):
            job(corpus, tokenizer).pack(out, tokens=tokens)
    assert {path.name for path in corpus.iterdir()} == {f"{n}.jsonl" for n in range(4)}


def test_hidden_entries_are_counted(corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    (corpus / ".git").mkdir()
    (corpus / ".hidden.txt").write_text("x")
    rows = job(corpus, tokenizer).pack(tmp_path / "out")
    assert isinstance(rows, PackedRows)
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
    assert isinstance(rows, PackedRows)

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
    corpus: Path, tokenizer_folder: str, tmp_path: Path
) -> None:
    tagged = changed(SETTINGS, tag="<s>{source}: ")
    with pytest.raises(RopewalkError, match=r"holds a BOS or EOS token for the source 'a'"):
        job(corpus, tokenizer_folder, tagged).pack(tmp_path / "out")
    job(corpus, tokenizer_folder, changed(SETTINGS, tag="{source}: ")).pack(tmp_path / "out")


@pytest.mark.parametrize("shard", [(0, 0), (2, 2), (-1, 2), (1, 1)])
def test_no_such_shard(shard: tuple[int, int]) -> None:
    assert refusal(WorkSettings, shard=shard).startswith("shard must be i/n with i from 0")


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


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(packings, mixtures, validations)
def test_every_token_is_accounted_for(
    corpus: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    packing: PackingSettings,
    mixture: MixtureSettings | None,
    validation: ValidationSettings | None,
) -> None:
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    work = job(corpus, tokenizer, packing, mixture=mixture, validation=validation)
    try:
        rows = work.pack(tmp_path / "out", tokens=tmp_path / "tokens")
    except RopewalkError as error:
        # A document of 400 bytes is skipped where a row takes 16 of them.
        if "not one row is full" not in str(error):
            raise
        return
    assert isinstance(rows, PackedRows)
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
