"""Settings of an audit, for the command and the library: what it measures, and on what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import format_length, parse_length
from ropewalk.io.settings import COMMON, DOCUMENTS, MODEL_NAME, Count, Length, Option, Seed, Settings

LONGEST_DEFAULT = 4096
"""Default tokens of a row, unless the model's trained length is shorter."""

LARGEST_SHIFT = 2**40
"""Largest position in tokens at which float64 angles are off by less than 1e-3 rad."""

AUDITED_DTYPES = ("bfloat16", "float16", "float32")
"""Dtypes that can be audited."""


def _parts(value: Any) -> Any:
    # The command line gives text; a list from Python stays as it is.
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _shift(value: Any) -> Any:
    if isinstance(value, str):
        # parse_length refuses 0, which is no length but a valid shift.
        return 0 if value.strip() == "0" else parse_length(value)
    return value


def _written(shift: int) -> str:
    return format_length(shift) if shift else "0"


def _dtype(value: str) -> str:
    if value not in AUDITED_DTYPES:
        raise ValueError(f"cannot audit dtype {value!r}; choose from {', '.join(AUDITED_DTYPES)}")
    return value


Shift = Annotated[int, BeforeValidator(_shift), Option(metavar="LENGTH", text=_written)]
"""Position of a row's first token, tokens: 0, 16, 128k."""

Shifts = Annotated[
    tuple[Shift, ...],
    BeforeValidator(_parts),
    Option(metavar="LENGTH,...", text=lambda found: ",".join(map(_written, found))),
]
Dtypes = Annotated[
    tuple[Annotated[str, AfterValidator(_dtype)], ...],
    BeforeValidator(_parts),
    Option(metavar="NAME,...", text=",".join),
]


def check_shifts(shifts: Sequence[int], delta2: int) -> None:
    """Raise for missing, negative, repeated or far too large shifts.

    Raises:
        RopewalkError: with the offending shift.
    """
    if not shifts:
        raise RopewalkError("an audit needs at least one shift, got none")
    for shift in (*shifts, delta2):
        if not 0 <= shift <= LARGEST_SHIFT:
            raise RopewalkError(f"a shift must be 0 to {LARGEST_SHIFT} tokens, got {shift}")
    if len(set(shifts)) < len(shifts):
        raise RopewalkError(f"give each shift only once, got {', '.join(map(str, shifts))}")


class AuditSettings(Settings):
    """Settings of an audit: the checkpoint, the text and the measurements.

    :func:`~ropewalk.audit.run.audit_model` receives a model and rows, and ignores the first four fields.
    """

    group: ClassVar[str | None] = "Measurements"

    model: Annotated[str, Option(argument=True)] = Field(
        default="embedded",
        description=f"{MODEL_NAME}.",
    )
    text: Annotated[str, COMMON] = Field(
        default="embedded:validation", description=f"Documents to measure on: {DOCUMENTS}."
    )
    length: Annotated[Length | None, COMMON] = Field(
        default=None,
        description=f"Sequence length in tokens: 4096 or 4k. Default: {LONGEST_DEFAULT}, or the trained length if that "
        "is shorter.",
    )
    samples: Annotated[Count, COMMON] = Field(
        default=50, ge=1, description="Maximum number of sequences to measure on."
    )

    shifts: Annotated[Shifts, COMMON] = Field(
        default=(0, 16, 100, 1_000, 10_000, 100_000, 1_000_000),
        description="Positions at which to place the first token of each sequence, separated by commas: 0,16,128k. "
        "Include the context length that you want to use.",
    )
    delta2: Shift = Field(
        default=16,
        description="Reference position of the first token. Attention at each of --shifts is compared with attention "
        "at this position. In arXiv:2411.13476, this position is Δ2, and --shifts are Δ1. If --shifts contains this "
        "position too, the change there is 0, as a control.",
    )
    dtypes: Annotated[Dtypes, COMMON] = Field(
        default=AUDITED_DTYPES,
        description="Dtypes to measure in, separated by commas. For the first of them, the audit also tries "
        "mitigations, such as RoPE in float32, and an ablation: one operation at a time is computed in this dtype, "
        "and all others in float64.",
    )
    ablation_samples: Annotated[Count, Option(formerly=("--ladder-samples",))] = Field(
        default=4,
        ge=1,
        description="Maximum number of sequences for the slow measurements: the ablation, the mitigations, the "
        "share of the change that comes from the first token, and --random-control.",
    )
    random_control: Annotated[bool, Option(formerly=("--twin",))] = Field(
        default=True,
        description="Also measure the same model with randomly initialised weights, to show how much of the change "
        "comes from training.",
    )
    seed: Seed = Field(
        default=0, description="Random seed of the texts, and of the weights for --random-control."
    )

    @model_validator(mode="after")
    def _compared(self) -> AuditSettings:
        check_shifts(self.shifts, self.delta2)
        if not any(shift != self.delta2 for shift in self.shifts):
            other = 0 if self.delta2 else 16
            raise ValueError(
                f"--shifts {self.delta2} leaves nothing to compare, because every shift is compared with --delta2 "
                f"{self.delta2}; add another shift, such as --shifts {other},{self.delta2}"
            )
        if not self.dtypes:
            raise ValueError("--dtypes needs at least one dtype, got none")
        if len(set(self.dtypes)) < len(self.dtypes):
            raise ValueError(f"--dtypes: give each dtype only once, got {', '.join(self.dtypes)}")
        return self

    @property
    def near(self) -> int:
        """The first shift other than delta2, in tokens."""
        return next(shift for shift in self.shifts if shift != self.delta2)

    @property
    def far(self) -> int:
        """The largest shift other than delta2, in tokens."""
        return max(shift for shift in self.shifts if shift != self.delta2)
