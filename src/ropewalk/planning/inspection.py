"""Inspect a checkpoint's RoPE, its context bound, and what a target length needs. Reads the config, not weights."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ropewalk.compatibility import Reading, readings
from ropewalk.compatibility.table import checkpoint_of, readings_of
from ropewalk.data import PackingSettings, load_tokenizer
from ropewalk.data.read.embedded import resolve_model
from ropewalk.data.tokens.special_ids import Doubt, TokenUse, doubtful_tokens, tokens_of_rows
from ropewalk.data.tokens.tokenise import lacks_tokenizer
from ropewalk.errors import RopewalkError
from ropewalk.io.progress import counted
from ropewalk.io.results import Result
from ropewalk.models.config.file import read_model_config
from ropewalk.models.config.model import LayerConfig, ModelConfig
from ropewalk.models.config.read import read_config
from ropewalk.models.config.write import with_rope, written_config
from ropewalk.models.rope.frequencies import LoadedRope, loaded_rope
from ropewalk.parallel.context import RunContext
from ropewalk.planning.advice import Advice, Checkpoint, advise, explained
from ropewalk.planning.extension_choices import ExtensionChoices, extension_choices
from ropewalk.planning.settings import InspectSettings
from ropewalk.planning.stages import recipe_stages
from ropewalk.rope import RopeMethod
from ropewalk.rope.theory import SEARCH_LIMIT, SHORTEST_LENGTH, context_bound, critical_dimension
from ropewalk.rope.theory.bases import Progress
from ropewalk.versions import is_installed

EXTENDED = "EXTENDED"
"""The extended checkpoint in commands, which does not exist yet."""


@dataclass(frozen=True)
class InspectResult(Result):
    """A checkpoint as its config describes it.

    Attributes:
        config: the parsed config.
        loaded: buffers of transformers' rotary module after loading. None if transformers does not know the model.
        warnings: suspicious values in the config, one sentence each.
        advice: for the target length. None if there is no target.
        readers: what other programs make of the config. None if not asked for.
        readers_at_target: what they would make of it with the recommended setting. None if not asked for, if there is
            no such setting, or if transformers cannot write it.
        choices: those of its architecture that make an extension better or worse. None if there is no target.
        tokens: the tokens that packing adds to rows of the pattern anchor. None if there is no tokenizer.
        doubts: those of the tokenizer that probably do not belong to documents.
    """

    config: ModelConfig
    loaded: tuple[LoadedRope, ...] | None
    warnings: tuple[str, ...]
    advice: Advice | None
    readers: tuple[Reading, ...] | None = None
    tokens: tuple[TokenUse, ...] | None = None
    doubts: tuple[Doubt, ...] = ()
    readers_at_target: tuple[Reading, ...] | None = None
    choices: ExtensionChoices | None = None

    @property
    def notes(self) -> list[str]:
        """Warnings and remarks on the checkpoint, one sentence each."""
        notes = [*self.warnings, *map(str, self.doubts), *self.config.layer_notes]
        if self.advice is not None:
            notes += [note for note in self.config.planning_notes if note not in notes]
            # Of a model that reaches the target already, nothing is extended.
            if self.choices is not None and self.advice.target_length > self.advice.trained_length:
                notes.append(self.choices.note)
        return notes

    @property
    def trained_length(self) -> int | None:
        """Tokens that the checkpoint was trained for; None if neither the config nor the user states it."""
        config = self.config
        # The config's own raises an error if it states no length at all.
        return config.given_length or (config.max_position_embeddings and config.trained_length)

    @cached_property
    def methods(self) -> list[dict[str, Any]]:
        """Each RoPE method as JSON values.

        Wavelengths are in tokens and ``inv_freq`` in rad/token, both at ``max_position_embeddings``. The critical
        dimension is that of the trained length.
        """
        held = {each.layer_type: each for each in self.loaded or ()}
        length, trained = self.config.max_position_embeddings, self.trained_length
        return [
            _described(layer_type, method, length, held.get(layer_type))
            | _critical_dimension(method, trained)
            for layer_type, method in self.config.methods.items()
        ]

    def overview(self) -> list[dict[str, Any]]:
        """With a target length a row for the setting of each rule, otherwise for the RoPE of each type of layers."""
        of = None if self.advice is None else (self.advice.lifted or self.advice)
        if of is None or not of.settings:
            of_method = (
                "layer_type",
                "name",
                "rope_theta",
                "rotary_dim",
                "context_bound",
                "longest_wavelength",
            )
            return [{name: each[name] for name in of_method} for each in self.methods]
        chosen = None if of.chosen is None else of.chosen.rule
        names = ("rule", "method", "rope_theta", "factor", "context_bound", "reaches_target", "reason")
        rows = [{name: setting.to_json()[name] for name in names} for setting in of.settings]
        return [{"recommended": row["rule"] == chosen, **row} for row in rows]

    def statement(self) -> list[str]:
        """With a target length what to do and why, otherwise what the checkpoint was trained for."""
        config, advice = self.config, self.advice
        if advice is None:
            trained = self.to_json()["trained_length"]
            length = "without a stated length" if trained is None else f"trained for {trained:,} tokens"
            return [
                f"{config.model} ({config.model_type}), {length}",
                *(f"note: {each}" for each in self.notes),
            ]
        lines = [f"To reach {advice.target_length:,} tokens", advice.action]
        for each in filter(None, (advice, advice.lifted)):
            lines += recipe_stages(each.stages, each.lift).splitlines() if each.stages else []
            lines += [f"- {reason}" for reason in each.reasons]
        return lines

    def to_json(self) -> dict[str, Any]:
        """JSON values; null if the config does not state a value."""
        config = self.config
        stated = config.max_position_embeddings
        return {
            "model": config.model,
            "model_type": config.model_type,
            "architectures": config.values.get("architectures"),
            "config_class": config.config_class,
            "defaults": dict(config.defaults),
            "max_position_embeddings": stated,
            "trained_length": self.trained_length,
            "num_hidden_layers": config.values.get("num_hidden_layers"),
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "sliding_window": config.shortest_window,
            "layers": [_layer_json(layer) for layer in config.layers],
            "notes": self.notes,
            "methods": self.methods,
            "tokens": None if self.tokens is None else [asdict(each) for each in self.tokens],
            "target": None if self.advice is None else self.advice.to_json(),
            "extension_choices": None if self.choices is None else self.choices.to_json(),
            "readers": None if self.readers is None else [each.to_json() for each in self.readers],
            "readers_at_target": None
            if self.readers_at_target is None
            else [each.to_json() for each in self.readers_at_target],
        }


def inspect(config: InspectSettings, context: RunContext | None = None) -> InspectResult:
    """Describe a checkpoint's RoPE and, for a target length, recommend a RoPE setting and say why.

    The description includes the context bound: the largest length up to which :func:`similarity_margin` is not
    negative. Only the config is read, not the weights.

    Args:
        config: the checkpoint and an optional target length.
        context: run context, whose reporter shows progress; None shows no progress.

    Returns:
        ``config`` is the parsed config, whose ``trained_length`` is in tokens. ``methods`` describes the RoPE of each
            layer type, with its frequencies and context bound. ``warnings`` has one sentence for each suspicious value.
            With a target, ``advice`` says what to do (``action``) and why (``reasons``), and gives the recommended
            setting (``chosen``), and ``choices`` has what the config shows of the choices that compound in an
            extension. If requested, ``readers`` says how other programs read the config.

    Raises:
        RopewalkError: if the checkpoint's config cannot be read, has no RoPE or contradicts itself.

    Example:
        >>> from ropewalk.planning import InspectSettings, inspect
        >>> found = inspect(InspectSettings(model="embedded", target=1024))
        >>> found.config.trained_length, found.advice.chosen.rule
        (256, 'critical-dimension')
    """
    if config.pretrained_length is not None and config.target is None:
        raise RopewalkError(
            f"--pretrained-length {config.pretrained_length} belongs to a note on an extension; give the length to "
            "extend to with --target, or omit --pretrained-length"
        )
    checkpoint = read_checkpoint(config.model, config.from_length)
    choices = None if config.target is None else extension_choices(checkpoint, config.pretrained_length)
    warnings = list(checkpoint.config_warnings)
    if checkpoint.config_class is None:
        warnings.append(
            f"transformers does not know the model type {checkpoint.model_type!r}: values that config.json omits "
            "(such as partial_rotary_factor or head_dim) default to Llama's, and ropewalk extend needs "
            "trust_remote_code"
        )
    if config.target is None:
        # With a target, the advice says so.
        warnings += [
            f"ropewalk extend cannot train this model: it {why}" for why in checkpoint.loading_refusals()
        ]
    loaded = None
    try:
        found = loaded_rope(checkpoint)
        loaded = None if found is None else tuple(found)
    except RopewalkError as error:
        warnings.append(f"cannot tell which frequencies transformers uses after loading: {error}")
    advice = None
    if config.target is not None:
        advice = _advice(checkpoint, config.target, config.explain, context or RunContext())
    readers = tuple(readings(str(resolve_model(config.model)), config.model)) if config.readers else None
    at_target = None
    if (
        config.readers
        and advice is not None
        and advice.chosen is not None
        and advice.chosen.method is not None
    ):
        at_target = _readers_at(config.model, advice.chosen.method, advice.target_length)
    tokens, doubts = _special_tokens(config.model)
    return InspectResult(
        checkpoint, loaded, tuple(warnings), advice, readers, tokens, doubts, at_target, choices
    )


def _readers_at(model: str, method: RopeMethod, target: int) -> tuple[Reading, ...] | None:
    """What programs would make of a checkpoint with another RoPE; None if transformers cannot write its config."""
    if not is_installed("transformers"):
        return None
    path = Path(resolve_model(model)).expanduser()
    # transformers reads a folder, and a Hub id as it is.
    place = path.parent if path.name == "config.json" and path.is_file() else resolve_model(model)
    try:
        extended = with_rope(read_config(place), method, target)
    except RopewalkError:
        return None
    return tuple(readings_of(checkpoint_of(written_config(extended.source), model), EXTENDED))


def _special_tokens(model: str) -> tuple[tuple[TokenUse, ...] | None, tuple[Doubt, ...]]:
    """The tokens that packing adds to rows, and which of them are doubtful; None without a tokenizer."""
    path = Path(resolve_model(model)).expanduser()
    folder = path.parent if path.is_file() else path
    # A folder with only a config is enough; whether a repository on the Hub has a tokenizer, loading tells.
    if lacks_tokenizer(folder):
        return None, ()
    try:
        tokenizer = load_tokenizer(str(folder))
        return tokens_of_rows(tokenizer, PackingSettings(context=2)), tuple(doubtful_tokens(tokenizer))
    except RopewalkError:
        # This is about the config; whatever packs documents says what is wrong with a tokenizer.
        return None, ()


def _advice(checkpoint: ModelConfig, target: int, explain: bool, context: RunContext) -> Advice:
    with counted(context.rank_0_reporter, f"bases for {target:,} tokens", None, "distances") as progress:
        return advise_on(checkpoint, target, explain, progress)


def read_checkpoint(model: str, given_length: int | None = None) -> ModelConfig:
    """Read the config of a checkpoint.

    Args:
        model: folder, path of a config.json, Hub id, or ``embedded``.
        given_length: trained length in tokens that replaces the one in the config.

    Raises:
        RopewalkError: as :func:`ropewalk.models.config.file.read_model_config`.
    """
    path = resolve_model(model)
    # A name that resolves to itself is a folder or a Hub id, which the reader resolves on its own.
    config = read_model_config(model, None if str(path) == model else path)
    return replace(config, given_length=given_length)


def trained_length_beside(tokenizer: str | None) -> int | None:
    """Trained length in tokens of the model in a tokenizer's folder; None if that folder has no model with RoPE.

    Args:
        tokenizer: folder, Hub id, ``embedded``, or None.
    """
    if tokenizer is None or not (Path(resolve_model(tokenizer)) / "config.json").is_file():
        return None
    try:
        return read_checkpoint(resolve_model(tokenizer)).trained_length
    except RopewalkError:
        # A tokenizer is usable without a model, so a broken config beside it is no error here.
        return None


def advise_on(
    config: ModelConfig, target: int, explain: bool = False, progress: Progress | None = None
) -> Advice:
    """Give advice on a checkpoint, including the reasons for which ``ropewalk extend`` would refuse it.

    Args:
        config: the parsed config.
        target: target length in tokens.
        explain: whether to map the feasible bases, which takes seconds at 128K and a minute or more at 1M.
        progress: progress callback of the map.

    Raises:
        RopewalkError: if the config states no length and none is given, or no layer has full attention.
    """
    method = config.full_attention_rope
    advice = advise(method, config.trained_length, target, _what_layers_say(config, target))
    return explained(advice, method.rotary_dim, progress) if explain else advice


def _what_layers_say(config: ModelConfig, target: int) -> Checkpoint:
    widest = config.widest_window
    liftable = widest is not None and widest < target and config.can_lift_windows
    dropout = config.values.get("attention_dropout")
    stays = None
    if not any(layer.rotates for layer in config.layers):
        stays = "no layer has RoPE, so no base limits the context, and training alone adapts the model to a longer one"
    if config.rotates_in_windows_alone(target):
        seen = max(layer.window or 0 for layer in config.layers if layer.rotates)
        stays = (
            f"layers with RoPE attend to at most {seen:,} tokens, so their distances do not grow; layers with full "
            "attention have no RoPE, so no base limits them, and training alone adapts them to a longer context"
        )
    return Checkpoint(
        refusals=config.reach_refusals(target, keeps_rope=True),
        first=[
            f"set attention_dropout to 0 in config.json (it is {dropout}, which no attention engine supports)"
        ]
        if dropout
        else [],
        lift=[limit for limit in config.limits if limit == "dual_chunk_attention"],
        head_dim=config.key_dim,
        windows=widest if liftable else None,
        limits_context=bool(config.context_layers(target)),
        stays=stays,
        length_from="the publisher's documentation" if config.documented_length else "the config",
    )


def _layer_json(layer: LayerConfig) -> dict[str, Any]:
    return {"kind": layer.kind, "window": layer.window, "rotates": layer.rotates}


def _described(
    layer_type: str | None, method: RopeMethod, length: int | None, held: LoadedRope | None
) -> dict[str, Any]:
    inv_freq, attention_factor = method.frequencies(length)
    apart = ("rotary_dim", "rope_theta", "attention_factor")
    bound = context_bound(inv_freq)
    # Pairs that stand still have no period.
    turning = inv_freq[inv_freq > 0]
    return {
        "layer_type": layer_type,
        "name": method.name,
        "rope_theta": method.rope_theta,
        "rotary_dim": method.rotary_dim,
        "attention_factor": attention_factor,
        "parameters": {f.name: getattr(method, f.name) for f in fields(method) if f.name not in apart},
        "shortest_wavelength": 2 * math.pi / float(turning[0]) if len(turning) else None,
        "longest_wavelength": 2 * math.pi / float(turning[-1]) if len(turning) else None,
        "context_bound": None if not method.rotates else SEARCH_LIMIT if bound is None else bound,
        "inv_freq": inv_freq.tolist(),
        "loaded": None if held is None else _describe_loaded(method, held),
    }


def _describe_loaded(method: RopeMethod, held: LoadedRope) -> dict[str, Any]:
    """Describe the buffers of transformers' rotary module right after loading."""
    # Before the first forward pass, a method that depends on the length holds its factors for short inputs.
    expected = method.frequencies().inv_freq
    # A module that rotates another number of pairs cannot be compared pair by pair.
    same = held.inv_freq.shape == expected.shape
    # A pair that stands still has no relative error, so its absolute one is taken.
    scale = expected.where(expected > 0, 1)
    return {
        "dtype": held.dtype,
        "inv_freq": held.inv_freq.tolist(),
        "attention_factor": held.attention_factor,
        "largest_relative_difference": float(((held.inv_freq - expected) / scale).abs().max())
        if same
        else None,
    }


def _critical_dimension(method: RopeMethod, length: int | None) -> dict[str, int | None]:
    """Critical dimension and the unscaled model's length it belongs to; None if the config does not state a length."""
    unscaled = method.unscaled_length(length)
    if unscaled is None or unscaled < SHORTEST_LENGTH:
        return {"critical_dimension": None, "critical_dimension_length": None}
    # The formula assumes that every pair turns; those that stand still never complete a period.
    turning = 2 * int((method.frequencies(length).inv_freq > 0).sum())
    dimensions = min(critical_dimension(method.rotary_dim, method.rope_theta, unscaled), turning)
    return {"critical_dimension": dimensions, "critical_dimension_length": unscaled}
