"""The whole audit of one model: the drift, its causes, its mitigations, and the effective frequencies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ropewalk.attention.layout import PackedLayout, Row
from ropewalk.audit.ablation import ABLATED, ablate_steps
from ropewalk.audit.arithmetic import DTYPES, stock_arithmetic
from ropewalk.audit.audited_model import AuditedModel
from ropewalk.audit.drift import Series, check_rows, measure_drift
from ropewalk.audit.effective_frequencies import rope_findings, rope_stages
from ropewalk.audit.first_token import first_token_effects
from ropewalk.audit.mitigations import changes, documents_of, measure_mitigations
from ropewalk.audit.passes import Runner, longest
from ropewalk.audit.random_parameters import random_parameters
from ropewalk.audit.results import Audit, AuditResult, Drift, finding
from ropewalk.audit.settings import LONGEST_DEFAULT, AuditSettings
from ropewalk.data import load_tokenizer
from ropewalk.data.read.embedded import resolve_model
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.rows import rows_of
from ropewalk.io.lengths import counted
from ropewalk.io.progress import Reporter
from ropewalk.models.config.read import read_config
from ropewalk.models.load import ModelSetup, choose_device, load_model
from ropewalk.parallel.context import RunContext
from ropewalk.versions import software_versions

Progress = Callable[[int, int, str], None]
"""Called with the number of finished units of work (a row in one arithmetic), their total, and what they are for."""


def audit(config: AuditSettings, context: RunContext | None = None) -> AuditResult:
    """Measure how far rounding breaks the relative positions of a checkpoint's RoPE.

    In exact arithmetic, attention within a row of text would not change if the whole row moved to other positions. The
    audit runs each row at several positions and measures the change.

    Args:
        config: the checkpoint, the text, and what to measure.
        context: where to run; only its device and its reporter are used.

    Returns:
        ``finding`` has three sentences: how large the change is, which operation causes it, and what reduces it.
            ``audit`` has all measured values. For example, each entry of ``audit.drift`` gives the change ``D`` between
            rows that start at position ``delta1`` and the same rows at position ``audit.delta2``; the positions are in
            tokens.

    Raises:
        EngineError: if the audit does not support the model's attention, for example because it normalises queries and
            keys after RoPE; the message says why.
        RopewalkError: if the checkpoint or text does not exist, or the text does not fill a row.

    Example:
        >>> from ropewalk.audit import AuditSettings, audit
        >>> settings = {"length": 64, "samples": 1, "ablation_samples": 1, "shifts": (0, 1000), "dtypes": ("float32",)}
        >>> found = audit(AuditSettings(model="embedded", **settings, random_control=False))
        >>> [drift.delta1 for drift in found.audit.drift if drift.angles == "model"]
        [0, 1000]
    """
    context = context or RunContext()
    path = resolve_model(config.model)
    checkpoint = read_config(path)
    device = choose_device(context.device)
    rows = _rows(
        config,
        load_tokenizer(path, checkpoint.vocab_size),
        checkpoint.trained_length,
        context.rank_0_reporter,
    )
    # The model's own rotary module is what is audited; ropewalk's would hide its rounding.
    model = load_model(path, ModelSetup(exact_rope=False), device=device)
    with context.rank_0_reporter.bar("audit", _units(config, len(rows))) as advance:
        found = audit_model(
            model,
            [row.input_ids for row in rows],
            config,
            [row.layout for row in rows],
            lambda done, _, label: advance(done, label),
        )
    return AuditResult(
        model=config.model,
        text=config.text,
        trained_length=checkpoint.trained_length,
        checkpoint_dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        seed=config.seed,
        finding=finding(found),
        rope_findings=tuple(rope_findings(found.rope)),
        audit=found,
        versions=software_versions(),
    )


def _rows(config: AuditSettings, tokenizer: Any, trained: int, reporter: Reporter) -> list[Row]:
    """Rows of the text, with a note if they differ from what was requested."""
    length = min(LONGEST_DEFAULT, trained) if config.length is None else config.length
    rows = rows_of(config.text, tokenizer, length, config.samples, config.seed)
    if config.length is None and length < LONGEST_DEFAULT:
        reporter.note(f"rows of {length:,} tokens, the trained length of the model")
    if length > trained:
        reporter.note(f"rows of {length:,} tokens are longer than the model's trained length of {trained:,}")
    if len(rows) < config.samples:
        reporter.note(
            f"the text fills {counted(len(rows), 'row')} of {length:,} tokens, fewer than the "
            f"{config.samples} requested"
        )
    return rows


def audit_model(
    model: Any,
    rows: Sequence[Tensor],
    settings: AuditSettings | None = None,
    layouts: Sequence[PackedLayout] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Audit a model in memory on rows of its own tokens.

    Args:
        model: a causal decoder from transformers with its own rotary module, as
            ``load_model(path, ModelSetup(exact_rope=False))`` returns it. It is unchanged afterwards.
        rows: token ids, int64 ``[length]`` each, all of the same length; each starts like the model's training
            sequences (with BOS, if the model uses one).
        settings: what to audit.
        layouts: documents of each row, for the mitigations that change the layout; None for one document per row.
        progress: called after each unit of work.

    Returns:
        Plain values; see :class:`~ropewalk.audit.results.Audit`.

    Raises:
        EngineError: if the model changes queries and keys by something other than a rotation, or has attention sinks
            with its own way of rounding.
        RopewalkError: if rows, settings or layouts do not fit each other.

    Example:
        >>> found = audit_model(model, rows, AuditSettings(shifts=(0, 16, 131072)))  # doctest: +SKIP
        >>> found.drift[0].D  # doctest: +SKIP
        11.6
    """
    settings = settings or AuditSettings()
    check_rows(rows)
    length = len(rows[0])
    if layouts is None:
        layouts = [PackedLayout.from_lengths([length], "full", 0)] * len(rows)
    described = [layout.total_length for layout in layouts]
    if described != [length] * len(rows):
        raise RopewalkError(
            f"{len(rows)} rows of {length} tokens need {len(rows)} layouts of {length} tokens, got layouts of "
            f"{described} tokens"
        )
    for layout in layouts:
        # The mitigations run last: rows too short for them should fail before the work, not after it.
        documents_of(layout)
    audited_model = AuditedModel.of(model)
    # Each ablation repeats every pass for every step, so it runs on fewer rows than the drift.
    few, few_layouts = rows[: settings.ablation_samples], layouts[: settings.ablation_samples]
    dtype = DTYPES[settings.dtypes[0]]
    near, far, delta2 = settings.near, settings.far, settings.delta2
    counter = _Counter(progress, _units(settings, len(rows)))
    runner = Runner(audited_model, longest([*settings.shifts, delta2], length), advance=counter)

    # The quick check comes first: wrong frequencies would explain every later result.
    rope = rope_stages(audited_model, far + length - 1, runner.total_length)
    counter.label = "drift"
    drift = measure_drift(runner, rows, _series(settings), settings.shifts, delta2)
    random: tuple[Drift, ...] = ()
    if settings.random_control:
        counter.label = "drift of the random control"
        # The same model with other parameters for a while, so that no second model takes memory.
        with random_parameters(model, settings.seed):
            random = measure_drift(runner, few, _series(settings), settings.shifts, delta2, "random").drift
    counter.label = "ablation"
    audited = runner.stock(dtype)
    # A set, because near and far are the same shift if there is no other.
    ablations = ablate_steps(runner, few, audited, sorted({near, far}), delta2)
    counter.label = "first-token experiment"
    effects = first_token_effects(runner, few, audited, near, delta2)
    counter.label = "mitigations"
    mitigations = measure_mitigations(runner, few, few_layouts, audited, (near, far), delta2)
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


def _units(settings: AuditSettings, rows: int) -> int:
    """Units of progress: a row of each series, of each step of the ablation, of each mitigation, and of the rest."""
    few = min(rows, settings.ablation_samples)
    # Any layout will do: only the number of mitigations is counted.
    ways = changes(stock_arithmetic(DTYPES[settings.dtypes[0]]), PackedLayout.from_lengths([2, 2], "full", 0))
    of_series = rows + few if settings.random_control else rows
    return len(_series(settings)) * of_series + (len(ABLATED) + len(ways) + 1) * few


def _series(settings: AuditSettings) -> list[Series]:
    """The audited dtypes, and float32 with exact angles as the control."""
    return [*(Series(name) for name in settings.dtypes), Series("float32", "exact")]


class _Counter:
    """Counts units of work and reports them as progress."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self.progress, self.total, self.done, self.label = progress, total, 0, ""

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, self.total, self.label)
