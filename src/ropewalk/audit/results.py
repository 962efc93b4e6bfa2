"""What an audit finds: plain values with names and units. NaN stands for what has no finite value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ropewalk.evaluation.statistics import Interval

Parameters = Literal["pretrained", "random"]
Shifted = Literal["first", "others", "all"]


@dataclass(frozen=True)
class Drift:
    """The attention difference D between two shifts of the same rows.

    Attributes:
        dtype: of the model, as transformers runs it.
        angles: ``model``: the model's own rotary module; ``exact``: float64 angles in its place.
        parameters: the checkpoint's, or those of a randomly initialised twin.
        delta1, delta2: position of each row's first token, tokens.
        D: equation 4: for each token, how much the attention it receives changes for the mean of the queries from
            there on; summed over tokens, heads and layers, mean over rows.
        moved: share of all attention that lands on other tokens, 0 to 1; mean over queries, heads, layers and rows.
        ci95: Student's 95 % interval of D over rows; NaN for fewer than two.
        first_token_share: how much of D falls on the row's first token, 0 to 1.
        sink_share: the same for the token that receives most attention.
        per_sample: D of each row.
    """

    dtype: str
    angles: str
    parameters: Parameters
    delta1: int
    delta2: int
    D: float
    ci95: Interval
    moved: float
    first_token_share: float
    sink_share: float
    per_sample: tuple[float, ...]


@dataclass(frozen=True)
class LengthPoint:
    """How far two shifts differ in rows cut off at a length; mean over rows.

    Attributes:
        dtype, angles: as in :class:`Drift`.
        delta1, delta2: shifts, tokens.
        length: tokens.
        D: attention difference of the rows cut off there.
        D_logit: equation 5: absolute difference of the score (before softmax) that a query gives the first token;
            mean over queries, summed over layers and heads.
        mean_logit_difference: the same as a mean over layers and heads too, which compares models.
    """

    dtype: str
    angles: str
    delta1: int
    delta2: int
    length: int
    D: float
    D_logit: float
    mean_logit_difference: float


@dataclass(frozen=True)
class SweepPoint:
    """D between two shifts in the audited dtype, mean over rows."""

    delta1: int
    delta2: int
    D: float


@dataclass(frozen=True)
class Sink:
    """Which token receives most attention in exact arithmetic, and how much.

    Attributes:
        index: its place in the row, most frequent over rows; counted from 0, the first token.
        attention: mean over the queries that see it, layers, heads and rows of the attention that each row's sink
            receives, 0 to 1.
        first_attention: the same for the first token.
        even_attention: what the first token would receive if every query attended evenly to what it sees.
        strongest_head: the largest mean attention that any head of any layer gives the first token, 0 to 1.
    """

    index: int
    attention: float
    first_attention: float
    even_attention: float
    strongest_head: float


@dataclass(frozen=True)
class FirstTokenEffect:
    """What some tokens of a row have to do with the drift: what moving them does, and what rounding them does.

    Attributes:
        delta1, delta2: position of the row's first token, or of its others less their index, before and after.
        shifted: ``first``: the first token alone; ``others``: all but it; ``all``: the whole row.
        D: attention difference between before and after the move in the audited dtype.
        D_exact: the same in float64: not zero where relative positions change.
        D_arithmetic: attention difference that the dtype adds to the float64 one.
        D_rounding: attention difference when the whole row moves and only these tokens' queries and keys are
            rotated and rounded as in the audited dtype, everything else in float64.
        share_of_D: the part of the whole row's D_rounding that they explain; ``first`` and ``others`` add up to 1.
        logit_difference, logit_exact, logit_arithmetic, logit_rounding, share_of_logits: likewise for the logits,
            root mean square.
    """

    delta1: int
    delta2: int
    shifted: Shifted
    D: float
    D_exact: float
    D_arithmetic: float
    D_rounding: float
    share_of_D: float
    logit_difference: float
    logit_exact: float
    logit_arithmetic: float
    logit_rounding: float
    share_of_logits: float


@dataclass(frozen=True)
class Rung:
    """One step of the ladder: everything in float64 but this step.

    Attributes:
        step: its name; ``none`` is all in float64, ``all`` is the audited arithmetic.
        delta1, delta2: shifts, tokens.
        D: attention difference between them, mean over rows.
        logit_error: root mean square difference of the logits at delta1 from those in float64.
        logit_difference: the same between delta1 and delta2.
        kl: mean Kullback-Leibler divergence at delta1 from the prediction in float64, nats a token.
    """

    step: str
    delta1: int
    delta2: int
    D: float
    logit_error: float
    logit_difference: float
    kl: float


@dataclass(frozen=True)
class Mend:
    """What a change of arithmetic or layout does to the drift, and what it costs.

    Attributes:
        name: of the change.
        delta1, delta2: shifts of D, tokens.
        D: attention difference between them that arithmetic causes, mean over rows.
        far_delta1, far_D: the same at a shift far away.
        logit_error: root mean square difference of the logits at delta1 from those in float64 of the same layout.
        kl: mean Kullback-Leibler divergence at delta1, nats a token.
        time_ratio, memory_ratio: of one forward pass on this machine over one with fused attention; None where it
            was not measured.
        reason: why not.
    """

    name: str
    delta1: int
    delta2: int
    D: float
    far_delta1: int
    far_D: float
    logit_error: float
    kl: float
    time_ratio: float | None = None
    memory_ratio: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class RopeStage:
    """What the rotary module of a model holds at one stage of its life.

    Attributes:
        stage: ``config``, ``loaded``, ``to bfloat16``, … or ``saved and loaded``.
        layer_type: None where all layers share one module's frequencies.
        inv_freq: effective frequencies, rad/token; those of the config are what they should be.
        dtype: in which they are held.
        cos_sin_dtype: of cos and sin for activations of the stage's dtype.
        frequency_error: largest relative difference of a frequency from the config's; NaN where their number differs.
        angle_error: largest difference of the angles that come out from the exact ones, rad, without whole turns (so at
            most π), over the 64 positions up to ``position``.
        position: tokens.
        attention_factor: factor on cos and sin that comes out.
    """

    stage: str
    layer_type: str | None
    inv_freq: tuple[float, ...]
    dtype: str
    cos_sin_dtype: str
    frequency_error: float
    angle_error: float
    position: int
    attention_factor: float


@dataclass(frozen=True)
class Audit:
    """All that an audit of one model found.

    Attributes:
        length: tokens of a row.
        samples: number of rows of the drift.
        ladder_samples: number of rows of the ladder, the mends and the first-token experiment.
        dtype: the audited dtype: of ladder, mends, first-token experiment, sweep, per_token and heads.
        near, far, delta2: shifts, tokens: the first one that is not delta2, the largest such, and what they are
            compared with.
        drift: by dtype, parameters and shift; float32 also with exact angles.
        sweep: D between every two different shifts, mean over the first four rows.
        per_token: each token's part of D between near and delta2, mean over rows; they add up to D.
        lengths: D and D_logit against the row's length.
        heads: ``[layers][heads]``: each head's part of D between near and delta2, mean over rows; they add up to D.
        sink: which token receives most attention.
        first_token: what moving the first token, the others, or all of them does.
        ladder, mends, rope: see their classes.
    """

    length: int
    samples: int
    ladder_samples: int
    dtype: str
    near: int
    far: int
    delta2: int
    drift: tuple[Drift, ...]
    sweep: tuple[SweepPoint, ...]
    per_token: tuple[float, ...]
    lengths: tuple[LengthPoint, ...]
    heads: tuple[tuple[float, ...], ...]
    sink: Sink
    first_token: tuple[FirstTokenEffect, ...]
    ladder: tuple[Rung, ...]
    mends: tuple[Mend, ...]
    rope: tuple[RopeStage, ...]
