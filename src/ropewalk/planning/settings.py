"""Settings of ``ropewalk inspect``, ``plan`` and ``rope``, shared by the commands and the library."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from ropewalk.io.settings import (
    COMMON,
    MODEL_NAME,
    ROPE_SETTINGS,
    STATED_LENGTH,
    TARGET_LENGTH,
    TRAINED_LENGTH,
    FilePath,
    Length,
    Option,
    Settings,
    Several,
)

RotaryDim = Annotated[
    int,
    Field(
        description="Number of dimensions per head that RoPE rotates: head_dim, or fewer with partial RoPE."
    ),
]
TargetLength = Annotated[Length, Option(name="--to"), Field(description=TARGET_LENGTH)]

RULE = f"How to set RoPE: {ROPE_SETTINGS}. Default: what `ropewalk inspect MODEL --target LENGTH` recommends."
"""Description of a setting that chooses how to set RoPE."""

CONFIG_ALONE = f"{MODEL_NAME}. A folder with only a config.json is enough."
"""Description of a setting that names a model of which only the config is read."""


class InspectSettings(Settings):
    """Settings of :func:`ropewalk.planning.inspect`: the checkpoint and an optional target length."""

    group: ClassVar[str | None] = COMMON.group

    model: Annotated[str, Option(argument=True)] = Field(description=CONFIG_ALONE)
    target: Length | None = Field(default=None, description=TARGET_LENGTH)
    from_length: Annotated[Length | None, Option(name="--from")] = Field(
        default=None, description=STATED_LENGTH
    )
    pretrained_length: Length | None = Field(
        default=None,
        description="With --target: sequence length of the model's pretraining in tokens, before any extension. It is "
        "one of the choices that compound in an extension (arXiv:2608.10296), which a note lists. Default: unknown.",
    )
    readers: bool = Field(
        default=False,
        description="Also show which programs (transformers, vLLM, SGLang, llama.cpp, mlx-lm) compute this RoPE "
        "correctly from the config, and how to serve the full context with them; with --target, also with the setting "
        "that is recommended.",
    )
    explain: bool = Field(
        default=False,
        description="With --target, also show the checkpoint's RoPE and the alternatives, with their settings and "
        "papers: other rules for the base (such as NTK) and other methods (such as YaRN). This takes 10 seconds at "
        "128k and a minute or more at 1M. Without --explain, --target shows only the recommendation.",
    )


class PlanSettings(Settings):
    """Settings of :func:`ropewalk.planning.plan`: the checkpoint, the target length and the rule."""

    model: Annotated[str, Option(argument=True)] = Field(description=CONFIG_ALONE)
    target: TargetLength
    from_length: Annotated[Length | None, Option(name="--from")] = Field(
        default=None, description=STATED_LENGTH
    )
    rule: str | None = Field(default=None, description=RULE)
    explain: bool = Field(
        default=False,
        description="Also list other RoPE bases for the target: from papers and from published models. Takes 10 "
        "seconds at 128k and a minute or more at 1M.",
    )


class UnscaledRope(Settings):
    """Unscaled RoPE that a checkpoint was trained with."""

    rope_theta: float = Field(description="RoPE base of the checkpoint (rope_theta in its config).")
    rotary_dim: RotaryDim


class ExtendedRope(UnscaledRope):
    """Unscaled RoPE of a checkpoint, its trained length and the target length."""

    from_length: Annotated[Length, Option(name="--from")] = Field(description=TRAINED_LENGTH)
    to_length: TargetLength


class BoundSettings(UnscaledRope):
    """Settings of ``ropewalk rope bound``: the base whose context bound to compute."""

    compare: Annotated[Several[float], Option(metavar="NUMBER,...")] = Field(
        default=(), description="Other bases to compare with --rope-theta, separated by commas: 1e6,5e5."
    )


class BasesSettings(Settings):
    """Settings of ``ropewalk rope base``: the length that bases must reach."""

    length: Length = Field(description=TARGET_LENGTH)
    rotary_dim: RotaryDim
    ceiling: float = Field(default=1e9, description="Largest base to consider.")


class ThetaSettings(ExtendedRope):
    """Settings of ``ropewalk rope theta``: the lengths and the rule that chooses a base."""

    group: ClassVar[str | None] = COMMON.group

    rule: str = Field(
        default="recommended",
        description="Rule that computes the base: recommended, critical-dimension, length-floor, lower-bound, ntk, "
        "ntk-rcd=PAIR, schedule:gradient, schedule:lwm or schedule:anchorcontext.",
    )
    ceiling: float | None = Field(
        default=None,
        description="Largest base that the rule lower-bound considers. Default: 1e12, or 1e15 if the search up to 1e12 "
        "finds no base, or only one above 1e11.",
    )


METHOD_OPTIONS = Option(group="Options of one method")


class FrequenciesSettings(ExtendedRope):
    """Settings of ``ropewalk rope frequencies``: the method whose frequencies to compute."""

    group: ClassVar[str | None] = COMMON.group

    method: str = Field(
        description="RoPE method: default (unchanged), theta (the base that `ropewalk rope theta` recommends for the "
        "target length), linear (position interpolation), ntk, dynamic (dynamic NTK), yarn, llama3, longrope or cope."
    )
    factor: float | None = Field(
        default=None,
        description="Scaling factor of linear, ntk, dynamic, yarn or llama3. Default: the target length divided by "
        "the trained length.",
    )
    critical_pair: Annotated[int | None, METHOD_OPTIONS] = Field(
        default=None,
        description="Pair, counted from 0, whose frequency ntk divides by exactly the factor (default: the last pair), "
        "or at which the ramp of yarn ends (default: the first pair that turns less than once within the trained "
        "length).",
    )
    factors: Annotated[FilePath | None, METHOD_OPTIONS] = Field(
        default=None,
        description="JSON file with the lists short_factor and long_factor of longrope, one number per pair of "
        "dimensions. Required for longrope.",
    )
    clipped: Annotated[int | None, METHOD_OPTIONS] = Field(
        default=None,
        description="Number of slowest pairs whose frequencies cope lowers, that of the last one to 0. Default: 20 of "
        "64 pairs, or the same share, rounded.",
    )
