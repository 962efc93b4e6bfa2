"""``ropewalk inspect``: which RoPE a checkpoint has, read from its config alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropewalk.cli.output import JsonOption, print_json, results
from ropewalk.data.embedded import resolve_model
from ropewalk.errors import RopewalkError

if TYPE_CHECKING:
    from ropewalk.rope import RopeMethod

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("inspect", epilog="Example: ropewalk inspect meta-llama/Llama-3.1-8B --json")(inspect)


def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, a config.json, or a Hub id.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Show the RoPE of a checkpoint: method, theta, lengths, wavelengths. Reads the config, no weights."""
    description = describe(model, read_config(model))
    if as_json:
        print_json(description)
    else:
        _print(description)


def read_config(model: str) -> dict[str, Any]:
    """The ``config.json`` of a folder, of a path to the file itself, or of a model on the Hugging Face Hub.

    Raises:
        RopewalkError: if there is no such file or model, or it does not hold a JSON object.
    """
    path = Path(resolve_model(model)).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise RopewalkError(f"{model} has no config.json")
    elif not path.is_file():
        if not HUB_ID.fullmatch(model) or model.endswith(".json"):
            raise RopewalkError(f"there is no folder or file {model}")
        path = _from_hub(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RopewalkError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(config, dict):
        raise RopewalkError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RopewalkError(
            f"there is no folder {model}, and the Hub gave no config.json for it: {reason}"
        ) from error


def describe(model: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """What the config says, as one JSON value.

    Args:
        model: the name to show.
        config: a ``config.json``; a multimodal one is described by its ``text_config``.

    Returns:
        Lengths in tokens, wavelengths in tokens, ``inv_freq`` in rad/token; null where the config is silent.
        Frequencies are those at ``max_position_embeddings``.

    Raises:
        RopewalkError: as :func:`ropewalk.rope.methods_from_config`.
    """
    from ropewalk.rope import head_dim, methods_from_config

    text = config.get("text_config")
    decoder = text if isinstance(text, Mapping) else config
    methods = methods_from_config(decoder)
    length = decoder.get("max_position_embeddings")
    heads = decoder.get("num_attention_heads")
    # Qwen writes a window that its own switch turns off.
    window = decoder.get("sliding_window") if decoder.get("use_sliding_window", True) else None
    return {
        "model": model,
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
        "max_position_embeddings": length,
        "num_hidden_layers": decoder.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": decoder.get("num_key_value_heads") or heads,
        "head_dim": head_dim(decoder),
        "sliding_window": window,
        "methods": [_describe_method(layer_type, method, length) for layer_type, method in methods.items()],
    }


def _describe_method(layer_type: str | None, method: RopeMethod, length: int | None) -> dict[str, Any]:
    inv_freq, attention_factor = method.frequencies(length)
    apart = ("rotary_dim", "rope_theta", "attention_factor")
    return {
        "layer_type": layer_type,
        "name": method.name,
        "rope_theta": method.rope_theta,
        "rotary_dim": method.rotary_dim,
        "attention_factor": attention_factor,
        "parameters": {f.name: getattr(method, f.name) for f in fields(method) if f.name not in apart},
        "shortest_wavelength": 2 * math.pi / float(inv_freq[0]),
        "longest_wavelength": 2 * math.pi / float(inv_freq[-1]),
        "critical_dimension": _critical_dimension(method, length),
        "inv_freq": inv_freq.tolist(),
    }


def _critical_dimension(method: RopeMethod, length: int | None) -> int | None:
    """For the length the unscaled model was trained for; None where the config does not tell it."""
    from ropewalk.rope import Linear, critical_dimension
    from ropewalk.rope.theory import SHORTEST_LENGTH

    trained = getattr(method, "original_max_position_embeddings", length)
    if trained is not None and isinstance(method, Linear):
        trained = int(trained / method.factor)
    if trained is None or trained < SHORTEST_LENGTH:
        return None
    return critical_dimension(method.rotary_dim, method.rope_theta, trained)


def _print(description: Mapping[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(description["model"]), show_header=False, title_justify="left")
    for label, value in _rows(description):
        table.add_row(label, escape(value))
    for method in description["methods"]:
        table.add_section()
        for label, value in _method_rows(method, description["head_dim"]):
            table.add_row(label, escape(value))
    results().print(table)


def _rows(description: Mapping[str, Any]) -> list[tuple[str, str]]:
    heads, kv_heads = description["num_attention_heads"], description["num_key_value_heads"]
    return [
        ("model type", _text(description["model_type"])),
        ("longest input", _tokens(description["max_position_embeddings"])),
        ("layers", _text(description["num_hidden_layers"])),
        ("heads", f"{_text(heads)}, key/value {_text(kv_heads)}, of {description['head_dim']} dimensions"),
        ("sliding window", _tokens(description["sliding_window"])),
    ]


def _method_rows(method: Mapping[str, Any], head_dim: int) -> list[tuple[str, str]]:
    layers = [] if method["layer_type"] is None else [("layers of type", method["layer_type"])]
    parameters = [(key, _summary(value)) for key, value in method["parameters"].items() if value is not None]
    shortest, longest = method["shortest_wavelength"], method["longest_wavelength"]
    return [
        *layers,
        ("RoPE method", method["name"]),
        ("rope_theta", f"{method['rope_theta']:.10g}"),
        ("rotary_dim", f"{method['rotary_dim']} of {head_dim}"),
        *parameters,
        ("attention_factor", f"{method['attention_factor']:g}"),
        ("wavelengths", f"{shortest:,.1f} to {longest:,.0f} tokens"),
        ("critical dimension", _text(method["critical_dimension"])),
    ]


def _text(value: object) -> str:
    return "not stated" if value is None else str(value)


def _tokens(value: int | None) -> str:
    return "none" if value is None else f"{value:,} tokens"


def _summary(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} factors, {min(value):g} to {max(value):g}"
    return f"{value:g}" if isinstance(value, float) else str(value)
