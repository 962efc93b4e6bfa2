"""Save a model so that plain transformers loads it, without traces of our parts."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import torch

from ropewalk.errors import RopewalkError
from ropewalk.io.files import parse_json, write_json
from ropewalk.models.checkpoint.weights import INDEX
from ropewalk.models.checkpoint.whole import WholeCheckpoint
from ropewalk.models.config.write import with_both_spellings


def save_model(
    model: Any, folder: Path, tokenizer: Any = None, state_dict: dict[str, torch.Tensor] | None = None
) -> None:
    """Write a folder that plain transformers can load, without traces of our hooks and modules.

    If ``state_dict`` is given, it is saved instead of the model's own.

    The caller renames the folder to its final name; see ``ropewalk.training.checkpoint.single``.
    """
    _save_pretrained(model, folder, state_dict=state_dict)
    whole = whole_of(model)
    if whole is not None:
        whole.copy_files(folder, tokenizer)
    elif tokenizer is not None:
        tokenizer.save_pretrained(folder)


def whole_of(model: Any) -> WholeCheckpoint | None:
    """The checkpoint whose encoders a model is saved with; None for a model without any."""
    found: WholeCheckpoint | None = getattr(model, "_ropewalk_whole", None)
    return found


def take_over_whole(source: Any, model: Any) -> None:
    """Let a model be saved as the checkpoint that another one with the same weights was read from."""
    if whole_of(source) is not None:
        model._ropewalk_whole, model._weight_conversions = whole_of(source), source._weight_conversions


def _save_pretrained(
    model: Any,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, torch.Tensor] | None = None,
    **kwargs: Any,
) -> None:
    """``save_pretrained`` of a model, and a ``config.json`` from which every program gets the same model."""
    if kwargs.get("push_to_hub"):
        raise RopewalkError(
            "save_pretrained(push_to_hub=True) uploads before config.json is complete; call push_to_hub() instead"
        )
    whole, folder = whole_of(model), Path(save_directory)
    if whole is not None and is_main_process:
        weights = whole.state(model, model.state_dict() if state_dict is None else state_dict)
        count = sum(each.numel() for each in weights.values())
        type(model).save_pretrained(
            model, save_directory, state_dict=weights, **{**kwargs, "save_original_format": False}
        )
        _complete_index(folder, count)
        save_config(model, folder)
        return
    type(model).save_pretrained(
        model, save_directory, is_main_process=is_main_process, state_dict=state_dict, **kwargs
    )
    # Other ranks write weights alone.
    if is_main_process:
        other = _whole_config(model)
        # transformers wrote the decoder's own config, from which it does not load such a model.
        if other is not None:
            other.save_pretrained(save_directory)
        _complete_config(folder, holds_own_head(model))


def _complete_index(folder: Path, count: int) -> None:
    """Count all parameters in the index of several files: transformers counts those in memory."""
    path = folder / INDEX
    if path.is_file():
        stated = parse_json(path.read_bytes())
        stated["metadata"]["total_parameters"] = count
        write_json(path, stated)


class SavePretrained:
    """``save_pretrained`` of one model that has our parts; a copy of the model gets its own."""

    def __init__(self, model: Any) -> None:
        # A weak reference: a cycle would keep the model in memory until the garbage collector runs.
        self.owner = weakref.ref(model)

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        _save_pretrained(self.owner(), save_directory, *args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return SavePretrained, (self.owner(),)


def save_config(model: Any, folder: Path) -> None:
    """Write the config.json from which plain transformers builds the model."""
    whole = whole_of(model)
    if whole is not None:
        write_json(folder / "config.json", whole.config(model))
        return
    (_whole_config(model) or model.config).to_json_file(folder / "config.json")
    _complete_config(folder)


def _complete_config(folder: Path, own_head: bool = False) -> None:
    """Write what transformers left out of a config.json: older keys of RoPE, and that a head is not the embedding."""
    path = folder / "config.json"
    stated = parse_json(path.read_text(encoding="utf-8"))
    if own_head:
        # Programs that read the flag alone would drop the head that is in the files.
        stated["tie_word_embeddings"] = False
        if "tie_word_embeddings" in (stated.get("text_config") or {}):
            stated["text_config"]["tie_word_embeddings"] = False
    write_json(path, with_both_spellings(stated))


def _whole_config(model: Any) -> Any | None:
    """The config from which transformers loads a causal decoder that it does not load from the decoder's own config.

    Such are the language models of Llama 3.2 with images and of Emu 3. None for all others.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = type(model).__name__
    if (
        not type(model).__module__.startswith("transformers.")
        or type(model.config) in MODEL_FOR_CAUSAL_LM_MAPPING
    ):
        return None
    families = [family for family, loaded in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if loaded == name]
    if len(families) != 1:
        return None
    whole = CONFIG_MAPPING[families[0]](text_config=model.config.to_dict())
    whole.architectures, whole.dtype = [name], model.config.dtype
    return whole


def holds_own_head(model: Any) -> bool:
    """Whether a model's config says that its output head is its embedding, but the two are different parameters."""
    if not getattr(model.config, "tie_word_embeddings", False):
        return False
    head = getattr(model.get_output_embeddings(), "weight", None)
    return head is not None and head is not model.get_input_embeddings().weight
