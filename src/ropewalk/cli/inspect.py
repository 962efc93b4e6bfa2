"""``ropewalk inspect``: which RoPE a checkpoint has, how far it reaches, and what a target length would need."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ropewalk.cli.advice import default_notes, summary
from ropewalk.cli.binding import make_command
from ropewalk.cli.options import JsonFlag, PlotFile
from ropewalk.cli.output import print_json, results, searching
from ropewalk.io.settings import Length, Option

if TYPE_CHECKING:
    from ropewalk.planning.inspection import InspectResult


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
    """Show a checkpoint's RoPE and how far it reaches; with --target, what that length needs.

    Reads no weights.
    """
    from ropewalk.planning.inspection import inspect as inspected

    about = f"bases for {target or 0:,} tokens"
    with searching(about, None) as progress:
        found = inspected(model, target, from_length=from_length, explain=explain, progress=progress)
    if plot is not None:
        # Before anything is printed: a model without layers to draw is refused.
        _ = found.config.full_attention_rope
    description = found.to_json()
    advice = found.advice
    if as_json:
        print_json(description)
    elif advice is None:
        _print(description)
    else:
        from ropewalk.cli.advice import print_advice, print_details

        print_advice(advice, [*_defaults_in_short(description), *description["notes"]])
        if explain:
            results().print()
            _print_table(description)
            print_details(advice)
    if plot is not None:
        _draw(found, plot)
    if plot is not None and not as_json:
        results().print(f"picture {plot}", markup=False, soft_wrap=True)


app = make_command(
    inspect, "inspect", "ropewalk inspect meta-llama/Llama-3.1-8B --target 1M --plot periods.png"
)


def _draw(found: InspectResult, plot: Path) -> None:
    """The pairs' periods as they are, and as recommended."""
    import numpy as np

    from ropewalk.reporting import draw
    from ropewalk.reporting.figures.rope import periods_figure

    config, advice = found.config, found.advice
    trained = config.trained_length
    target = trained if advice is None else advice.target_length
    series = {"as trained": 2 * np.pi / config.full_attention_rope.frequencies(trained).inv_freq.numpy()}
    if advice is not None and advice.chosen is not None and advice.chosen.method is not None:
        recommended = advice.chosen.method.frequencies(target).inv_freq.numpy()
        series[f"recommended for the target ({advice.chosen.rule})"] = 2 * np.pi / recommended
    draw(periods_figure(series, trained, target, f"{config.model}: period of each rotary pair"), plot)


def _print(description: Mapping[str, Any]) -> None:
    _print_table(description)
    for line in (*default_notes(description["defaults"], description["config_class"]), *description["notes"]):
        results().print(f"note: {line}", markup=False, soft_wrap=True)


def _defaults_in_short(description: Mapping[str, Any]) -> list[str]:
    """What the config leaves to its class, in one sentence."""
    defaults = description["defaults"]
    if not defaults:
        return []
    values = ", ".join(f"{key} ({summary(value)})" for key, value in defaults.items())
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
    parameters = [(key, summary(value)) for key, value in method["parameters"].items() if value is not None]
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
