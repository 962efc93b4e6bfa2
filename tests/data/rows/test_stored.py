"""Rows on disk: damaged or foreign folders are told, and parts merge to the rows of one run."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from ropewalk.data import ValidationSettings, merge_parts, open_rows, tokenizer_identity
from ropewalk.data.rows.store import Part
from ropewalk.errors import RopewalkError
from tests.data.cases import changed
from tests.data.rows.rows_cases import SETTINGS, SHARD_SETTINGS, job, prepare, tree
from tests.data.tiny_tokenizer import make_tokenizer


def test_damaged_folders_are_told(corpus: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    rows = prepare(corpus, tokenizer)
    table, path = rows.folder / "rows-00000.arrow", rows.folder / "manifest.json"
    content, manifest = table.read_bytes(), json.loads(path.read_text())
    del rows
    for damaged in (content[: len(content) // 2], content[:10], b""):
        table.unlink()
        table.write_bytes(damaged)
        with pytest.raises(RopewalkError, match=r"rows-00000\.arrow has \d+ bytes, but its manifest says"):
            prepare(corpus, tokenizer)
    table.unlink()
    with pytest.raises(RopewalkError, match=r"rows-00000\.arrow is missing"):
        prepare(corpus, tokenizer)
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    table.write_bytes(flipped)
    with pytest.raises(RopewalkError, match=r"rows-00000\.arrow is damaged: its digest"):
        open_rows(table.parent, verify=True)
    table.unlink()
    table.write_bytes(content)
    open_rows(table.parent, verify=True)
    for change, message in (
        ({"format_version": 99}, "format version 99"),
        ({"counts": {}}, "is damaged"),
        ({"settings": {"colour": 1}}, "is damaged"),
    ):
        path.write_text(json.dumps(manifest | change))
        with pytest.raises(RopewalkError, match=message):
            open_rows(table.parent)
    with pytest.raises(RopewalkError, match="contains no packed rows"):
        open_rows(tmp_path / "nowhere")


def test_rows_of_another_tokenizer_or_setting_are_refused(
    corpus: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    rows = prepare(corpus, tokenizer)
    open_rows(rows.folder, tokenizer=tokenizer_identity(tokenizer), settings=SETTINGS)
    other = tokenizer_identity(make_tokenizer(bos="<begin>"))
    with pytest.raises(RopewalkError, match=r"packed with another tokenizer .*sha256"):
        open_rows(rows.folder, tokenizer=other)
    with pytest.raises(RopewalkError, match=r"was packed with positions reset, not continuous"):
        open_rows(rows.folder, settings=changed(SETTINGS, positions="continuous"))


@pytest.mark.usefixtures("small_files")
def test_parts_in_folders_of_their_own_merge_to_one_run(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work = job(corpus_folder, tokenizer, validation=ValidationSettings(documents=3))
    alone = work.pack(tmp_path / "alone")
    parts = [tmp_path / f"part{number}" for number in range(3)]
    for number in (2, 0, 1):
        written = work.pack(parts[number], shard=(number, 3))
        assert isinstance(written, Part)
    names = [{path.name for path in part.glob("rows-*.arrow")} for part in parts]
    assert set.union(*names) == {path.name for path in (tmp_path / "alone").glob("rows-*.arrow")}
    assert sum(map(len, names)) == len(set.union(*names)), "each file is written by one machine"
    with pytest.raises(RopewalkError, match=r"rows-\d+\.arrow .*missing from all given folders"):
        merge_parts(parts[:2], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merged = merge_parts([parts[1], parts[2], parts[0]], tmp_path / "merged")
    assert tree(tmp_path / "merged") == tree(tmp_path / "alone")
    assert len(merged) == len(alone)
    with pytest.raises(RopewalkError, match=r"is not empty; give a new folder"):
        merge_parts(parts, tmp_path / "merged")
    merge_parts([parts[0], tmp_path / "alone"], tmp_path / "with a complete one")
    assert tree(tmp_path / "with a complete one") == tree(tmp_path / "alone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(RopewalkError, match=r"contains no finished shard of rows"):
        merge_parts([parts[0], tmp_path / "empty"], tmp_path / "again")
    other = tmp_path / "other"
    job(corpus_folder, tokenizer, changed(SHARD_SETTINGS, context=65)).pack(other, shard=(0, 3))
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


def part_of_two(corpus_folder: Path, tokenizer: object, folder: Path) -> Path:
    assert isinstance(job(corpus_folder, tokenizer).pack(folder, shard=(0, 2)), Part)
    return folder


@pytest.mark.usefixtures("small_files")
def test_manifests_lead_to_no_file_outside_their_folder(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    first = job(corpus_folder, tokenizer).pack(whole).manifest["row_files"][0]
    part = part_of_two(corpus_folder, tokenizer, tmp_path / "part")
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
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, change: dict[str, object]
) -> None:
    part = part_of_two(corpus_folder, tokenizer, tmp_path / "part")
    plan = part / "unfinished" / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | change))
    with pytest.raises(RopewalkError, match=r"damaged|belongs to other rows"):
        merge_parts([part], tmp_path / "merged")
    plan.write_text("[]")
    with pytest.raises(RopewalkError, match=r"contains no JSON object"):
        merge_parts([part], tmp_path / "merged")


def test_links_in_a_part_become_files_and_bring_nothing_that_was_not_recorded(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    part, stored, secret = tmp_path / "part", tmp_path / "stored.arrow", tmp_path / "secret"
    rows = job(corpus_folder, tokenizer).pack(part).manifest["row_files"]
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
def test_damage_to_a_part_is_found_where_it_is_used(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work = job(corpus_folder, tokenizer, validation=ValidationSettings(documents=3))
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
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    job(corpus_folder, tokenizer, validation=ValidationSettings(documents=3)).pack(tmp_path / "out")
    path = tmp_path / "out" / "validation.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RopewalkError, match=r"validation\.arrow is damaged"):
        open_rows(tmp_path / "out", verify=True)
    path.write_bytes(content[:-8])
    with pytest.raises(RopewalkError, match=r"validation\.arrow has \d+ bytes"):
        open_rows(tmp_path / "out")
