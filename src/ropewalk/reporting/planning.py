"""Show a checkpoint's RoPE, advice and plans: first what to do, then why, last the source of each number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ropewalk.planning.advice import Advice
from ropewalk.planning.extension_choices import FINDING, SOURCE, STUDIED
from ropewalk.planning.inspection import EXTENDED, InspectResult
from ropewalk.planning.rules import CONTEXT_BOUND, SYMBOLS, WIDE
from ropewalk.planning.run import PlanResult
from ropewalk.planning.settings import InspectSettings, PlanSettings
from ropewalk.planning.stages import recipe_stages
from ropewalk.reporting.compatibility import readers_parts
from ropewalk.reporting.figures.drawing import Figure
from ropewalk.reporting.figures.rope import periods_figure
from ropewalk.reporting.rope import turning_periods
from ropewalk.reporting.tables import Part
from ropewalk.rope import Cope, RopeMethod
from ropewalk.rope.methods.longrope import NO_ROTATION

BOUND = (
    "the largest L with B(m) = Σ cos(m·θ_i) ≥ 0 for all integers 0 ≤ m ≤ L",
    "Men et al., arXiv:2405.14591, section 4",
    "covers rotated dimensions only; ignores attention factors and what a model learns",
)
"""Formula, source and caveat of the context bound."""


def describe_inspection(result: InspectResult, config: InspectSettings) -> Iterator[Part]:
    """The checkpoint's RoPE without a target length; otherwise advice, and with ``explain`` both and all sources."""
    description, advice = result.to_json(), result.advice
    said = "stated" if result.config.documented_length is None else "documented"
    if config.readers:
        now = "" if advice is None else " as it is now"
        yield from readers_parts(result.readers or (), f"RoPE of {config.model}{now} in other programs")
        yield ""
        if result.readers_at_target is not None and advice is not None:
            setting = f"the setting recommended for {advice.target_length:,} tokens"
            yield from readers_parts(
                result.readers_at_target, f"With {setting} ({EXTENDED} is the result of a run)"
            )
            yield ""
        elif advice is not None and advice.stages:
            yield "For the extended model: ropewalk inspect RUN/model --readers, where RUN is the output of the run"
            yield ""
    if advice is None:
        yield _table(description, said)
        if result.tokens:
            yield f"tokens of packed rows: {', '.join(map(str, result.tokens))}"
        defaults = _default_notes(description["defaults"], description["config_class"])
        for line in (CONTEXT_BOUND, *defaults, *description["notes"]):
            yield f"note: {line}"
        return
    # Defaults take one sentence here, and a line each without a target, because advice has to fit on a screen.
    yield from describe_advice(advice, [*_defaults_in_short(description), *description["notes"]])
    if config.explain:
        yield ""
        yield _table(description, said)
        yield from _details(advice)
        yield from _origin("choices that compound in an extension", FINDING, SOURCE, STUDIED)


def inspection_figure(result: InspectResult) -> Figure:
    """Draw the period of each rotary pair as trained and as recommended."""
    config, advice = result.config, result.advice
    trained = config.trained_length
    target = trained if advice is None else advice.target_length
    series = {"as trained": turning_periods(config.full_attention_rope, trained)}
    if advice is not None and advice.chosen is not None and advice.chosen.method is not None:
        name = f"recommended for the target ({advice.chosen.rule})"
        series[name] = turning_periods(advice.chosen.method, target)
    return periods_figure(series, trained, target, f"{config.model}: period of each rotary pair")


def describe_plan(result: PlanResult, config: PlanSettings) -> Iterator[Part]:
    """The stages, the reasons, and the lines for a recipe."""
    advice, trained, checkpoint = result.advice, result.config.trained_length, result.config
    table = Table(title=f"Stages from {trained:,} to {result.target_length:,} tokens", title_justify="left")
    for name in ("context", "method", "rope_theta", "factor"):
        table.add_column(name, justify="right")
    table.add_column("reason")
    for stage in result.stages:
        values = stage.to_json()
        factor = "" if values["factor"] is None else f"{values['factor']:g}"
        table.add_row(
            f"{stage.context:,}",
            stage.recipe_method,
            f"{stage.method.rope_theta:,.10g}",
            factor,
            stage.reason,
        )
    yield table
    if config.explain:
        yield from _bases(advice)
    # A rule that the user has named needs no reasons.
    for line in () if config.rule is not None else advice.reasons:
        yield Text(f"- {line}")
    for line in (*_default_notes(checkpoint.defaults, checkpoint.config_class), *result.notes):
        yield f"note: {line}"
    yield f"note: {CONTEXT_BOUND}"
    yield Text("\nFor a recipe (choose the steps yourself):\n")
    yield from result.recipe.splitlines()


def describe_advice(advice: Advice, notes: Sequence[str]) -> Iterator[Part]:
    """The recommended action with its stages, and at most a screen of reasons.

    Args:
        advice: advice for a target length.
        notes: warnings and remarks on the checkpoint.
    """
    yield Text(f"To reach {advice.target_length:,} tokens", "bold")
    yield Text(advice.action)
    yield from _recipe(advice)
    yield from _list("Why", advice.reasons)
    if advice.lifted is not None:
        yield Text("\nIf the windows are lifted", "bold")
        yield Text(advice.lifted.action)
        yield from _recipe(advice.lifted)
        yield from _list("Why, with the windows lifted", advice.lifted.reasons)
    lifted = () if advice.lifted is None else advice.lifted.reasons
    bounds = any("context bound" in reason.lower() for reason in (*advice.reasons, *lifted))
    meaning = [f"{CONTEXT_BOUND[0].upper()}{CONTEXT_BOUND[1:]}."] if bounds else []
    yield from _list("Note", [*meaning, *notes, *advice.caveats])
    if advice.settings:
        yield Text(
            "\n--explain shows the setting of every rule, the bases that reach the target, and all sources."
        )


def _recipe(advice: Advice) -> Iterator[Part]:
    if advice.stages:
        yield Text("\nFor a recipe (choose the steps yourself):", "bold")
        yield from recipe_stages(advice.stages, advice.lift).splitlines()


def _details(advice: Advice) -> Iterator[Part]:
    """The setting of every rule, the bases that reach the target beside published ones, and all sources."""
    if not advice.settings:
        return
    yield from _bases(advice)
    yield from _settings(advice)
    yield Text("\nSources", "bold")
    for setting in advice.settings:
        if setting.method is not None:
            yield from _origin(setting.rule, setting.formula, setting.source, setting.caveat)
    yield from _origin("context bound", *BOUND)
    yield SYMBOLS


def _bases(advice: Advice) -> Iterator[Part]:
    """The bases from the rules and the similarity margin, beside those of published models."""
    found = advice.recommendation
    table = Table(title=f"\nBases for {advice.target_length:,} tokens", title_justify="left")
    table.add_column("source")
    table.add_column("rope_theta", justify="right", no_wrap=True)
    if found is not None:
        table.add_row("rule critical-dimension", f"{found.law:,.0f}")
        table.add_row(
            "rule length-floor: smallest feasible base with 128 rotary dimensions", f"{found.floor:,.0f}"
        )
    feasible = advice.feasible
    if feasible is not None and feasible.reason is None:
        own = f"with {feasible.rotary_dim} rotary dimensions"
        many = f"first of {feasible.intervals:,} intervals"
        table.add_row(f"smallest feasible base {own} ({many})", _base(feasible.infimum, feasible.ceiling))
        wide = f"start of the first feasible interval at least {100 * WIDE:.0f} % wide"
        table.add_row(wide, _base(feasible.wide_from, feasible.ceiling))
        safe = f"safe base: every larger base up to {feasible.ceiling:g} is feasible"
        table.add_row(safe, _base(feasible.safe_base, feasible.ceiling))
    table.add_section()
    for each in advice.published:
        begin = f"from {each.trained_length:,} tokens with base {each.rope_theta:,.0f}"
        table.add_row(f"{each.model}: {each.target_length:,} tokens, {begin}", f"{each.new_theta:,.0f}")
    yield table
    yield (
        "feasible: similar tokens get at least as much attention as random ones at every distance up to "
        f"{advice.target_length:,} tokens"
    )
    if feasible is not None and feasible.reason is not None:
        yield f"feasible bases: {feasible.reason}"


def _base(value: float | None, ceiling: float) -> str:
    return f"none up to {ceiling:g}" if value is None else f"{value:,.0f}"


def _settings(advice: Advice) -> Iterator[Part]:
    table = Table(title=f"\nSetting of each rule for {advice.target_length:,} tokens", title_justify="left")
    table.add_column("rule", no_wrap=True)
    table.add_column("setting")
    table.add_column("context bound", justify="right")
    table.add_column("covers target")
    recommended = None if advice.chosen is None else advice.chosen.rule
    for setting in advice.settings:
        if setting.method is not None:
            mark = " ←" if setting.rule == recommended else ""
            reaches = "yes" if setting.reaches_target else "no"
            table.add_row(f"{setting.rule}{mark}", _setting_text(setting.method), setting.reach, reaches)
    yield table
    # Several rules are usually refused for the same reason, which is then said once.
    refused: dict[str | None, list[str]] = {}
    for setting in advice.settings:
        if setting.method is None:
            refused.setdefault(setting.reason, []).append(setting.rule)
    for reason, rules in refused.items():
        yield f"does not apply: {', '.join(rules)}: {reason}"


def _list(title: str, sentences: Sequence[str]) -> Iterator[Part]:
    if sentences:
        yield Text(f"\n{title}", "bold")
    for sentence in sentences:
        yield Text(f"- {sentence}")


def _origin(name: str, formula: str, source: str, caveat: str) -> Iterator[Part]:
    yield Text(name)
    for label, text in (("formula", formula), ("source", source), ("caveat", caveat)):
        yield f"  {label:8} {text}"


def _setting_text(method: RopeMethod) -> str:
    # Methods that change only the base have no factor.
    factor = getattr(method, "factor", None)
    if factor is not None:
        return f"{method.name}, factor {factor:g}, base {method.rope_theta:,.10g}"
    if isinstance(method, Cope):
        return f"{method.name}, {method.clipped} pairs clipped, base {method.rope_theta:,.10g}"
    return f"rope_theta {method.rope_theta:,.10g}"


def _default_notes(defaults: Mapping[str, Any], config_class: str | None) -> list[str]:
    """One sentence for each value that the config omits, so that no default is silent."""
    return [
        f"config.json omits {key}; transformers uses {config_class}'s default, {_summary(value)}"
        for key, value in defaults.items()
    ]


def _summary(value: object) -> str:
    """Format a config value in a few characters."""
    # A LongRoPE list has one number per pair, too many for a cell.
    if isinstance(value, tuple):
        turning = [factor for factor in value if factor < NO_ROTATION]
        return f"{len(value)} factors" + (f", {min(turning):g} to {max(turning):g}" if turning else "")
    return f"{value:g}" if isinstance(value, float) else str(value)


def _defaults_in_short(description: Mapping[str, Any]) -> list[str]:
    """All values that the config omits, in one sentence."""
    defaults = description["defaults"]
    if not defaults:
        return []
    values = ", ".join(f"{key} ({_summary(value)})" for key, value in defaults.items())
    return [
        f"config.json omits values for which transformers uses {description['config_class']}'s defaults: {values}"
    ]


def _table(description: Mapping[str, Any], said: str) -> Table:
    table = Table(title=description["model"], show_header=False, title_justify="left")
    for label, value in _rows(description, said):
        table.add_row(label, value)
    for method in description["methods"]:
        table.add_section()
        for label, value in _method_rows(method, description["head_dim"]):
            table.add_row(label, value)
    return table


def _rows(description: Mapping[str, Any], said: str) -> list[tuple[str, str]]:
    heads, kv_heads = description["num_attention_heads"], description["num_key_value_heads"]
    return [
        ("model type", _text(description["model_type"])),
        ("maximum length", _tokens(description["max_position_embeddings"])),
        ("trained length", f"{_tokens(description['trained_length'])} ({said}, not measured)"),
        ("layers", _text(description["num_hidden_layers"])),
        (
            "heads",
            f"{_text(heads)} query, {_text(kv_heads)} key/value, {description['head_dim']} dimensions each",
        ),
        ("sliding window", _tokens(description["sliding_window"])),
    ]


def _method_rows(method: Mapping[str, Any], head_dim: int) -> list[tuple[str, str]]:
    layers = [] if method["layer_type"] is None else [("layers of type", method["layer_type"])]
    parameters = [(key, _summary(value)) for key, value in method["parameters"].items() if value is not None]
    name = method["name"]
    if name == Cope.name:
        name += f": the {method['parameters']['clipped']} slowest pairs clipped, the slowest of all does not rotate"
    shortest, longest = method["shortest_wavelength"], method["longest_wavelength"]
    if shortest is None:
        return [*layers, ("RoPE method", "none (NoPE): no position turns queries or keys")]
    return [
        *layers,
        ("RoPE method", name),
        ("rope_theta", f"{method['rope_theta']:.10g}"),
        ("rotary_dim", f"{method['rotary_dim']} of {head_dim}{_standing(method['inv_freq'])}"),
        *parameters,
        ("attention_factor", f"{method['attention_factor']:g}"),
        ("wavelengths", f"{shortest:,.1f} to {longest:,.0f} tokens"),
        ("critical dimension", _critical_text(method)),
        ("context bound", f"{method['context_bound']:,} tokens"),
        ("inv_freq as loaded", _loaded_text(method["loaded"])),
    ]


def _standing(inv_freq: Sequence[float]) -> str:
    """How many pairs do not rotate, to follow the number of rotary dimensions; empty if all do."""
    still = sum(not theta for theta in inv_freq)
    if not still:
        return ""
    return f"; {still} of {len(inv_freq)} pairs {'does' if still == 1 else 'do'} not rotate"


def _critical_text(method: Mapping[str, Any]) -> str:
    dimensions, length = method["critical_dimension"], method["critical_dimension_length"]
    # The count follows from base and trained length alone, whatever a method then does to the frequencies.
    scaled = "" if method["name"] == "default" else ", before scaling"
    return (
        "not stated"
        if dimensions is None
        else f"{dimensions} dimensions complete a turn in {length:,} tokens{scaled}"
    )


def _loaded_text(loaded: Mapping[str, Any] | None) -> str:
    if loaded is None:
        return "unknown"
    difference = loaded["largest_relative_difference"]
    if difference is None:
        return f"{loaded['dtype']}, but with a different size than in the config"
    return f"{loaded['dtype']}, within {difference:.1e} of the exact values"


def _text(value: object) -> str:
    return "not stated" if value is None else str(value)


def _tokens(value: int | None) -> str:
    return "none" if value is None else f"{value:,} tokens"
