"""Compare the weights in a checkpoint's files with those that transformers has loaded from them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.weights import weight_tensors

_FLOATS = ("BF16", "F16", "F32", "F64", "C64")
_COUNTS = ("BOOL", "I64")
"""Dtypes of masks, positions and tables, which quantized weights never have."""
_OF_MTP = {"eh_proj", "enorm", "hnorm"}
"""Parts of a layer that predicts a later token (MTP) and follows the decoder's layers under the next number."""
_NAMES_SHOWN = 4


def refuse_other_weights(
    path_or_id: str | os.PathLike[str],
    config: Any,
    model: Any,
    loading: Mapping[str, Any],
    alone: bool = False,
    layers: int | None = None,
    added: tuple[str, ...] = (),
) -> None:
    """Raise unless a checkpoint and the model loaded from it have the same weights.

    transformers initialises missing weights at random, drops weights that the model lacks, and casts quantized numbers
    without their scales, with a warning at most. Weights that are left out on purpose may differ: what the class
    declares, frequencies of RoPE, layers for several tokens at once (MTP), and encoders that ``alone`` leaves out.

    Args:
        path_or_id: folder or Hub id of the checkpoint.
        config: its transformers config, as it was read.
        model: the transformers model.
        loading: what transformers returned with it for ``output_loading_info``.
        alone: whether the model is the language model alone of a checkpoint that has encoders too.
        layers: number of the checkpoint's first layers that the model has; None for all.
        added: endings of the names of weights that the model has beyond the checkpoint's.

    Raises:
        RopewalkError: naming the weights.
    """
    quantized = _reads_quantized(config)
    if not quantized:
        _refuse_quantized(path_or_id, model)
    for kind, what in (("missing_keys", "lacks"), ("mismatched_keys", "has the wrong shape for")):
        # A mismatched key is listed with its two shapes.
        keys = sorted(key[0] if isinstance(key, tuple) else str(key) for key in loading.get(kind) or ())
        keys = [key for key in keys if kind != "missing_keys" or not key.endswith(added)]
        if keys:
            others = len(keys) - 1
            more = f" and {others} other {'weight' if others == 1 else 'weights'}" if others else ""
            raise RopewalkError(
                f"the checkpoint in {path_or_id} {what} the weight {keys[0]}{more}; either "
                "restore the checkpoint, or correct its config.json"
            )
    unused = [
        name
        for name in _unused(model, loading.get("unexpected_keys") or (), alone, layers)
        # Others are scales and zero points that a way of quantizing does not need.
        if not quantized or name.endswith((".weight", ".bias"))
    ]
    if unused:
        raise RopewalkError(
            f"the checkpoint in {path_or_id} has {_named(unused)}, which the model that its config.json describes "
            "does not use, so its results would be those of another model; correct config.json, or remove what does "
            "not belong to the model from the files"
        )


def _unused(model: Any, unexpected: Iterable[str], alone: bool, layers: int | None) -> list[str]:
    """The weights that transformers dropped, without those that were left out on purpose, sorted."""
    unexpected = sorted(unexpected)
    of_mtp = {_layer(name) for name in unexpected if _OF_MTP & set(name.split("."))} - {None}

    def left_out(name: str) -> bool:
        parts, layer = name.split("."), _layer(name)
        return (
            parts[-1].endswith("inv_freq")
            or any(part.startswith("mtp") for part in parts)
            or layer in of_mtp
            or (layers is not None and layer is not None and layer >= layers)
            or (alone and _beside_decoder(model, parts))
        )

    return [name for name in unexpected if not left_out(name)]


def _layer(name: str) -> int | None:
    """Number of the decoder layer that a weight belongs to, which is the first number in its name."""
    found = re.search(r"\.(\d+)\.", name)
    return None if found is None else int(found[1])


def _beside_decoder(model: Any, parts: list[str]) -> bool:
    """Whether a weight lies in a module beside the decoder's own, of which the loaded model has none."""
    owner = model
    for number, part in enumerate(parts):
        if not hasattr(owner, part):
            return owner is model or parts[:number] == [model.base_model_prefix]
        owner = getattr(owner, part)
    return False


def _refuse_quantized(path_or_id: str | os.PathLike[str], model: Any) -> None:
    """Raise for weights in the dtypes of quantized ones, which transformers would cast to numbers."""
    floats = {name for name, each in model.state_dict().items() if each.is_floating_point()}
    tables = {name.rpartition(".")[2] for name, each in model.named_buffers() if name not in floats}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    dtypes: dict[str, str] = {}
    for name, dtype, _ in weight_tensors(path_or_id):
        is_weight = dtype not in _COUNTS or name in floats or name.endswith("weight")
        if (
            dtype not in _FLOATS
            and is_weight
            and name.rpartition(".")[2] not in tables
            and not any(pattern.search(name) for pattern in ignored)
        ):
            dtypes[name] = dtype
    if dtypes:
        raise RopewalkError(
            f"the checkpoint in {path_or_id} has {_named(sorted(dtypes))} as {', '.join(sorted(set(dtypes.values())))} "
            "numbers, but its config.json has no quantization_config that transformers knows, without which they are "
            "read without their scales; restore quantization_config, or give the checkpoint in 16 or 32 bits"
        )


def _reads_quantized(config: Any) -> bool:
    """Whether transformers reads a model's weights as quantized ones."""
    from transformers.quantizers.auto import AutoHfQuantizer

    stated = [getattr(each, "quantization_config", None) for each in (config, config.get_text_config())]
    found = next((each for each in stated if each is not None), None)
    return found is not None and AutoHfQuantizer.supports_quant_method(found)


def _named(names: list[str]) -> str:
    shown, others = names[:_NAMES_SHOWN], len(names) - _NAMES_SHOWN
    what = "the weight" if len(names) == 1 else "the weights"
    return f"{what} {', '.join(shown)}" + (f" and {others} more" if others > 0 else "")
