"""Save a text decoder as the whole checkpoint that it was read from, with its encoders and processor.

Only the decoder is in memory. Its weights get the names that they have in the source's files, all other tensors are
copied from there, and of ``config.json`` only what has changed in the decoder's part is written.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ropewalk.errors import RopewalkError, first_line
from ropewalk.io.files import parse_json, write_json, writing
from ropewalk.models.checkpoint.origin import cached_folder
from ropewalk.models.checkpoint.weights import weight_files, weight_tensors
from ropewalk.models.config.file import build, read_config_file
from ropewalk.models.config.model import ModelConfig, decoder_key
from ropewalk.models.config.write import with_both_spellings
from ropewalk.rope import ROPE_KEYS

FILES = (
    *("*processor_config.json", "chat_template*", "additional_chat_templates/*", "generation_config.json"),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tekken.json", "*.model", "*.tiktoken", "*.py"),
)
"""Names of the files of processors and tokenizers, which are copied."""
UNCHANGED = ("_name_or_path", "architectures", "dtype", "transformers_version")
"""Values in which the config of a model in memory may differ from the file, without a change of the model."""
TIED = "tie_word_embeddings"
LIMIT = "model_max_length"
"""Key of ``tokenizer_config.json``: tokens beyond which a text is cut."""


@dataclass(frozen=True, eq=False)
class WholeCheckpoint:
    """The checkpoint that a text decoder in memory was read from.

    Attributes:
        source: folder or Hub id.
    """

    source: str

    @classmethod
    def of(cls, path_or_id: str | os.PathLike[str]) -> WholeCheckpoint:
        """A checkpoint whose weights are on this machine; of a Hub id, the files of the processor are downloaded.

        Raises:
            RopewalkError: if they cannot be.
        """
        if not Path(path_or_id).is_dir():
            from huggingface_hub import snapshot_download
            from huggingface_hub.errors import HfHubHTTPError

            try:
                snapshot_download(str(path_or_id), allow_patterns=list(FILES))
            except (HfHubHTTPError, OSError) as error:
                raise RopewalkError(
                    f"cannot download the processor of {path_or_id}, which is saved with the model: {first_line(error)}"
                ) from error
        return cls(str(path_or_id))

    def check(self, model: Any) -> None:
        """Raise if the decoder's weights could not be saved under the names that they have in the source.

        Args:
            model: a model that transformers has loaded from it.

        Raises:
            RopewalkError: naming a weight.
        """
        saved = model.state_dict().keys()
        tensors = [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in saved)]
        written = self._decoder_state(model, {name: each.detach().to("meta") for name, each in tensors})
        for name, _, shape in weight_tensors(self.source):
            if name in written and list(written[name].shape) != shape:
                raise self._unlike(name)

    def state(self, model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All tensors of the checkpoint by their names in its files, those beside the decoder unchanged.

        Args:
            model: the model in memory.
            weights: the decoder's weights, whole, by their names in the model; tied ones may have one name.
        """
        found = self._decoder_state(model, weights)
        return {**found, **dict(self._others(found.keys()))}

    def _decoder_state(self, model: Any, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        first = _first_names(model)
        keys = {*first, *model.state_dict()}
        stated: dict[tuple[str, str], str] = {}
        for name, *_ in weight_tensors(self.source):
            place = _as_read(model, keys, name)
            if place[0] in keys and place in stated:
                raise self._unlike(name)
            stated[place] = name
        single = {first.get(name, name): tensor for name, tensor in weights.items()}
        found: dict[str, torch.Tensor] = {}
        for name, tensor in revert_weight_conversion(model, single).items():
            place = _as_read(model, keys, name)
            if place not in stated:
                raise self._unlike(name)
            found[stated[place]] = tensor
        # A tied weight may be in the files twice.
        of_decoder = {name: key for (key, _), name in stated.items() if key in keys and name not in found}
        for name, key in of_decoder.items():
            if key not in first or first[key] == key:
                raise self._unlike(name)
            found[name] = single[first[key]].clone()
        return found

    def _others(self, names: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the source's files except those with these names."""
        for file in weight_files(self.source):
            if file.suffix == ".json":
                continue
            try:
                with safe_open(file, framework="pt") as weights:
                    for name in weights.keys():  # noqa: SIM118 (it has keys() but cannot be iterated)
                        if name not in names:
                            yield name, weights.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise RopewalkError(
                    f"cannot read the encoders in {self.source}: {file.name}: {first_line(error)}"
                ) from error

    def _unlike(self, name: str) -> RopewalkError:
        return RopewalkError(
            f"the checkpoint in {self.source} cannot be saved again with its encoders: transformers would write the "
            f"decoder's weight {name}, which its files have under another name or in another shape; save it once with "
            "save_pretrained of the installed transformers"
        )

    def config(self, model: Any) -> dict[str, Any]:
        """The source's ``config.json`` with what has changed in the decoder's part.

        Raises:
            RopewalkError: if transformers would not read the model's RoPE from it.
        """
        from transformers import AutoConfig

        stated, source = read_config_file(self.source), AutoConfig.from_pretrained(self.source)
        before, after = (each.get_text_config().to_dict() for each in (source, model.config))
        changed = {key for key in {*before, *after} - {*UNCHANGED} if before.get(key) != after.get(key)}
        if changed & {*ROPE_KEYS}:
            # Another spelling of the old one must not stay beside the new.
            changed |= {*ROPE_KEYS}
        key = decoder_key(source) or ""
        # In published configs of Qwen2.5-VL the decoder's values stand at the top level.
        nested = isinstance(stated.get(key), Mapping)
        part: Mapping[str, Any] = stated[key] if nested else stated
        decoder = {name: value for name, value in part.items() if name not in changed}
        decoder |= {name: after[name] for name in changed if name in after}
        written = {**stated, key: decoder} if nested else decoder
        if changed & {*ROPE_KEYS}:
            written = with_both_spellings(written)
        if getattr(source, TIED, False) and not _is_tied(model):
            # The output head in the files is not the embedding, whatever the config says.
            written[TIED] = False
        read = ModelConfig.of(build(self.source, type(source), written))
        if read.methods != ModelConfig.of(model.config).methods:
            raise RopewalkError(
                f"transformers would not read the model's RoPE from the config.json of {self.source} with this change; "
                "save the checkpoint once with save_pretrained of the installed transformers"
            )
        return written

    def copy_files(self, folder: Path, tokenizer: Any) -> None:
        """Copy the files of processor and tokenizer.

        Args:
            folder: folder of a saved model.
            tokenizer: tokenizer whose length limit the copy gets; None to leave it.
        """
        source = cached_folder(self.source)
        if source is None:
            raise RopewalkError(
                f"cannot read the processor of {self.source}: it is no longer on this machine"
            )
        for path in sorted({path for pattern in FILES for path in source.glob(pattern) if path.is_file()}):
            place = folder / path.relative_to(source)
            with writing(place):
                place.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, place)
        if tokenizer is None:
            return
        path = folder / "tokenizer_config.json"
        if not path.is_file():
            tokenizer.save_pretrained(folder)
            return
        stated = parse_json(path.read_bytes())
        if stated.get(LIMIT, tokenizer.model_max_length) < tokenizer.model_max_length:
            write_json(path, {**stated, LIMIT: tokenizer.model_max_length})


def _as_read(model: Any, keys: set[str], name: str) -> tuple[str, str]:
    """Where transformers reads a tensor of a file: the name in the model, and the tensor's own in its present spelling.

    Several tensors of a file may be parts of one in the model.

    Args:
        model: a model that transformers has loaded, which keeps how it renamed and reshaped the weights.
        keys: names in the model.
        name: name in the file.
    """
    for each in model._weight_conversions:
        if not hasattr(each, "operations"):
            name, _ = each.rename_source_key(name)
    key, pattern = name, None
    for each in model._weight_conversions:
        if hasattr(each, "operations") and pattern is None:
            key, pattern = each.rename_source_key(name)
    prefix = f"{model.base_model_prefix}."
    if key.startswith(prefix) and key.removeprefix(prefix) in keys:
        return key.removeprefix(prefix), name.removeprefix(prefix)
    return (prefix + key, prefix + name) if prefix + key in keys else (key, name)


def _first_names(model: Any) -> dict[str, str]:
    """The names of all parameters of a model, with the first of those that are tied to each."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first.setdefault(id(parameter), name) for name, parameter in named}


def _is_tied(model: Any) -> bool:
    head = getattr(model.get_output_embeddings(), "weight", None)
    return head is None or head is model.get_input_embeddings().weight
