"""``ropewalk inspect``: which RoPE a checkpoint has, how far it reaches, and what a target length would need."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ropewalk.cli.binding import make_command
from ropewalk.cli.options import JsonFlag, PlotFile
from ropewalk.cli.output import print_json, results, searching
from ropewalk.errors import RopewalkError
from ropewalk.io.settings import Length, Option

if TYPE_CHECKING:
    from ropewalk.models.checkpoint_config import CheckpointConfig
    from ropewalk.models.held_rope import LoadedRope
    from ropewalk.planning import Advice
    from ropewalk.planning.checkpoint import Checkpoint
    from ropewalk.rope import RopeMethod


def inspect(
    model: Annotated[str, Field(description="A checkpoint's folder, a config.json, a Hub id, or embedded.")],
    *,
    target: Annotated[
        Length | None, Field(description="Context to extend to: 131072, 128k, 1M; with advice.")
    ] = None,
    from_length: Annotated[
        Length | None,
        Option(name="--from", metavar="LENGTH"),
        Field(description="Trained length, where the config misstates it."),
    ] = None,
    explain: Annotated[
        bool,
        Field(
            description="With --target: also the checkpoint's RoPE, every rule's base beside published ones, and all "
            "sources; takes seconds."
        ),
    ] = False,
    plot: PlotFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Show a checkpoint's RoPE and how far it reaches; with --target, what that length needs. Reads no weights."""
    from ropewalk.models.held_rope import loaded_rope
    from ropewalk.planning.checkpoint import of_checkpoint
    from ropewalk.rope import config_tensions

    config = read_config(model)
    tensions = config_tensions(config.values)
    if config.config_class is None:
        tensions.append(
            f"transformers does not know the model type {config.values.get('model_type')!r}: what the file leaves out "
            "(a partial rotation, a head's width) is taken as Llama's, and ropewalk extend needs trust_remote_code"
        )
    try:
        loaded = loaded_rope(config)
    except RopewalkError as error:
        loaded = None
        tensions.append(f"what transformers holds after a load is not known: {error}")
    description = describe(config, loaded, tensions, from_length)
    checkpoint = advice = None
    if target is not None or plot is not None:
        checkpoint = of_checkpoint(config.values, from_length)
    if target is not None and checkpoint is not None:
        description["notes"] += [note for note in checkpoint.notes if note not in description["notes"]]
        advice = advise_on(config, checkpoint, target, explain=explain)
    if as_json:
        print_json({**description, "target": None if advice is None else advice.to_json()})
    elif advice is None:
        _print(description)
    else:
        from ropewalk.cli.advice import print_advice, print_details

        print_advice(advice, [*_defaults_in_short(description), *description["notes"]])
        if explain:
            results().print()
            _print_table(description)
            print_details(advice)
    if plot is not None and checkpoint is not None:
        _draw(config.model, checkpoint, advice, plot)
    if plot is not None and not as_json:
        results().print(f"picture {plot}", markup=False, soft_wrap=True)


app = make_command(
    inspect, "inspect", "ropewalk inspect meta-llama/Llama-3.1-8B --target 1M --plot periods.png"
)


def read_config(model: str) -> CheckpointConfig:
    """The config of a folder, of a path to the file itself, of a model on the Hub, or of the embedded one.

    Raises:
        RopewalkError: as :func:`ropewalk.models.checkpoint_config.read_checkpoint_config`.
    """
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.models.checkpoint_config import read_checkpoint_config

    path = resolve_model(model)
    return read_checkpoint_config(model, None if str(path) == model else path)


def advise_on(config: CheckpointConfig, checkpoint: Checkpoint, target: int, explain: bool) -> Advice:
    """Advice on a checkpoint, with what ``ropewalk extend`` would refuse of it.

    Args:
        config: as read.
        checkpoint: what planning needs of it.
        target: tokens.
        explain: whether to map the feasible bases, which takes seconds.
    """
    from ropewalk.planning import advise
    from ropewalk.rope.layers import training_refusals

    with searching(f"bases for {target:,} tokens", None) as progress:
        return advise(
            checkpoint.method,
            checkpoint.trained_length,
            target,
            refusals=training_refusals(config.values, target),
            plannable=checkpoint.plannable,
            explain=explain,
            progress=progress,
        )


def describe(
    config: CheckpointConfig,
    loaded: Sequence[LoadedRope] | None,
    tensions: Sequence[str],
    given_length: int | None = None,
) -> dict[str, Any]:
    """What a config says and comes to, as one JSON value.

    Args:
        config: as read.
        loaded: what transformers' rotary module holds; None where transformers does not know the model.
        tensions: what in the config is suspicious.
        given_length: the trained length where the user knows better, tokens.

    Returns:
        Lengths and wavelengths in tokens, ``inv_freq`` in rad/token; null where the config is silent.
        Frequencies are those at ``max_position_embeddings``.
    """
    from ropewalk.rope import head_dim, methods_from_config, trained_length
    from ropewalk.rope.layers import attention_of_layers, layer_notes, shortest_window

    decoder = config.values
    methods = methods_from_config(decoder)
    length = decoder.get("max_position_embeddings")
    heads = decoder.get("num_attention_heads")
    held = {each.layer_type: each for each in loaded or ()}
    return {
        "model": config.model,
        "model_type": decoder.get("model_type"),
        "architectures": decoder.get("architectures"),
        "config_class": config.config_class,
        "defaults": config.defaults,
        "max_position_embeddings": length,
        "trained_length": given_length or (length and trained_length(decoder, methods.get(None))),
        "num_hidden_layers": decoder.get("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": decoder.get("num_key_value_heads") or heads,
        "head_dim": head_dim(decoder),
        "sliding_window": shortest_window(decoder),
        "layers": [asdict(layer) for layer in attention_of_layers(decoder)],
        "notes": [*tensions, *layer_notes(decoder)],
        "methods": [
            _describe_method(layer_type, method, length, held.get(layer_type))
            for layer_type, method in methods.items()
        ],
    }


def _describe_method(
    layer_type: str | None, method: RopeMethod, length: int | None, held: LoadedRope | None
) -> dict[str, Any]:
    from ropewalk.rope.theory import SEARCH_LIMIT, context_bound

    inv_freq, attention_factor = method.frequencies(length)
    apart = ("rotary_dim", "rope_theta", "attention_factor")
    bound = context_bound(inv_freq)
    return {
        "layer_type": layer_type,
        "name": method.name,
        "rope_theta": method.rope_theta,
        "rotary_dim": method.rotary_dim,
        "attention_factor": attention_factor,
        "parameters": {f.name: getattr(method, f.name) for f in fields(method) if f.name not in apart},
        "shortest_wavelength": 2 * math.pi / float(inv_freq[0]),
        "longest_wavelength": 2 * math.pi / float(inv_freq[-1]),
        **_critical_dimension(method, length),
        "context_bound": SEARCH_LIMIT if bound is None else bound,
        "inv_freq": inv_freq.tolist(),
        "loaded": None if held is None else _describe_loaded(method, held),
    }


def _describe_loaded(method: RopeMethod, held: LoadedRope) -> dict[str, Any]:
    """What transformers holds right after a load: short factors, for a method that depends on the length."""
    expected = method.frequencies().inv_freq
    same = held.inv_freq.shape == expected.shape
    return {
        "dtype": held.dtype,
        "inv_freq": held.inv_freq.tolist(),
        "attention_factor": held.attention_factor,
        "largest_relative_difference": float((held.inv_freq / expected - 1).abs().max()) if same else None,
    }


def _critical_dimension(method: RopeMethod, length: int | None) -> dict[str, int | None]:
    """With the length it is for, that of the unscaled model; None where the config does not tell it."""
    from ropewalk.rope.theory import SHORTEST_LENGTH, critical_dimension

    unscaled = method.unscaled_length(length)
    if unscaled is None or unscaled < SHORTEST_LENGTH:
        return {"critical_dimension": None, "critical_dimension_length": None}
    dimensions = critical_dimension(method.rotary_dim, method.rope_theta, unscaled)
    return {"critical_dimension": dimensions, "critical_dimension_length": unscaled}


def _draw(model: str, checkpoint: Checkpoint, advice: Advice | None, plot: Path) -> None:
    """The pairs' periods as they are, and as recommended."""
    import numpy as np

    from ropewalk.reporting.rope_figures import periods_figure

    trained = checkpoint.trained_length
    target = trained if advice is None else advice.target_length
    series = {"as trained": 2 * np.pi / checkpoint.method.frequencies(trained).inv_freq.numpy()}
    if advice is not None and advice.chosen is not None and advice.chosen.method is not None:
        recommended = advice.chosen.method.frequencies(target).inv_freq.numpy()
        series[f"recommended for the target ({advice.chosen.rule})"] = 2 * np.pi / recommended
    periods_figure(series, plot, trained, target, title=f"{model}: period of each rotary pair")


def _print(description: Mapping[str, Any]) -> None:
    _print_table(description)
    for line in (*default_notes(description["defaults"], description["config_class"]), *description["notes"]):
        results().print(f"note: {line}", markup=False, soft_wrap=True)


def _defaults_in_short(description: Mapping[str, Any]) -> list[str]:
    """What the config leaves to its class, in one sentence."""
    defaults = description["defaults"]
    if not defaults:
        return []
    values = ", ".join(f"{key} ({_summary(value)})" for key, value in defaults.items())
    return [f"config.json leaves to {description['config_class']}'s own defaults: {values}"]


def _print_table(description: Mapping[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=description["model"], show_header=False, title_justify="left")
    for label, value in _rows(description):
        table.add_row(label, value)
    for method in description["methods"]:
        table.add_section()
        for label, value in _method_rows(method, description["head_dim"]):
            table.add_row(label, value)
    results().print(table)


def default_notes(defaults: Mapping[str, Any], config_class: str | None) -> list[str]:
    """A sentence for each value that the config leaves to its class: never a silent default."""
    return [
        f"config.json does not say {key}; {config_class}'s own default {_summary(value)} is what transformers uses"
        for key, value in defaults.items()
    ]


def _rows(description: Mapping[str, Any]) -> list[tuple[str, str]]:
    heads, kv_heads = description["num_attention_heads"], description["num_key_value_heads"]
    return [
        ("model type", _text(description["model_type"])),
        ("longest input", _tokens(description["max_position_embeddings"])),
        ("trained length", f"{_tokens(description['trained_length'])}, as stated"),
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
        ("critical dimension", _critical_text(method)),
        ("context bound", f"{method['context_bound']:,} tokens"),
        ("inv_freq as loaded", _loaded_text(method["loaded"])),
    ]


def _critical_text(method: Mapping[str, Any]) -> str:
    dimensions, length = method["critical_dimension"], method["critical_dimension_length"]
    scaled = "" if method["name"] == "default" else ", before scaling"
    return "not stated" if dimensions is None else f"{dimensions} at {length:,} tokens{scaled}"


def _loaded_text(loaded: Mapping[str, Any] | None) -> str:
    if loaded is None:
        return "not known"
    difference = loaded["largest_relative_difference"]
    if difference is None:
        return f"{loaded['dtype']}, of another size than the config says"
    return f"{loaded['dtype']}, within {difference:.1e} of the exact values"


def _text(value: object) -> str:
    return "not stated" if value is None else str(value)


def _tokens(value: int | None) -> str:
    return "none" if value is None else f"{value:,} tokens"


def _summary(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} factors, {min(value):g} to {max(value):g}"
    return f"{value:g}" if isinstance(value, float) else str(value)
