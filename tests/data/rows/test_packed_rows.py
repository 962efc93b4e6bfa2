"""Rows on disk: damaged or foreign folders are told, also to a machine that completes the rows of others."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from ropewalk.data import ValidationSettings, open_rows, tokenizer_identity
from ropewalk.errors import RopewalkError
from tests.data.rows.rows_cases import interrupted, job, prepare, tree
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


def test_rows_of_another_tokenizer_are_refused(corpus: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = prepare(corpus, tokenizer)
    open_rows(rows.folder, tokenizer=tokenizer_identity(tokenizer))
    other = tokenizer_identity(make_tokenizer(bos="<begin>"))
    with pytest.raises(
        RopewalkError, match=r"packed with another tokenizer \(.*sha256 .*\) than the given one \(sha256 "
    ):
        open_rows(rows.folder, tokenizer=other)


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
def test_damage_to_an_interrupted_run_is_found_and_mended(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work = job(corpus_folder, tokenizer, validation=ValidationSettings(documents=3))
    work.pack(tmp_path / "whole")
    part = interrupted(work, tmp_path / "part", files=3)
    content = (part / "rows-00001.arrow").read_bytes()
    for number, broken in enumerate((content[: len(content) // 2], content[:-1] + b"x", b"")):
        mended = tmp_path / str(number)
        shutil.copytree(part, mended)
        (mended / "rows-00001.arrow").write_bytes(broken)
        # Whichever machine's turn it is.
        work.pack(mended, shard=(number, 3))
        assert tree(mended) == tree(tmp_path / "whole")


@pytest.mark.usefixtures("small_files")
def test_a_file_that_goes_before_the_end_is_missed(
    corpus_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    work, first = job(corpus_folder, tokenizer), tmp_path / "out" / "rows-00000.arrow"

    def remove(done: int, total: int) -> None:
        if done == total:
            first.unlink()

    with pytest.raises(RopewalkError, match=rf"{first.name} was removed while rows were packed; repeat the"):
        work.pack(tmp_path / "out", written=remove)
    work.pack(tmp_path / "out")
    work.pack(tmp_path / "whole")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


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
