"""Packages of the form of the two that examples/smollm2.py reads, with a tiny random model and five short books."""

import zipfile
from pathlib import Path

import numpy as np

from examples.smollm2 import BOOKS, GGUF, MODEL, TEXT

HIDDEN, MIDDLE, HEADS, KV_HEADS, LAYERS = 64, 96, 2, 1, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOOK = {1: "In the beginning God created the heaven and the earth. ", 2: "Now these are the names. "}
BOOK |= {8: "Now it came to pass in the days when the judges ruled. ", 16: "The words of Nehemiah. "}
BOOK |= {66: "The Revelation of Jesus Christ. "}


def _alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary (GPT-2)."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return list(bytes_to_unicode().values())


def write_gguf(path: Path) -> None:
    """A llama of two layers, trained at 8,192 tokens, with the keys of the real file."""
    import gguf

    tokens = [*SPECIAL, *_alphabet(), "Ġt"]
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(MIDDLE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(
        "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    )
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    keys = HIDDEN // HEADS * KV_HEADS
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "output")}
        shapes |= {f"blk.{layer}.attn_{name}": (keys, HIDDEN) for name in ("k", "v")}
        shapes |= {f"blk.{layer}.ffn_{name}": (MIDDLE, HIDDEN) for name in ("gate", "up")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, MIDDLE)
    for name, shape in shapes.items():
        numbers = generator.normal(0, 0.1, shape).astype(np.float32)
        writer.add_tensor(f"{name}.weight", 1 + numbers if len(shape) == 1 else numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_packages(folder: Path, times: int = 400) -> None:
    """Write both packages; each book repeats its sentence so many times."""
    write_gguf(folder / "tiny.gguf")
    with zipfile.ZipFile(folder / MODEL, "w") as wheel:
        wheel.write(folder / "tiny.gguf", GGUF)
    (folder / "tiny.gguf").unlink()
    text, verses = "\n", {}
    for number, sentence in BOOK.items():
        # The first verse of a book stands alone; others are written with their first and last character.
        verses[1_000_000 * number + 1001] = len(text)
        verses[1_000_000 * number + 1002] = (len(text) + len(sentence), len(text) + 2 * len(sentence))
        text += sentence * times
    module = f'bible = Bible(Version.KING_JAMES, """{text}""", {verses}, False)'
    with zipfile.ZipFile(folder / BOOKS, "w") as wheel:
        wheel.writestr(TEXT, module)
