"""Write the token files that the tests read: the same documents, stored by datatrove, Megatron and dolma themselves.

Run it in an environment of its own, because ropewalk needs none of them:
    pip install datatrove==0.10.1 torch transformers
    pip install --no-deps megatron-core==0.16.1 dolma==1.2.1 smart-open
    python -m scripts.token_file_fixtures tests/data/read/token_files
"""

from __future__ import annotations

import logging
import sys
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import numpy as np

from tests.data.tiny_tokenizer import TEXTS, make_tokenizer


def documents(bos: bool) -> list[list[int]]:
    """Token ids of each text, ended by EOS, and begun by BOS if wanted."""
    tokenizer = make_tokenizer()
    begin = [tokenizer.bos_token_id] if bos else []
    return [[*begin, *tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in TEXTS]


def main(folder: Path) -> None:
    """Write all files."""
    # The writer needs nothing of the package around it, whose filters need many packages and a compiler.
    for name in ("dolma", "dolma.core", "dolma.tokenizer"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(distribution("dolma").locate_file(name.replace(".", "/")))]
    loggers = sys.modules["dolma.core.loggers"] = ModuleType("dolma.core.loggers")
    loggers.get_logger = logging.getLogger  # type: ignore[attr-defined]
    types = sys.modules["dolma.core.data_types"] = ModuleType("dolma.core.data_types")
    types.InputSpec = object  # type: ignore[attr-defined]
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile
    from dolma.tokenizer.data_types import TokenizerOutput
    from dolma.tokenizer.memmap_writer import MemmapWriter
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder.mkdir(parents=True, exist_ok=True)
    for width in (2, 4):
        texts = documents(bos=width == 4)
        written = TokenizedFile(
            str(folder),
            f"datatrove{width}.ds",
            tokenizer_name_or_path="example/bytes",
            save_final_metadata=True,
            token_size=width,
        )
        for ids in texts:
            written.write(ids, None)
        written.close()
        dtype = np.uint16 if width == 2 else np.int32
        megatron = IndexedDatasetBuilder(str(folder / f"megatron{width}.bin"), dtype=dtype)
        for ids in texts:
            # Two sequences a document, as of --split-sentences.
            megatron.add_document(np.array(ids, dtype), [len(ids) // 2, len(ids) - len(ids) // 2])
        megatron.finalize(str(folder / f"megatron{width}.idx"))
        with MemmapWriter(str(folder / f"dolma{width}"), np.dtype(f"uint{8 * width}"), 1000) as writer:
            for number, ids in enumerate(texts):
                rest = writer.write_many(
                    [TokenizerOutput.from_tokens(f"id{number}", "a.jsonl", number + 1, ids)]
                )
                assert not rest


if __name__ == "__main__":
    main(Path(sys.argv[1]))
