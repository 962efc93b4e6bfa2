"""probe: measure the loss of a text under each RoPE setting at step 0, before any training.

The probe shows which setting disturbs a model least. It does not predict the loss after training, nor whether the
model retrieves information over long distances.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.attention.layout import Row
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import resolve_model
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.backends.likelihoods import RowLosses, check_rows, has_target, row_losses
from ropewalk.evaluation.backends.protocol import Progress, evaluating
from ropewalk.evaluation.results import Status
from ropewalk.evaluation.rows import rows_of
from ropewalk.evaluation.settings import ProbeSettings
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval, finite_or_none, ratio_interval
from ropewalk.io.progress import counted
from ropewalk.io.results import Result
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.config.read import read_config
from ropewalk.models.load import choose_device, load_model
from ropewalk.models.rope.rotary import rope_of
from ropewalk.parallel.context import RunContext
from ropewalk.rope import RopeMethod, bound_at, candidate, check_candidate
from ropewalk.versions import software_versions

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ProbedSetting:
    """Losses of the rows under one setting: token-weighted means in nats per token, NaN if there are no targets.

    Attributes:
        name: name of the setting.
        method: RoPE method of the setting; None if it does not apply to this checkpoint.
        loss, ci95: loss over all positions, and Student's 95 % interval over rows (NaN with fewer than two rows).
        within_loss: loss over the positions up to the trained length.
        beyond_loss, beyond_ci95: the same over the positions from the trained length on; None if there are none.
        difference, difference_ci95: loss minus the loss of the best setting, paired by row.
        reason: why the setting was not run, or why its loss is not finite.
    """

    name: str
    method: RopeMethod | None
    loss: float
    ci95: Interval
    within_loss: float
    beyond_loss: float | None
    beyond_ci95: Interval | None
    difference: float
    difference_ci95: Interval
    reason: str | None = None

    @property
    def status(self) -> Status:
        return "not run" if self.method is None else "ok"

    @classmethod
    def not_run(cls, name: str, reason: str) -> ProbedSetting:
        """Return the result of a setting that does not apply to the checkpoint, with the reason."""
        nan = math.nan
        return cls(name, None, nan, NO_INTERVAL, nan, None, None, nan, NO_INTERVAL, reason)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; None for missing numbers."""
        return {
            "name": self.name,
            "status": self.status,
            "method": None if self.method is None else self.method.name,
            "rope_theta": None if self.method is None else self.method.rope_theta,
            "loss": finite_or_none(self.loss),
            "ci95": _ends(self.ci95),
            "within_loss": finite_or_none(self.within_loss),
            "beyond_loss": None if self.beyond_loss is None else finite_or_none(self.beyond_loss),
            "beyond_ci95": None if self.beyond_ci95 is None else _ends(self.beyond_ci95),
            "difference": finite_or_none(self.difference),
            "difference_ci95": _ends(self.difference_ci95),
            "reason": self.reason,
        }


def candidate_methods(
    names: Sequence[str], current: RopeMethod, trained_length: int, target_length: int
) -> tuple[dict[str, RopeMethod], list[ProbedSetting]]:
    """Build the RoPE method of each named setting.

    Args:
        names: settings, as :func:`~ropewalk.rope.candidate` accepts them.
        current: RoPE method of the checkpoint.
        trained_length, target_length: tokens.

    Returns:
        The methods by name, and for each setting that does not apply to this checkpoint a result with the reason.

    Raises:
        RopewalkError: if a name is unknown, or none of the settings applies.
    """
    # First, because below an unknown name would pass for a setting that does not apply.
    for name in names:
        check_candidate(name)
    methods: dict[str, RopeMethod] = {}
    refused: dict[str, ProbedSetting] = {}
    for name in names:
        try:
            # A rule that does not apply is listed with its reason; the others are still measured.
            methods[name] = candidate(name, current, trained_length, target_length)
        except RopewalkError as error:
            refused[name] = ProbedSetting.not_run(name, str(error))
    if not methods:
        reasons = "; ".join(f"{name}: {result.reason}" for name, result in refused.items())
        raise RopewalkError(
            f"no RoPE setting is left to probe ({reasons or 'none was given'}); add the setting 'current', which "
            "always applies"
        )
    return methods, list(refused.values())


def probe_model(
    model: Any,
    candidates: Mapping[str, RopeMethod],
    rows: Sequence[Row],
    trained_length: int,
    progress: Progress | None = None,
    losses_of: RowLosses | None = None,
) -> list[ProbedSetting]:
    """Measure the same rows under each setting with the same weights. The model is left unchanged.

    Args:
        model: a model from ``load_model`` with its exact rotary module and one RoPE method for all layers.
        candidates: RoPE methods by the name of their setting. A length-dependent method uses the frequencies for
            the length of the row.
        rows: rows of pattern ``full``; each takes one forward pass per setting.
        trained_length: tokens. The loss at index t is that of the next token, and counts as beyond the trained
            length if t >= trained_length.
        progress: called after each row's losses.
        losses_of: computes the losses of rows if ``model`` is part of a sharded model (see
            ``ropewalk.evaluation.backends.sharded``); None runs a forward pass of ``model`` itself.

    Returns:
        A result for each setting, sorted by loss; equal losses keep the given order. Settings whose loss is not
        finite come last, with a reason.

    Raises:
        RopewalkError: if there is no setting or no row, or the model's RoPE cannot be replaced.
        EngineError: if the model or its engine does not support such rows.
    """
    if not candidates:
        raise RopewalkError("a probe needs at least one RoPE setting, got none")
    if trained_length < 1:
        raise RopewalkError(f"trained_length must be 1 token or more, got {trained_length}")
    check_rows(rows)
    if losses_of is None:
        # OutputHead.of compares the logits of two tokens, which dropout would change.
        with evaluating(model):
            losses_of = _own_losses(model, OutputHead.of(model))
    scored = {}
    for method_number, (name, method) in enumerate(candidates.items()):
        with rope_of(model, method), evaluating(model):
            sums: list[Floats] = []
            for row, losses in zip(rows, losses_of(rows), strict=True):
                sums.append(_sums(losses, has_target(row), trained_length))
                if progress is not None:
                    progress(method_number * len(rows) + len(sums), len(candidates) * len(rows))
        scored[name] = np.array(sums)
    best = min(scored.values(), key=lambda sums: _rank(_loss(sums)))
    results = [_result(name, candidates[name], sums, best) for name, sums in scored.items()]
    return sorted(results, key=lambda result: _rank(result.loss))


def _own_losses(model: Any, head: OutputHead) -> RowLosses:
    return lambda rows: (row_losses(model, head, row) for row in rows)


def _sums(losses: Floats, targets: NDArray[np.bool_], trained_length: int) -> Floats:
    """Return ``[2, 2]``: for positions within and beyond the trained length, the summed loss and the target count."""
    # Slices beyond the end are empty, so rows within the trained length have 0 targets beyond it.
    parts = (slice(None, trained_length), slice(trained_length, None))
    return np.array([[losses[part].sum(), targets[part].sum()] for part in parts], dtype=np.float64)


def _result(name: str, method: RopeMethod, sums: Floats, best: Floats) -> ProbedSetting:
    """Build a setting's result from its sums and the best setting's, ``[rows, within or beyond, loss or targets]``."""
    # Both parts of each row together, as [loss or targets, rows].
    totals, counts = sums.sum(1).T
    # Infinite losses minus infinite losses give NaN, which is the right answer here and needs no warning.
    with np.errstate(invalid="ignore"):
        # Paired by row: rows differ in difficulty far more than settings do.
        paired = totals - best.sum(1)[:, 0]
    loss = _loss(sums)
    beyond = sums[:, 1]
    has_beyond = bool(beyond[:, 1].any())
    return ProbedSetting(
        name=name,
        method=method,
        loss=loss,
        ci95=ratio_interval(totals, counts, at_least=0),
        within_loss=_loss(sums[:, :1]),
        beyond_loss=_loss(sums[:, 1:]) if has_beyond else None,
        beyond_ci95=ratio_interval(beyond[:, 0], beyond[:, 1], at_least=0) if has_beyond else None,
        difference=loss - _loss(best),
        difference_ci95=ratio_interval(paired, counts),
        reason=None if math.isfinite(loss) else "the loss is not a finite number",
    )


def _loss(sums: Floats) -> float:
    total, count = sums.sum((0, 1))
    return float(total / count) if count else math.nan


def _rank(loss: float) -> tuple[bool, float]:
    # All losses that are not finite rank equal, so that a stable sort keeps their given order.
    return (False, loss) if math.isfinite(loss) else (True, 0.0)


def _ends(interval: Interval) -> list[float | None]:
    return [finite_or_none(end) for end in interval]


@dataclass(frozen=True)
class ProbeResult(Result):
    """A checkpoint's loss under several RoPE settings, before any training.

    Attributes:
        model: name of the model, as given.
        trained_length, target_length: tokens.
        text: documents that were scored, as given.
        rows: number of rows of the target length.
        dtype, device: dtype and device that the model ran on.
        found: the settings that ran, sorted by loss.
        refused: the settings that do not apply to the checkpoint.
        versions: versions of the software.
    """

    model: str
    trained_length: int
    target_length: int
    text: str
    rows: int
    dtype: str
    device: str
    found: tuple[ProbedSetting, ...]
    refused: tuple[ProbedSetting, ...]
    versions: dict[str, str]

    def context_bound(self, setting: ProbedSetting) -> int | None:
        """Return the context bound of a setting's frequencies at the target length, in tokens; None if it has none."""
        if setting.method is None or not setting.method.rotates:
            return None
        return bound_at(setting.method, self.target_length)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        settings = (*self.found, *self.refused)
        return {
            "model": self.model,
            "trained_length": self.trained_length,
            "target_length": self.target_length,
            "text": self.text,
            "rows": self.rows,
            "dtype": self.dtype,
            "device": self.device,
            "results": [
                {**setting.to_json(), "context_bound": self.context_bound(setting)} for setting in settings
            ],
            "best": self.found[0].name,
            "versions": self.versions,
        }


def probe(config: ProbeSettings, context: RunContext | None = None) -> ProbeResult:
    """Measure the loss of a text under each RoPE setting without training, with the same weights and rows.

    Args:
        config: the checkpoint, the settings to probe and the text.
        context: run context whose reporter shows progress.

    Raises:
        RopewalkError: if a setting is unknown or none applies, the target is shorter than the trained length, or
            the checkpoint has several RoPE methods.

    Example:
        >>> from ropewalk.evaluation.settings import ProbeSettings
        >>> found = probe(ProbeSettings(model="embedded", to=512, rows=1, rules=("current", "ntk")))
        >>> [setting.name for setting in found.found]
        ['ntk', 'current']
    """
    for name in config.rules:
        check_candidate(name)
    path, target = resolve_model(config.model), config.to
    checkpoint = read_config(path)
    length = config.from_length or checkpoint.trained_length
    if target < length:
        raise RopewalkError(
            f"--to {target} is shorter than the trained length of {length} tokens; give --to {length} or more"
        )
    current = checkpoint.full_attention_rope
    methods, refused = candidate_methods(config.rules, current, length, target)
    device = choose_device(config.device)
    rows = rows_of(config.text, load_tokenizer(path, checkpoint.vocab_size), target, config.rows, seed=0)
    model = load_model(path, dtype=config.dtype, device=device)
    with counted(
        (context or RunContext()).rank_0_reporter, "probe", len(methods) * len(rows), "rows"
    ) as progress:
        found = probe_model(model, methods, rows, length, progress)
    return ProbeResult(
        model=config.model,
        trained_length=length,
        target_length=target,
        text=config.text,
        rows=len(rows),
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        found=tuple(found),
        refused=tuple(refused),
        versions=software_versions(),
    )
