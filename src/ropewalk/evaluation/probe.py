"""probe: the loss of some text under each RoPE setting at step 0, before any training.

It says which setting disturbs a model least. Neither what training makes of a setting nor whether the model finds
anything at a distance follows from it.
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
from ropewalk.evaluation.statistics import NO_INTERVAL, Interval, ratio_interval
from ropewalk.io.progress import counted
from ropewalk.io.results import Result
from ropewalk.models.load import choose_device, load_model, read_config, rope_of
from ropewalk.models.losses import OutputHead
from ropewalk.parallel.context import RunContext
from ropewalk.rope import RopeMethod, bound_at, candidate, check_candidate
from ropewalk.versions import software_versions

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ProbedSetting:
    """What one setting makes of the rows; losses are token-weighted means in nats a token, NaN where there is none.

    Attributes:
        name: the setting's name.
        method: its RoPE method; None where it has no meaning for this checkpoint.
        loss, ci95: of all positions, with Student's 95 % interval over rows (NaN with fewer than two).
        within_loss: of the positions up to the trained length.
        beyond_loss, beyond_ci95: of the positions from the trained length on; None where there are none.
        difference, difference_ci95: loss less that of the best setting, paired row by row.
        reason: why it was not run, or why its loss is no number.
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
        """A setting that has no meaning for the checkpoint, and why."""
        nan = math.nan
        return cls(name, None, nan, NO_INTERVAL, nan, None, None, nan, NO_INTERVAL, reason)

    def to_json(self) -> dict[str, Any]:
        """JSON values; a missing number is None."""
        return {
            "name": self.name,
            "status": self.status,
            "method": None if self.method is None else self.method.name,
            "rope_theta": None if self.method is None else self.method.rope_theta,
            "loss": _finite(self.loss),
            "ci95": _ends(self.ci95),
            "within_loss": _finite(self.within_loss),
            "beyond_loss": None if self.beyond_loss is None else _finite(self.beyond_loss),
            "beyond_ci95": None if self.beyond_ci95 is None else _ends(self.beyond_ci95),
            "difference": _finite(self.difference),
            "difference_ci95": _ends(self.difference_ci95),
            "reason": self.reason,
        }


def candidate_methods(
    names: Sequence[str], current: RopeMethod, trained_length: int, target_length: int
) -> tuple[dict[str, RopeMethod], list[ProbedSetting]]:
    """The methods of settings by name, and a result that says why for each that this checkpoint cannot have.

    Args:
        names: as for :func:`~ropewalk.rope.candidate`.
        current: the checkpoint's method.
        trained_length, target_length: tokens.

    Raises:
        RopewalkError: if a name is unknown, or none of the settings has a meaning.
    """
    for name in names:
        check_candidate(name)
    methods: dict[str, RopeMethod] = {}
    refused: dict[str, ProbedSetting] = {}
    for name in names:
        try:
            methods[name] = candidate(name, current, trained_length, target_length)
        except RopewalkError as error:
            refused[name] = ProbedSetting.not_run(name, str(error))
    if not methods:
        reasons = "; ".join(f"{name}: {result.reason}" for name, result in refused.items())
        raise RopewalkError(f"there is no setting to probe ({reasons or 'none was named'}); add current")
    return methods, list(refused.values())


def probe_model(
    model: Any,
    candidates: Mapping[str, RopeMethod],
    rows: Sequence[Row],
    trained_length: int,
    progress: Progress | None = None,
    losses_of: RowLosses | None = None,
) -> list[ProbedSetting]:
    """Measure the same rows under each setting with the same weights; nothing of the model is changed.

    Args:
        model: a model from ``load_model`` with its exact rotary module and one method for all layers.
        candidates: methods by the name of their setting. A length-dependent one takes its frequencies for the
            length of the row.
        rows: pattern ``full``; one forward pass each and setting.
        trained_length: tokens; the loss at index t, of the token that follows, is beyond it from there on.
        progress: called after each row's losses.
        losses_of: gives the losses of rows, where ``model`` is part of something that has to run as a whole (see
            ``ropewalk.evaluation.sharded``); a forward pass of the model alone if None.

    Returns:
        A result for each setting, the lowest loss first, settings of equal loss as given. One whose loss is not
        finite comes last and says so.

    Raises:
        RopewalkError: if there is no setting or no row, or the model's RoPE cannot be exchanged.
        EngineError: if the model or its engine cannot take such rows.
    """
    if not candidates:
        raise RopewalkError("a probe needs at least one setting, got none")
    if trained_length < 1:
        raise RopewalkError(f"trained_length must be 1 token or more, got {trained_length}")
    check_rows(rows)
    if losses_of is None:
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
    """``[2, 2]``: within and beyond the trained length, the summed loss and the number of targets."""
    parts = (slice(None, trained_length), slice(trained_length, None))
    return np.array([[losses[part].sum(), targets[part].sum()] for part in parts], dtype=np.float64)


def _result(name: str, method: RopeMethod, sums: Floats, best: Floats) -> ProbedSetting:
    """From sums ``[rows, within or beyond, loss or targets]``, this setting's and the best one's."""
    totals, counts = sums.sum(1).T
    with np.errstate(invalid="ignore"):
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
    return (False, loss) if math.isfinite(loss) else (True, 0.0)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _ends(interval: Interval) -> list[float | None]:
    return [_finite(end) for end in interval]


@dataclass(frozen=True)
class ProbeResult(Result):
    """A checkpoint's loss under several RoPE settings, before any training.

    Attributes:
        model: as it was named.
        trained_length, target_length: tokens.
        text: documents that it was measured on.
        rows: of the target length.
        dtype, device: that the model ran in and on.
        found: the settings that ran, the lowest loss first.
        refused: those that have no meaning for the checkpoint.
        versions: of the software.
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
        """Tokens up to which a setting's frequencies reach at the target length; None where it was not run."""
        return None if setting.method is None else bound_at(setting.method, self.target_length)

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
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
    """Measure the loss of some text under each RoPE setting, with no training: the same weights, the same rows.

    Args:
        config: the checkpoint, the settings and the text.
        context: its reporter is told of progress.

    Raises:
        RopewalkError: if a setting is unknown or none has a meaning, the target is shorter than the trained length,
            or the checkpoint has several RoPE methods.

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
        raise RopewalkError(f"--to {target} is shorter than the {length} tokens the model is trained for")
    current = checkpoint.full_attention_rope
    methods, refused = candidate_methods(config.rules, current, length, target)
    device = choose_device(config.device)
    rows = rows_of(config.text, load_tokenizer(path), target, config.rows)
    model = load_model(path, dtype=config.dtype, device=device)
    with counted((context or RunContext()).told, "probe", len(methods) * len(rows), "rows") as progress:
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
