"""Rows on disk: damaged or foreign folders are told, also to a machine that completes the rows of others."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from ropewalk.data import ValidationSettings, open_rows, tokenizer_identity
from ropewalk.data.rows.writer import Part
from ropewalk.errors import RopewalkError
from tests.data.cases import changed
from tests.data.rows.rows_cases import SETTINGS, job, prepare, tree
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
    with pytest.raises(RopewalkError, match=r"rows-00000\.arrow is damaged: its SHA-256"):
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
    with pytest.raises(
        RopewalkError, match=r"packed with another tokenizer \(.*sha256 .*\) than the given one \(sha256 "
    ):
        open_rows(rows.folder, tokenizer=other)
    with pytest.raises(
        RopewalkError, match=r"was packed with positions: reset, but you gave positions: continuous"
    ):
        open_rows(rows.folder, settings=changed(SETTINGS, positions="continuous"))


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


@pytest.mark.usefixtures("small_files")
def test_manifests_lead_to_no_file_outside_their_folder(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    first = job(corpus_folder, tokenizer).pack(whole).manifest["row_files"][0]
    # What a traversal would read.
    outside = tmp_path / "outside" / "victim.arrow"
    outside.parent.mkdir()
    shutil.copyfile(whole / first["name"], outside)
    manifest = whole / "manifest.json"
    known = json.loads(manifest.read_text())
    for name in (*HOSTILE, str(outside), "manifest.json", "rows-00001.arrow"):
        rows = known["row_files"]
        manifest.write_text(json.dumps(known | {"row_files": [first | {"name": name}, *rows[1:]]}))
        with pytest.raises(RopewalkError, match=r"manifest\.json (lists the file|is damaged: it lists)"):
            open_rows(whole)
        manifest.write_text(
            json.dumps(known | {"validation_file": known["validation_file"] | {"name": name}})
        )
        with pytest.raises(
            RopewalkError, match=r"manifest\.json (lists the file|is damaged: its validation)"
        ):
            open_rows(whole)


@pytest.mark.usefixtures("small_files")
def test_damage_to_a_part_is_found_where_it_is_used(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work = job(corpus_folder, tokenizer, validation=ValidationSettings(documents=3))
    work.pack(tmp_path / "whole")
    part = tmp_path / "part"
    work.pack(part, shard=(0, 2))
    damaged = sorted(part.glob("rows-*.arrow"))[1]
    content = damaged.read_bytes()
    for broken in (content[: len(content) // 2], content[:-1] + b"x", b""):
        damaged.write_bytes(broken)
        # Running the shard again mends it, and so does a run that goes on in its folder.
        assert isinstance(work.pack(part, shard=(0, 2)), Part)
        assert damaged.read_bytes() == content
    damaged.write_bytes(content[:-1])
    shutil.copytree(part, tmp_path / "resumed")
    work.pack(tmp_path / "resumed")
    assert tree(tmp_path / "resumed") == tree(tmp_path / "whole")
    # A machine that completes the folder reads what the others wrote.
    with pytest.raises(
        RopewalkError, match=rf"{damaged.name} is damaged; delete the file and repeat the command"
    ):
        work.pack(part, shard=(1, 2))
    damaged.unlink()
    assert isinstance(work.pack(part, shard=(1, 2)), Part)
    work.pack(part, shard=(0, 2))
    assert tree(part) == tree(tmp_path / "whole")


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
