"""Settings of ``ropewalk inspect``, ``plan`` and ``rope``, shared by the commands and the library."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.io.settings import MODEL_NAME, FilePath, Length, Option, Settings, Several

RotaryDim = Annotated[
    int, Field(description="Number of rotated dimensions per head: head_dim, or less under partial rotation.")
]
TargetLength = Annotated[
    Length, Option(name="--to"), Field(description="Target context length in tokens: 131072, 128k, 1M.")
]


class InspectSettings(Settings):
    """Settings of :func:`ropewalk.planning.inspect`: the checkpoint and an optional target length."""

    model: Annotated[str, Option(argument=True)] = Field(
        description=f"{MODEL_NAME}. A config.json is enough."
    )
    target: Length | None = Field(
        None, description="Show what the model needs for this context length: 131072, 128k, 1M."
    )
    from_length: Annotated[Length | None, Option(name="--from")] = Field(
        None, description="Trained length in tokens, if the config misstates it."
    )
    readers: bool = Field(
        False,
        description="Show which programs compute the same RoPE from the config (transformers, vLLM, SGLang, llama.cpp, "
        "mlx-lm), and how to start them.",
    )
    explain: bool = Field(
        False,
        description="With --target, also show what inspect shows without --target, the base that each rule gives "
        "next to published bases, and the papers behind the rules. Takes 10 seconds at 128K and a minute or more at "
        "1M.",
    )


class PlanSettings(Settings):
    """Settings of :func:`ropewalk.planning.plan`: the checkpoint, the target length and the rule."""

    model: Annotated[str, Option(argument=True)] = Field(
        description="Checkpoint folder, config.json, or Hub id."
    )
    target: TargetLength
    from_length: Annotated[Length | None, Option(name="--from")] = Field(
        None, description="Trained length in tokens. Default: the length that the config states."
    )
    rule: str | None = Field(
        None,
        description="How to set RoPE: a rule of `ropewalk rope theta --help`, or linear, yarn, llama3, or theta=5e6. "
        "Default: what `ropewalk inspect MODEL --target LENGTH` recommends.",
    )
    explain: bool = Field(
        False,
        description="Also list the base that each rule gives, next to published bases. Takes 10 seconds at 128K and a "
        "minute or more at 1M.",
    )
    processes: Annotated[int | None, Option(hidden=True)] = Field(
        None,
        ge=1,
        description="Number of H100 GPUs, in nodes of eight, to estimate memory and time for. Default: no estimate.",
    )


class UnscaledRope(Settings):
    """Unscaled RoPE that a checkpoint was trained with."""

    rope_theta: float = Field(description="RoPE base of the checkpoint.")
    rotary_dim: RotaryDim


class ExtendedRope(UnscaledRope):
    """Unscaled RoPE of a checkpoint, its trained length and the target length."""

    from_length: Annotated[Length, Option(name="--from")] = Field(
        description="Trained length in tokens: 8192, 8k."
    )
    to_length: TargetLength


class BoundSettings(UnscaledRope):
    """Settings of ``ropewalk rope bound``: the base whose context bound to compute."""

    compare: Annotated[Several[float], Option(metavar="NUMBER,...")] = Field(
        (), description="Comma-separated bases to compare with --rope-theta: 1e6,5e5."
    )


class BasesSettings(Settings):
    """Settings of ``ropewalk rope base``: the length that bases must reach."""

    length: Length = Field(description="Context length in tokens: 8192, 128k, 1M.")
    rotary_dim: RotaryDim
    ceiling: float = Field(1e9, description="Largest base to search.")


class ThetaSettings(ExtendedRope):
    """Settings of ``ropewalk rope theta``: the lengths and the rule that chooses a base."""

    rule: str = Field(
        "recommended",
        description="Rule: recommended, critical-dimension, length-floor, ntk, lower-bound, or a published "
        "base: schedule:gradient, schedule:lwm, schedule:anchorcontext.",
    )
    ceiling: float | None = Field(
        None,
        description="For lower-bound: largest base to search. Default: 1e12 or more, depending on the length.",
    )


class FrequenciesSettings(ExtendedRope):
    """Settings of ``ropewalk rope frequencies``: the method whose frequencies to compute."""

    method: str = Field(
        description="RoPE method: default (RoPE as it is), theta (the base that `ropewalk rope theta` recommends), "
        "linear, ntk, dynamic, yarn, llama3 or longrope."
    )
    factor: float | None = Field(
        None,
        description="Scaling factor for linear, ntk, yarn and llama3. Default: target length over trained length.",
    )
    factors: FilePath | None = Field(
        None,
        description="For longrope: JSON file with the lists short_factor and long_factor, one number per pair.",
    )
