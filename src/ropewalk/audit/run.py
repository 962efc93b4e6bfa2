"""The whole audit of one model: drift, its causes, what mitigates it, and the frequencies it really runs with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ropewalk.attention.layout import PackedLayout
from ropewalk.audit.ablation import ablate_steps, passes_of_ablation
from ropewalk.audit.arithmetic import DTYPES
from ropewalk.audit.drift import Series, check_rows, check_shifts, measure_drift, passes_of_drift
from ropewalk.audit.effective_frequencies import rope_stages
from ropewalk.audit.first_token import PASSES as FIRST_TOKEN_PASSES
from ropewalk.audit.first_token import first_token_effects
from ropewalk.audit.mitigation_costs import mitigation_costs
from ropewalk.audit.mitigations import documents_of, measure_mitigations, passes_of_mitigations
from ropewalk.audit.passes import Runner, longest
from ropewalk.audit.results import Audit, Drift, Mitigation
from ropewalk.errors import RopewalkError
from ropewalk.models.intercept import AuditedModel, random_parameters
from ropewalk.models.rotary import rotary_module
from ropewalk.rope import RotaryEmbedding

LOW = ("bfloat16", "float16", "float32")
"""Dtypes whose ablation and mitigations can be measured: the first of them that is audited."""

Progress = Callable[[int, int, str], None]
"""Called with the forward passes that are done, how many there are, and what they are for."""


@dataclass(frozen=True)
class AuditSettings:
    """What to audit.

    Attributes:
        dtypes: names of dtypes; the first is the one that ablation, mitigations and first-token experiment explain.
        shifts: delta1, tokens. The largest should be the context that the model is meant for.
        delta2: what they are compared with, tokens.
        ablation_samples: rows of ablation, mitigations and first-token experiment, which run in float64, and of
            the random control.
        random_control: whether the drift of a randomly initialised control is measured.
        costs: whether time and memory of the mitigations are measured.
        seed: of the random_control.
    """

    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32")
    shifts: tuple[int, ...] = (0, 16, 100, 1_000, 10_000, 100_000, 1_000_000)
    delta2: int = 16
    ablation_samples: int = 4
    random_control: bool = True
    costs: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_shifts(self.shifts, self.delta2)
        if not any(shift != self.delta2 for shift in self.shifts):
            raise RopewalkError(f"give a shift other than delta2, {self.delta2} tokens, to compare with it")
        for name in self.dtypes:
            if name not in LOW:
                raise RopewalkError(f"cannot audit dtype {name!r}; choose from {', '.join(LOW)}")
        if not self.dtypes or len(set(self.dtypes)) < len(self.dtypes):
            raise RopewalkError(
                f"give each dtype once, and at least one; got {', '.join(self.dtypes) or 'none'}"
            )
        if self.ablation_samples < 1:
            raise RopewalkError(f"the ablation needs at least 1 row, got {self.ablation_samples}")

    @property
    def near(self) -> int:
        """The first shift that is not delta2."""
        return next(shift for shift in self.shifts if shift != self.delta2)

    @property
    def far(self) -> int:
        """The largest shift that is not delta2."""
        return max(shift for shift in self.shifts if shift != self.delta2)

    @property
    def series(self) -> list[Series]:
        """The audited dtypes, and float32 with exact angles, the control."""
        return [*(Series(name) for name in self.dtypes), Series("float32", "exact")]


def audit(
    model: Any,
    rows: Sequence[Tensor],
    settings: AuditSettings | None = None,
    layouts: Sequence[PackedLayout] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Audit a model's positions on some rows of text.

    Args:
        model: a causal decoder from transformers with its own rotary module, as ``load_model(path, exact_rope=False)``
            gives it. It is the same afterwards.
        rows: int64 ``[length]`` token ids each, all of one length; each begins as the model's rows begin (BOS, where
            it has one).
        settings: what to audit.
        layouts: which documents each row holds, for the mitigations that lay them out; one document a row if None.
        progress: called after each forward pass.

    Returns:
        Plain values; see :class:`~ropewalk.audit.results.Audit`.

    Raises:
        EngineError: if the model does anything to queries and keys that is no rotation, or has attention sinks.
        RopewalkError: if rows, settings or layouts do not fit each other.

    Example:
        >>> found = audit(model, rows, AuditSettings(shifts=(0, 16, 131072)))  # doctest: +SKIP
        >>> found.drift[0].D  # doctest: +SKIP
        11.6
    """
    settings = settings or AuditSettings()
    check_rows(rows)
    length = len(rows[0])
    if layouts is None:
        layouts = [PackedLayout.from_lengths([length], "full", 0)] * len(rows)
    if [layout.total_length for layout in layouts] != [length] * len(rows):
        raise RopewalkError(f"each of the {len(rows)} rows of {length} tokens needs a layout of that length")
    for layout in layouts:
        # The mitigations come last and could not lay them out: better said before the work.
        documents_of(layout)
    audited_model = AuditedModel.of(model)
    few, few_layouts = rows[: settings.ablation_samples], layouts[: settings.ablation_samples]
    dtype = DTYPES[settings.dtypes[0]]
    near, far, delta2 = settings.near, settings.far, settings.delta2
    runner = Runner(audited_model, longest([*settings.shifts, delta2], length))
    counter = _Counter(progress, forward_passes(settings, len(rows)))

    # First, since it is quick: what is wrong with the frequencies is wrong with all that follows.
    rope = rope_stages(audited_model, far + length - 1, runner.total_length)
    counter.label = "drift"
    drift = measure_drift(
        audited_model, rows, settings.series, settings.shifts, delta2, "pretrained", counter
    )
    random: tuple[Drift, ...] = ()
    if settings.random_control:
        counter.label = "drift of the random control"
        with random_parameters(model, settings.seed):
            random = measure_drift(
                audited_model, few, settings.series, settings.shifts, delta2, "random", counter
            ).drift
    counter.label = "ablation"
    audited = runner.stock(dtype)
    ablations = ablate_steps(runner, few, audited, sorted({near, far}), delta2, counter)
    counter.label = "first token"
    effects = first_token_effects(runner, few, audited, near, delta2, counter)
    counter.label = "mitigations"
    mitigations = measure_mitigations(runner, few, few_layouts, audited, near, far, delta2, counter)
    if settings.costs:
        counter.tell("cost of the mitigations")
        mitigations = _with_costs(model, mitigations, few[0], few_layouts[0], settings)
    else:
        mitigations = tuple(
            replace(mitigation, reason="costs were not asked for") for mitigation in mitigations
        )
    return Audit(
        length=length,
        samples=len(rows),
        ablation_samples=len(few),
        dtype=settings.dtypes[0],
        near=near,
        far=far,
        delta2=delta2,
        drift=(*drift.drift, *random),
        sweep=drift.sweep,
        per_token=drift.per_token,
        lengths=drift.lengths,
        heads=drift.heads,
        sink=drift.sink,
        first_token=effects,
        ablation=ablations,
        mitigations=mitigations,
        rope=rope,
    )


def forward_passes(settings: AuditSettings, rows: int) -> int:
    """How many forward passes :func:`audit` makes, those that measure cost left out.

    Args:
        settings: what is audited.
        rows: how many rows.
    """
    few = min(rows, settings.ablation_samples)
    near, far, delta2 = settings.near, settings.far, settings.delta2
    of_drift = passes_of_drift(settings.series, settings.shifts, delta2, rows)
    of_control = (
        passes_of_drift(settings.series, settings.shifts, delta2, few) if settings.random_control else 0
    )
    of_ladder = passes_of_ablation([near, far], delta2, few)
    of_mends = passes_of_mitigations(DTYPES[settings.dtypes[0]], near, far, delta2, few)
    return of_drift + of_control + of_ladder + of_mends + FIRST_TOKEN_PASSES * few


def _with_costs(
    model: Any,
    mitigations: tuple[Mitigation, ...],
    row: Tensor,
    layout: PackedLayout,
    settings: AuditSettings,
) -> tuple[Mitigation, ...]:
    if isinstance(rotary_module(model)[2], RotaryEmbedding):
        reason = "the model runs ropewalk's rotary module already; load it with exact_rope=False"
        return tuple(replace(mitigation, reason=reason) for mitigation in mitigations)
    dtype = DTYPES[settings.dtypes[0]]
    costs = mitigation_costs(
        model, row, documents_of(layout), dtype, names=tuple(mitigation.name for mitigation in mitigations)
    )
    found = []
    for mitigation in mitigations:
        cost = costs[mitigation.name]
        if isinstance(cost, str):
            found.append(replace(mitigation, reason=cost))
        else:
            found.append(replace(mitigation, time_ratio=cost.time_ratio, memory_ratio=cost.memory_ratio))
    return tuple(found)


class _Counter:
    """Counts forward passes for whoever shows progress."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done, self.label = progress, total, 0, ""

    def tell(self, label: str) -> None:
        """What is done now, without a pass."""
        self.label = label
        if self.progress is not None:
            self.progress(self.done, self.total, label)

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, self.label)
