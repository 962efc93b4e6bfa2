"""The script that writes token files with other programs' own writers."""

import pytest

from scripts import token_file_fixtures as script
from tests.places import ROOT


def test_documents_end_with_eos_and_begin_with_bos_if_wanted():
    plain, begun = script.documents(bos=False), script.documents(bos=True)
    assert [ids[1:] for ids in begun] == plain
    assert len({ids[-1] for ids in plain}) == 1


def test_files_are_those_that_the_tests_read(tmp_path):
    for name in ("datatrove", "dolma", "megatron"):
        pytest.importorskip(name)
    script.main(tmp_path)
    kept = ROOT / "tests" / "data" / "read" / "token_files"
    assert {path.name for path in tmp_path.iterdir()} <= {path.name for path in kept.iterdir()}
