"""A tokenizer with what evaluation uses of one of transformers, made of a checkpoint's files without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import AddedToken, Tokenizer
from tokenizers.processors import TemplateProcessing

from ropewalk.data.tokens.tokenizer_classes import own_parts, with_own_parts
from ropewalk.errors import RopewalkError
from ropewalk.io.files import json_fault, not_found, parse_json

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that every tokenizer may have; a key that ends with ``_token`` names one of a model."""

FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "config.json",
    ),
    *("chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""What is read of a checkpoint; only the first must be there."""


class LightTokenizer:
    """A tokenizer, with the names and the token ids of one of transformers.

    Args:
        backend: encodes and decodes; truncation and padding are switched off.
        special_tokens: texts of special tokens by their names, such as ``bos_token``; all are in the vocabulary.
        chat_template: the Jinja template, or several by name; None for none.
        name_or_path: for messages.
    """

    def __init__(
        self,
        backend: Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | dict[str, str] | None = None,
        name_or_path: str = "",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend_tokenizer = backend
        self.special_tokens_map = dict(special_tokens)
        self.chat_template = chat_template
        self.name_or_path = name_or_path
        self.bos_token = self.special_tokens_map.get("bos_token")
        self.eos_token = self.special_tokens_map.get("eos_token")
        self.unk_token = self.special_tokens_map.get("unk_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token before a document; None if there is none."""
        return self._id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token after a document; None if there is none."""
        return self._id(self.eos_token)

    @property
    def unk_token_id(self) -> int | None:
        """Id of the token for text that the vocabulary lacks; None if there is none."""
        return self._id(self.unk_token)

    def _id(self, token: str | None) -> int | None:
        found: int | None = None if token is None else self.backend_tokenizer.token_to_id(token)
        return found

    def __len__(self) -> int:
        """Number of tokens, with added ones."""
        return int(self.backend_tokenizer.get_vocab_size(with_added_tokens=True))

    def get_vocab(self) -> dict[str, int]:
        """Ids by token, with added ones."""
        return dict(self.backend_tokenizer.get_vocab(with_added_tokens=True))

    def get_added_vocab(self) -> dict[str, int]:
        """Ids of the added tokens."""
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Added tokens by id."""
        return dict(self.backend_tokenizer.get_added_tokens_decoder())

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        truncation: Literal[False] = False,
        padding: Literal[False] = False,
        verbose: Literal[False] = False,
    ) -> dict[str, Any]:
        """Encode a text, or several.

        Args:
            text: text in which the spelling of a special token becomes that token.
            add_special_tokens: whether to add the tokens of the post-processor, such as BOS.
            truncation, padding, verbose: as for transformers; never done here.

        Returns:
            ``input_ids``: ids of the text, or a list of them for each of several.
        """
        assert (truncation, padding, verbose) == (False, False, False)
        if isinstance(text, str):
            encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return {"input_ids": list(encoding.ids)}
        several = self.backend_tokenizer.encode_batch(list(text), add_special_tokens=add_special_tokens)
        return {"input_ids": [list(each.ids) for each in several]}

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: Literal[False] = False,
    ) -> str:
        """Text of token ids; spaces are never cleaned up."""
        return str(self.backend_tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def get_chat_template(self) -> str:
        """The chat template, or the one with the name default of several.

        Raises:
            ValueError: if there are several without this name.
        """
        if isinstance(self.chat_template, dict):
            if "default" not in self.chat_template:
                raise ValueError(f"no template is named default; there are {sorted(self.chat_template)}")
            return self.chat_template["default"]
        assert self.chat_template is not None
        return self.chat_template


def light_tokenizer(path_or_name: str) -> LightTokenizer:
    """Read a tokenizer from a folder or the Hub, with the token ids that transformers gives.

    Args:
        path_or_name: folder with ``tokenizer.json``, or Hub id.

    Raises:
        RopewalkError: if there is no ``tokenizer.json``, a file cannot be read, or only transformers builds a
            tokenizer of this class.
    """
    folder = _folder(path_or_name)
    if not (folder / "tokenizer.json").is_file():
        raise RopewalkError(
            f"there is no tokenizer.json in {path_or_name}, and without transformers ropewalk reads no other file of a "
            "tokenizer; run pip install ropewalk"
        )
    stated = _object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in stated:
        stated |= _object(folder / "special_tokens_map.json")
    config = _object(folder / "config.json")
    declared = str(stated.get("tokenizer_class") or config.get("tokenizer_class") or "")
    file = _object(folder / "tokenizer.json")
    # As transformers asks, in any place of the file.
    byte_level = b'"ByteLevel"' in (folder / "tokenizer.json").read_bytes()
    try:
        parts = own_parts(declared, str(config.get("model_type", "")), byte_level)
    except KeyError as error:
        raise RopewalkError(
            f"{path_or_name} has a {error.args[0]}, which only transformers builds; run pip install ropewalk, or give "
            "the tokenizer saved as a TokenizersBackend"
        ) from None
    try:
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        own = backend.get_added_tokens_decoder()
        if parts is not None:
            backend, stated = with_own_parts(parts, file, stated), {**parts.named, **stated}
        named = _add_tokens(backend, stated, _object(folder / "added_tokens.json"), own)
        if parts is not None and parts.plain:
            backend.add_tokens([AddedToken(token, special=True) for token in named.values()])
    except RopewalkError:
        raise
    # The tokenizers library raises plain Exception for what it cannot read.
    except Exception as error:
        raise RopewalkError(f"cannot load a tokenizer from {path_or_name!r}: {error}") from error
    return LightTokenizer(backend, named, _chat_template(folder, stated), path_or_name)


def _folder(path_or_name: str) -> Path:
    """The folder with the files of a checkpoint; those of a Hub id are downloaded, or found in the cache."""
    if Path(path_or_name).is_dir():
        return Path(path_or_name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path_or_name, allow_patterns=list(FILES)))
    # Errors of the Hub are OSError or ValueError; those of its HTTP client neither.
    except Exception as error:
        raise not_found(path_or_name, "tokenizer", error) from error


def _object(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    if not file.is_file():
        return {}
    try:
        found = parse_json(file.read_bytes())
    except (OSError, json.JSONDecodeError) as error:
        raise RopewalkError(
            f"cannot load a tokenizer from {str(file.parent)!r}: {json_fault(error)}"
        ) from error
    if not isinstance(found, dict):
        raise RopewalkError(
            f"cannot load a tokenizer from {str(file.parent)!r}: {file.name} must contain a JSON object, got "
            f"{type(found).__name__}"
        )
    return found


def _add_tokens(
    backend: Tokenizer,
    stated: Mapping[str, Any],
    added: Mapping[str, int],
    of_file: Mapping[int, AddedToken],
) -> dict[str, str]:
    """Add the tokens of all files that are not in the backend, in transformers' order; return the named ones."""
    if backend.padding:
        stated = {"pad_token": backend.padding["pad_token"], **stated}
    own_names = [
        key for key in stated if key.endswith("_token") and isinstance(stated[key], str) and key not in NAMED
    ]
    named = {key: stated[key] for key in (*NAMED, *own_names) if stated.get(key) is not None}
    more = stated.get("extra_special_tokens") or stated.get("additional_special_tokens") or ()
    if isinstance(more, Mapping):
        named, more = {**named, **more}, ()
    named = {name: _added(value) for name, value in named.items()}
    special = [*named.values(), *map(_added, more)]
    own = backend.get_added_tokens_decoder()
    if "added_tokens_decoder" in stated:
        known = {int(number): _added(each) for number, each in stated["added_tokens_decoder"].items()}
    else:
        texts = {each.content for each in special}
        known = {number: AddedToken(each, special=each in texts) for each, number in added.items()} | dict(
            of_file
        )
    in_file = {repr(token) for token in own.values()}
    new = [token for _, token in sorted(known.items()) if repr(token) not in in_file]
    seen = {token.content for token in (*own.values(), *new)}
    for token in special:
        if token.content not in seen:
            new.append(token)
            seen.add(token.content)
    names = {token.content for token in named.values()}
    for token in new:
        token.special = token.special or token.content in names
    backend.add_tokens(new)
    backend.encode_special_tokens = bool(stated.get("split_special_tokens", False))
    if backend.post_processor is None:
        # Adds nothing, but transformers writes it, and the digest of a tokenizer covers it.
        backend.post_processor = TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    return {name: token.content for name, token in named.items()}


def _added(token: str | Mapping[str, Any]) -> AddedToken:
    """A token as the files state it: its text, or an object of its fields."""
    if isinstance(token, str):
        return AddedToken(token, special=True)
    fields = ("single_word", "lstrip", "rstrip", "normalized", "special")  # codespell:ignore normalized
    return AddedToken(token["content"], **{name: token[name] for name in fields if name in token})


def _chat_template(folder: Path, stated: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The template in a file of its own, or else in the config, where several are a list."""
    found: dict[str, str] = {}
    if (file := folder / "chat_template.jinja").is_file():
        found["default"] = file.read_text(encoding="utf-8")
    for file in folder.glob("additional_chat_templates/*.jinja"):
        found[file.stem] = file.read_text(encoding="utf-8")
    if found:
        return found["default"] if found.keys() == {"default"} else found
    template = stated.get("chat_template")
    if isinstance(template, list):
        return {each["name"]: each["template"] for each in template}
    return template
