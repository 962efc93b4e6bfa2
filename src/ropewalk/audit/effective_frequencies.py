"""The frequencies that a model really rotates with, from its config through casts to saving and loading.

Each step can change them silently: a cast rounds the buffers of the rotary module, a config loses its base, a module
runs without the scaling that the config states. The audit therefore measures frequencies and angles after each step.
The reference is the config's RoPE method in float64.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ropewalk.audit.audited_model import AuditedModel
from ropewalk.audit.results import RopeStage
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.protocol import Progress
from ropewalk.models.rope.frequencies import (
    held_inv_freq,
    inv_freq_in_weights,
    rope_of_saved_config,
    rotary_saved_and_loaded,
)
from ropewalk.rope import RotaryEmbedding

log = logging.getLogger("ropewalk")

LARGEST_ROUND_TRIP = 2**30
"""Largest size of the parameters, in bytes, for which the model is saved and loaded to check what comes back."""
STRETCH = 64
"""Number of positions up to the requested one whose angles are compared."""
CASTS = (torch.bfloat16, torch.float16)
TOLERANCE = 2e-6
"""Largest relative error of a frequency, or of the fastest pair's angle, that counts as float32 rounding. A yarn ramp
of factor 256 loses 8.4e-7 for frequencies that it mostly interpolates; a cast to float16 rounds by up to 4.9e-4."""
SEEN_TOLERANCE = 1e-6
"""Largest relative difference for which frequencies read from float32 cos and sin at position 1 match the buffer: both
are rounded by 6e-8, twice with an attention factor, and kernels may be off by a bit or two."""
GEOMETRIC_TOLERANCE = 1e-4
"""Largest relative difference from ``base^(-2i/d)`` for which a base is reported; it then has four correct digits."""


@dataclass(frozen=True, eq=False)
class _Truth:
    """The config's frequencies for one layer type, and the position at which they are compared."""

    layer_type: str | None
    inv_freq: Tensor
    attention_factor: float
    position: int
    total_length: int

    def error_of(self, inv_freq: Tensor) -> float:
        """Largest relative difference over pairs that rotate; NaN if the number of pairs differs."""
        if inv_freq.shape != self.inv_freq.shape:
            return math.nan
        # A pair that does not rotate has frequency 0 and no relative error.
        scale = self.inv_freq.where(self.inv_freq > 0, 1)
        return float(((inv_freq - self.inv_freq) / scale).abs().max())

    @property
    def positions(self) -> Tensor:
        """Positions to compare, int64, the requested one last: at a single position an angle may agree by chance."""
        return torch.arange(max(0, self.position - STRETCH + 1), self.position + 1)

    def angle_error_of(self, angles: Tensor) -> float:
        """Largest difference of angles ``[positions, pairs]`` modulo 2π; NaN if the number of pairs differs."""
        true = self.positions[:, None] * self.inv_freq
        if angles.shape != true.shape:
            return math.nan
        off = torch.remainder(angles - true + math.pi, 2 * math.pi) - math.pi
        return float(off.abs().max())

    def stage(
        self,
        name: str,
        inv_freq: Tensor,
        dtype: str,
        cos_sin_dtype: str,
        angles: Tensor | None = None,
        attention_factor: float | None = None,
    ) -> RopeStage:
        """Describe one stage.

        ``angles`` are those computed by the module; None for those that the frequencies give in exact arithmetic.
        ``attention_factor`` is None for the config's, if the stage does not apply one.
        """
        return RopeStage(
            stage=name,
            layer_type=self.layer_type,
            inv_freq=tuple(inv_freq.tolist()),
            dtype=dtype,
            cos_sin_dtype=cos_sin_dtype,
            frequency_error=self.error_of(inv_freq),
            angle_error=self.angle_error_of(self.positions[:, None] * inv_freq if angles is None else angles),
            position=self.position,
            attention_factor=self.attention_factor if attention_factor is None else attention_factor,
        )


def rope_stages(
    audited_model: AuditedModel,
    position: int,
    total_length: int | None = None,
    progress: Progress | None = None,
) -> tuple[RopeStage, ...]:
    """Measure what a model's rotary module computes after loading, casting and saving. The model is not changed.

    The stages, each for every layer type:

    - ``config``: the frequencies of the config, in float64.
    - ``loaded``: the module in memory.
    - ``weights``: frequencies that the model saves among its weights, if any, compared as they are.
    - ``to bfloat16``, ``to float16``: a copy of the module in memory after such a cast.
    - ``saved and loaded``: the module of the model that transformers loads after this one was saved. Above 1 GiB
      of parameters, or if saving or loading fails, the stage is ``config saved and loaded``: only the config is saved
      and loaded. Methods that depend on the length are then compared at their original length.

    Frequencies are read from the module's buffer if its output agrees with the buffer, and otherwise from its output at
    position 1. Angles are read from its cos and sin for float32 activations, modulo 2π, so an error is at most π.
    The attention factor affects neither.

    Args:
        position: position in tokens at which angles are compared.
        total_length: tokens of the sequence, for methods that depend on it; None for ``position + 1``.
        progress: called after each stage.

    Raises:
        RopewalkError: if the position lies outside the sequence.
    """
    total_length = position + 1 if total_length is None else total_length
    if position < 0:
        raise RopewalkError(f"position must be 0 or more, got {position}")
    if position >= total_length:
        raise RopewalkError(f"position must be less than total_length {total_length}, got {position}")
    truths = {
        kind: _Truth(kind, *method.frequencies(total_length), position, total_length)
        for kind, method in audited_model.methods.items()
    }
    dtype = audited_model.model.dtype
    stages: list[RopeStage] = []
    # config, loaded, weights, and saved and loaded; each cast is one more.
    steps = 4 + len(CASTS)

    def add(done: int, found: Iterator[RopeStage]) -> None:
        stages.extend(found)
        if progress is not None:
            progress(done, steps)

    add(1, (true.stage("config", true.inv_freq, "float64", "float64") for true in truths.values()))
    add(2, _measured("loaded", audited_model, audited_model.rotary, truths, dtype))
    add(3, _in_weights(audited_model, truths, stages[-1].cos_sin_dtype))
    for done, cast in enumerate(CASTS, start=4):
        copy = deepcopy(audited_model.rotary).to(cast)
        add(done, _measured(f"to {_name(cast)}", audited_model, copy, truths, cast))
    add(steps, _saved_and_loaded(audited_model, truths))
    return tuple(stages)


def _measured(
    name: str,
    audited_model: AuditedModel,
    rotary: nn.Module,
    truths: dict[str | None, _Truth],
    dtype: torch.dtype,
) -> Iterator[RopeStage]:
    """Frequencies and angles that a rotary module gives for activations of a dtype."""
    for true in truths.values():
        # A copy, because a long sequence changes the buffers of a length-dependent method's module.
        module = deepcopy(rotary)
        there = replace(audited_model, rotary=module)
        # The angle at position 1 is the frequency itself, below pi for every method, so atan2 recovers it unwrapped.
        where = torch.cat([torch.tensor([1]), true.positions])
        cos, sin = there.cos_sin(where, torch.float32, true.layer_type, true.total_length)
        cos, sin, came_as = cos.cpu().double(), sin.cpu().double(), _name(cos.dtype)
        seen, *rest = torch.atan2(sin, cos)
        angles = torch.stack(rest)
        # cos² + sin² is 1, so what is left is the attention factor that the module multiplies into both.
        factor = float((cos[0].square() + sin[0].square()).sqrt().mean())
        inv_freq, held_as = _effective(module, true, seen, came_as)
        # Angles are read in float32 above; here only the dtype is wanted that such activations would get.
        given = there.cos_sin(where, dtype, true.layer_type, true.total_length)[0].dtype
        yield true.stage(name, inv_freq, held_as, _name(given), angles, factor)


def _effective(rotary: nn.Module, true: _Truth, seen: Tensor, seen_as: str) -> tuple[Tensor, str]:
    """Frequencies with the dtype of their buffer: exactly the buffer's if the output agrees with it."""
    if isinstance(rotary, RotaryEmbedding):
        # Position 1 is not enough here: a LongRope method may keep its first positions unscaled.
        length = rotary.total_length or true.total_length
        return rotary.frequencies(true.layer_type, length).inv_freq, "float64"
    held = held_inv_freq(rotary, true.layer_type)
    # Without a buffer of that name, what the module computes is all there is to see.
    if held is None:
        return seen, seen_as
    inv_freq = held.cpu().double()
    if inv_freq.shape != seen.shape or bool(((inv_freq - seen).abs() > SEEN_TOLERANCE * inv_freq).any()):
        return seen, seen_as
    return inv_freq, _name(held.dtype)


def _in_weights(
    audited_model: AuditedModel, truths: dict[str | None, _Truth], cos_sin_dtype: str
) -> Iterator[RopeStage]:
    for kind, held in inv_freq_in_weights(audited_model.model):
        inv_freq = held.cpu().double().flatten()
        # Old names have no layer type; then the type whose frequencies fit best is assumed.
        for_kind = [truths[kind]] if kind in truths else list(truths.values())
        true = min(for_kind, key=lambda one: math.inf if math.isnan(e := one.error_of(inv_freq)) else e)
        yield true.stage("weights", inv_freq, _name(held.dtype), cos_sin_dtype)


def _saved_and_loaded(audited_model: AuditedModel, truths: dict[str | None, _Truth]) -> Iterator[RopeStage]:
    model = audited_model.model
    if model.get_memory_footprint(return_buffers=False) <= LARGEST_ROUND_TRIP:
        try:
            rotary = rotary_saved_and_loaded(model).to(audited_model.device)
        except RopewalkError as error:
            log.warning("%s; only its config is saved and loaded", error)
        else:
            yield from _measured("saved and loaded", audited_model, rotary, truths, model.dtype)
            return
    try:
        held = rope_of_saved_config(model)
    except RopewalkError as error:
        log.warning("the effect of saving and loading on RoPE is not measured: %s", error)
        return
    for kind, true in truths.items():
        if kind not in held:
            continue
        if audited_model.methods[kind].length_dependent:
            # The loaded module has the frequencies of the original length, which any sequence of one token is within.
            within = audited_model.methods[kind].frequencies(1)
            true = replace(true, inv_freq=within.inv_freq, attention_factor=within.attention_factor)
        yield true.stage(
            "config saved and loaded",
            held[kind].inv_freq,
            held[kind].dtype,
            "not measured",
            attention_factor=held[kind].attention_factor,
        )


def rope_findings(stages: tuple[RopeStage, ...]) -> tuple[str, ...]:
    """One sentence for each stage of :func:`rope_stages` whose RoPE differs from the config's in float32.

    A cast is reported only if the module in memory is right, so that each error is reported once.
    """
    config = {stage.layer_type: stage for stage in stages if stage.stage == "config"}
    wrong = {(s.stage, s.layer_type) for s in stages if not _right(s, config[s.layer_type])}
    findings = []
    for stage in stages:
        # A cast copies the loaded module, so a fault of that module would be reported once more for each cast.
        is_cast = stage.stage.startswith("to ")
        if _right(stage, config[stage.layer_type]) or (is_cast and ("loaded", stage.layer_type) in wrong):
            continue
        what, advice = _words(stage, config[stage.layer_type])
        kind = "" if stage.layer_type is None else f" for {stage.layer_type}"
        findings.append(f"{what}{kind}: {_extent(stage, config[stage.layer_type])}; {advice}")
    return tuple(findings)


def _right(stage: RopeStage, config: RopeStage) -> bool:
    # Written so that NaN compares as wrong.
    return (
        stage.frequency_error <= TOLERANCE
        and not _angle_alone_is_wrong(stage)
        and not _factor_is_wrong(stage, config)
    )


def _factor_is_wrong(stage: RopeStage, config: RopeStage) -> bool:
    return not abs(stage.attention_factor / config.attention_factor - 1) <= TOLERANCE


def _angle_alone_is_wrong(stage: RopeStage) -> bool:
    # float32 angles lose relative precision, so the limit grows with the angle of the fastest pair.
    return not stage.angle_error <= TOLERANCE * max(1.0, stage.position * max(stage.inv_freq))


def _words(stage: RopeStage, config: RopeStage) -> tuple[str, str]:
    """The holder of the frequencies, and advice on how to correct them."""
    held = f"holds inv_freq in {stage.dtype}"
    exact = "use ropewalk's exact rotary module, which has no buffers"
    if stage.stage == "weights":
        return (
            f"The model saves inv_freq in {stage.dtype} among its weights",
            "remove it from the weights, because a program that loads them may rotate with it despite the config",
        )
    if stage.stage.endswith("saved and loaded"):
        first = "its config is" if stage.stage.startswith("config") else "it is"
        return (
            f"After {first} saved and loaded the model {held}",
            "correct rope_parameters in the model's config, and check its config.json",
        )
    if stage.stage == "loaded":
        cast = _rounded_to(stage, config)
        if cast is not None:
            once = "" if stage.dtype == cast else f", once rounded to {cast}"
            return (
                f"The model's rotary module {held}{once}",
                f"load it again with dtype={cast} instead of casting it, or {exact}",
            )
        return (
            "The model's rotary module does not compute what the config states",
            "load the model again with the intended config",
        )
    dtype = stage.stage.removeprefix("to ")
    return (
        f"After .to({dtype}) the rotary module {held}",
        f"load with dtype={dtype} instead of casting, or {exact}",
    )


def angle_error_with_turns(stage: RopeStage, config: RopeStage) -> float:
    """Largest error in rad of an angle at the stage's position, including whole turns that cos and sin do not show.

    Args:
        stage, config: the two stages to compare, of the same layer type.

    Returns:
        The error; NaN if the number of frequencies differs.
    """
    if len(stage.inv_freq) != len(config.inv_freq):
        return math.nan
    turned = max(abs(a - b) for a, b in zip(stage.inv_freq, config.inv_freq, strict=True))
    return max(stage.angle_error, stage.position * turned)


def _extent(stage: RopeStage, config: RopeStage) -> str:
    if math.isnan(stage.frequency_error):
        return f"{len(stage.inv_freq)} frequencies, but the config gives {len(config.inv_freq)}"
    at = f"at position {stage.position:,}"
    if _factor_is_wrong(stage, config) and stage.frequency_error <= TOLERANCE:
        return (
            f"the frequencies are right, but the attention factor is {stage.attention_factor:.6g} and the config "
            f"gives {config.attention_factor:.6g}"
        )
    if stage.frequency_error <= TOLERANCE:
        return f"the frequencies are right, but an angle is off by {_number(stage.angle_error)} rad {at}"
    angle = angle_error_with_turns(stage, config)
    text = (
        f"the worst pair is off by {_number(100 * stage.frequency_error)} %, "
        f"an angle error of {_number(angle)} rad {at}"
    )
    base = _base_of(stage.inv_freq)
    if base is not None and _rounded_to(stage, config) is None:
        text += f"; these are the frequencies of unscaled RoPE with base {_number(base)}"
    return text


def _rounded_to(stage: RopeStage, config: RopeStage) -> str | None:
    """The dtype whose rounding alone explains the error, whatever dtype stores the result; None if none does."""
    if len(stage.inv_freq) != len(config.inv_freq):
        return None
    found = torch.tensor(stage.inv_freq, dtype=torch.float64)
    meant = torch.tensor(config.inv_freq, dtype=torch.float64)
    for dtype in CASTS:
        info = torch.finfo(dtype)
        # Half a unit in the last place, plus what float32 had lost before.
        limit = meant.clamp(min=info.tiny) * info.eps / 2 + meant * TOLERANCE
        if torch.equal(found.to(dtype).double(), found) and bool(((found - meant).abs() <= limit).all()):
            return _name(dtype)
    return None


def _base_of(inv_freq: tuple[float, ...]) -> float | None:
    """The base if the frequencies are ``base^(-2i/d)``; None otherwise."""
    pairs = len(inv_freq)
    # One or two pairs fit some base whatever they are.
    if pairs < 3 or abs(inv_freq[0] - 1) > GEOMETRIC_TOLERANCE or inv_freq[-1] <= 0:
        return None
    # Unscaled RoPE has inv_freq[i] = base^(-i/pairs), so the last pair determines the base.
    base = inv_freq[-1] ** (-pairs / (pairs - 1))
    fits = all(
        abs(found / base ** (-i / pairs) - 1) <= GEOMETRIC_TOLERANCE for i, found in enumerate(inv_freq)
    )
    return base if fits else None


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
