"""Which parts of ``tokenizer.json`` the tokenizer classes of transformers keep, and which they make themselves.

A class with an ``__init__`` of its own takes vocabulary, merges and post-processor from the file, and makes normalizer,
pre-tokenizer and decoder itself (``TokenizersBackend.convert_to_native_format``, transformers 5.24). The class is the
one that the checkpoint names, or the one of its model's type: ``tokenizer_classes.json`` lists types by class, and
those whose checkpoints name a wrong class (written by ``tests/data/tokens/tokenizer_classes.py``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

AS_IN_FILE = {"", "TokenizersBackend", "PreTrainedTokenizer", "PythonBackend", "BloomTokenizer"}
"""Classes (without ``Fast``) that change nothing of the file."""

END_OF_TEXT = "<|endoftext|>"
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_MARKS = _QWEN.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"\s\p{L}\p{N}", r"\s\p{L}\p{M}\p{N}")


@dataclass(frozen=True)
class OwnParts:
    """What a class makes itself.

    Attributes:
        named: texts of special tokens that a checkpoint need not state.
        model: arguments of the BPE beside vocabulary and merges.
        make: sets normalizer, pre-tokenizer and decoder; takes the tokenizer and the keys of the config.
        plain: whether special tokens lose what a checkpoint says of the spaces around them.
    """

    named: Mapping[str, str]
    model: Mapping[str, Any]
    make: Callable[[Tokenizer, Mapping[str, Any]], None]
    plain: bool = False


def _gpt2(backend: Tokenizer, stated: Mapping[str, Any]) -> None:
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=stated.get("add_prefix_space", False))
    backend.decoder = decoders.ByteLevel()


def _qwen(pattern: str) -> Callable[[Tokenizer, Mapping[str, Any]], None]:
    def make(backend: Tokenizer, stated: Mapping[str, Any]) -> None:
        space = bool(stated.get("add_prefix_space"))
        backend.normalizer = normalizers.NFC()
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=space, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()

    return make


def _gemma(backend: Tokenizer, stated: Mapping[str, Any]) -> None:
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(pattern=" ", behavior="merged_with_previous", invert=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )


def _llama(backend: Tokenizer, stated: Mapping[str, Any]) -> None:
    space = stated.get("add_prefix_space")
    space = True if space is None else space
    scheme = "never" if not space else "always" if stated.get("legacy", False) else "first"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    strip = [decoders.Strip(content=" ", left=1)] if space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )


_BYTES = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": False}
_QWEN_NAMED = dict.fromkeys(("unk_token", "eos_token", "pad_token"), END_OF_TEXT)
OWN_PARTS = {
    "GPT2Tokenizer": OwnParts(
        dict.fromkeys(("unk_token", "bos_token", "eos_token"), END_OF_TEXT), _BYTES, _gpt2
    ),
    "Qwen2Tokenizer": OwnParts(_QWEN_NAMED, _BYTES, _qwen(_QWEN), plain=True),
    "Qwen3_5Tokenizer": OwnParts(_QWEN_NAMED, _BYTES, _qwen(_QWEN_MARKS)),
    "GemmaTokenizer": OwnParts(
        {name: f"<{name[:3]}>" for name in ("unk_token", "bos_token", "eos_token", "pad_token")}
        | {"mask_token": "<mask>"},
        {"fuse_unk": True, "byte_fallback": True},
        _gemma,
    ),
    "LlamaTokenizer": OwnParts(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        {"fuse_unk": True, "byte_fallback": True},
        _llama,
    ),
}
"""Classes (without ``Fast``) of language models that make parts themselves."""


def own_parts(declared: str, model_type: str, byte_level: bool) -> OwnParts | None:
    """What the class makes that transformers reads a checkpoint with; None if it keeps the file.

    Args:
        declared: class that the checkpoint names.
        model_type: of its config; empty if it has none.
        byte_level: whether its ``tokenizer.json`` names ByteLevel.

    Raises:
        KeyError: if only transformers knows what the class makes.
    """
    table = _table()
    declared = declared.removesuffix("Fast")
    registered = next((name for name, types in table["registered"].items() if model_type in types), None)
    incorrect = model_type in table["incorrect"]
    # Checkpoints that name this class by mistake.
    if declared == "LlamaTokenizer" and byte_level and not incorrect:
        return None
    # A type whose class keeps the file does so whatever the checkpoint names.
    name = (
        registered if registered is not None and (incorrect or not registered or not declared) else declared
    )
    return None if name in AS_IN_FILE else OWN_PARTS[name]


@cache
def _table() -> Any:
    return json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def with_own_parts(parts: OwnParts, file: Mapping[str, Any], stated: Mapping[str, Any]) -> Tokenizer:
    """A tokenizer of the file's vocabulary, merges and post-processor, and of what the class makes itself."""
    own = dict(parts.model)
    if parts.make is _gemma:
        unknown = stated.get("unk_token", parts.named["unk_token"])
        own["unk_token"] = str(unknown["content"] if isinstance(unknown, Mapping) else unknown)
    merges: list[Any] = [
        tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in file["model"]["merges"]
    ]
    backend = Tokenizer(BPE(vocab=file["model"]["vocab"], merges=merges, **own))
    parts.make(backend, stated)
    backend.post_processor = Tokenizer.from_str(json.dumps(file)).post_processor
    return backend
