import json
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from tests.data.tiny_tokenizer import make_tokenizer
from tests.places import SHARED


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def shared() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"no real text at {SHARED}")
    return SHARED


@pytest.fixture
def corpus_folder(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for file in range(4):
        with (folder / f"{file}.jsonl").open("w", encoding="utf-8") as out:
            for number, length in enumerate(random.integers(0, 400, 40)):
                text = f"[{file}.{number}] ".ljust(int(length), "abc"[number % 3])
                out.write(json.dumps({"text": text, "source": "ab"[number % 2]}) + "\n")
    return folder
