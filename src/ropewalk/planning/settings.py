"""What is asked of a checkpoint's RoPE and of RoPE by itself: settings for the commands and the library."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ropewalk.io.settings import FilePath, Length, Option, Settings, Several

RotaryDim = Annotated[int, Field(description="Rotated dimensions of a head: head_dim, or a part of it.")]
TargetLength = Annotated[Length, Option(name="--to"), Field(description="Target length: 131072, 128k, 1M.")]


class InspectSettings(Settings):
    """Which checkpoint is looked at, and for which length."""

    model: Annotated[str, Option(argument=True)] = Field(
        description="A checkpoint's folder, a config.json, a Hub id, or embedded."
    )
    target: Length | None = Field(None, description="Context to extend to: 131072, 128k, 1M; with advice.")
    from_length: Annotated[Length | None, Option(name="--from")] = Field(
        None, description="Trained length, where the config misstates it."
    )
    explain: bool = Field(
        False,
        description="With --target: also the checkpoint's RoPE, every rule's base beside published ones, and all "
        "sources; takes seconds.",
    )


class PlanSettings(Settings):
    """From which checkpoint to which length, and by which rule."""

    model: Annotated[str, Option(argument=True)] = Field(
        description="A checkpoint's folder, a config.json, or a Hub id."
    )
    target: TargetLength
    from_length: Annotated[Length | None, Option(name="--from")] = Field(
        None, description="Trained length; what the config states if not given."
    )
    rule: str | None = Field(
        None,
        description="critical-dimension, length-floor, ntk, lower-bound, schedule:NAME, linear, yarn, llama3, "
        "theta=5e6; if not given, what inspect --target recommends.",
    )
    explain: bool = Field(
        False, description="Also list the bases of every rule beside published ones; takes seconds."
    )
    processes: Annotated[int | None, Option(hidden=True)] = Field(
        None, ge=1, description="GPUs to size each stage for, H100 in nodes of eight; None sizes nothing."
    )


class UnscaledRope(Settings):
    """RoPE as a checkpoint was trained with it."""

    rope_theta: float = Field(description="RoPE base of the checkpoint.")
    rotary_dim: RotaryDim


class ExtendedRope(UnscaledRope):
    """A checkpoint's RoPE, and the length that it is changed for."""

    from_length: Annotated[Length, Option(name="--from")] = Field(description="Trained length: 8192, 8k.")
    to_length: TargetLength


class BoundSettings(UnscaledRope):
    """Whose context bound is asked for."""

    compare: Annotated[Several[float], Option(metavar="NUMBER,...")] = Field(
        (), description="Other bases to draw beside it, with commas between: 1e6,5e5."
    )


class BasesSettings(Settings):
    """Which length bases are to reach."""

    length: Length = Field(description="Tokens: 8192, 128k, 1M.")
    rotary_dim: RotaryDim
    ceiling: float = Field(1e9, description="Largest base to look at.")


class ThetaSettings(ExtendedRope):
    """By which rule a base is chosen."""

    rule: str = Field(
        "recommended",
        description="recommended, critical-dimension, length-floor, ntk, lower-bound, or schedule:NAME "
        "(gradient, lwm, anchorcontext).",
    )
    ceiling: float | None = Field(
        None, description="For lower-bound: largest base to look at; 1e12 or more if not given."
    )


class FrequenciesSettings(ExtendedRope):
    """Which method's frequencies are asked for."""

    method: str = Field(description="default, theta, linear, ntk, dynamic, yarn, llama3 or longrope.")
    factor: float | None = Field(
        None, description="In place of target over trained length (linear, ntk, yarn, llama3)."
    )
    factors: FilePath | None = Field(
        None, description="For longrope: JSON with short_factor and long_factor, one a pair."
    )
