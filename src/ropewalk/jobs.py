"""The main jobs as functions that take what a person tries first: a path or name, a mapping, keywords, or settings.

``ropewalk.extend`` and its like are these functions. Each turns its arguments into settings, in one way for all, and
calls the job of its room, which takes settings and a run context and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from ropewalk.audit.settings import AuditSettings
from ropewalk.data.settings import PackConfig, SourceSpec
from ropewalk.dry_run.settings import HardwareSettings, InitSettings
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.settings import EvaluationSettings
from ropewalk.experiments.settings import CompareSettings
from ropewalk.io.calls import as_keywords, says_what_is_missing, settings_from
from ropewalk.io.settings import Device, FilePath, Folder, Overrides, Settings
from ropewalk.parallel.context import RunContext
from ropewalk.planning.settings import InspectSettings
from ropewalk.search.settings import SearchConfig
from ropewalk.verification.settings import VerifySettings

if TYPE_CHECKING:
    from typing import Unpack

    from ropewalk import keywords as of
    from ropewalk.audit.results import AuditResult
    from ropewalk.data.run import PackResult
    from ropewalk.dry_run.init import Proposal
    from ropewalk.dry_run.run import PlannedRun
    from ropewalk.evaluation.record import EvaluationResult
    from ropewalk.experiments.run import ExperimentResult
    from ropewalk.planning.inspection import InspectResult
    from ropewalk.search.run import SearchResult
    from ropewalk.training.recipe.recipe import Recipe
    from ropewalk.training.summary import RunResult
    from ropewalk.verification.result import VerifyResult

    Name = str | PathLike[str]
    Values = Mapping[str, Any]


class InFolder(Settings):
    """Keyword of a job that writes files."""

    out: Folder | None = None


class OnDevice(Settings):
    """Keyword of a job whose settings name no device."""

    device: Device = "auto"


class ChangedRecipe(Settings):
    """Keyword of a job on a recipe: overrides of its keys, as a mapping or as ``stages.0.steps=20``."""

    overrides: Overrides = ()


class RunOptions(ChangedRecipe):
    """Keywords of a run; those of the command ``ropewalk extend``."""

    rope: tuple[FilePath, ...] = ()
    resume: bool = False
    from_stage: int | None = None


JOBS: Mapping[str, tuple[str, tuple[type[Settings], ...]]] = {
    "inspect": ("model", (InspectSettings,)),
    "init": ("model", (InitSettings,)),
    "plan": ("recipe", (HardwareSettings, ChangedRecipe)),
    "pack": ("sources", (PackConfig, InFolder)),
    "search": ("model", (SearchConfig,)),
    "extend": ("recipe", (RunOptions,)),
    "evaluate": ("model", (EvaluationSettings, InFolder)),
    "compare": ("what", (CompareSettings, InFolder)),
    "audit": ("model", (AuditSettings, OnDevice)),
    "verify": ("recipe", (VerifySettings,)),
}
"""What the first argument of each job stands for, and the settings that its keywords fill."""


@says_what_is_missing
def inspect(
    model: Name | Values | InspectSettings,
    context: RunContext | str | int | None = None,
    **keywords: Unpack[of.InspectKeywords],
) -> InspectResult:
    """Describe a checkpoint's RoPE and, for a target length, recommend a RoPE setting and say why.

    Args:
        model: checkpoint folder, ``config.json``, Hub id or ``embedded``; or the settings.
        context: the target length, instead of as a keyword; or a run context, see :func:`ropewalk.planning.inspect`.
        keywords: options of ``ropewalk inspect``.

    Returns:
        The result of :func:`ropewalk.planning.inspect`.

    Raises:
        RopewalkError: for invalid input; the message names the keyword.

    Example:
        >>> inspect("embedded", "1k").to_json()["target"]["recommended"]
        'critical-dimension'
    """
    from ropewalk.planning.inspection import inspect

    (config,) = _settings("inspect", model, _with_target(context, "target", keywords))
    return inspect(config, _context(context, length=True))


@says_what_is_missing
def init(
    model: Name | Values | InitSettings,
    context: RunContext | str | int | None = None,
    **keywords: Unpack[of.InitKeywords],
) -> Proposal:
    """Write a commented recipe that fits a model, documents and the machine that trains.

    Args:
        model: checkpoint folder, Hub id or ``embedded``; or the settings.
        context: the target length, instead of as a keyword; or a run context, whose reporter shows progress.
        keywords: options of ``ropewalk init``. ``out`` is the file of the recipe, by default ``recipe.yaml``.

    Returns:
        The recipe, what was seen of documents and machine, and what a run would lack.

    Raises:
        RopewalkError: for invalid input, before anything is written; the message names the keyword.

    Example:
        >>> init("embedded", "1k", documents="embedded", out="r.yaml", dry_run=False).missing  # doctest: +SKIP
        ()
    """
    from ropewalk.dry_run.init import propose

    (settings,) = _settings("init", model, _with_target(context, "target", keywords))
    return propose(settings, _context(context, length=True))


@says_what_is_missing
def plan(
    recipe: Name | Values | Recipe,
    hardware: HardwareSettings | Values | None = None,
    context: RunContext | None = None,
    **keywords: Unpack[of.PlanKeywords],
) -> PlannedRun:
    """Estimate the memory, time and cost of a training run on named GPUs. Needs no GPU.

    Args:
        recipe: recipe file, name of a shipped recipe, mapping of its keys, or recipe.
        hardware: the GPUs as settings, instead of as keywords.
        context: see :func:`ropewalk.dry_run.plan`.
        keywords: options of ``ropewalk plan``. ``overrides`` changes keys of the recipe.

    Returns:
        The result of :func:`ropewalk.dry_run.plan`.

    Raises:
        RopewalkError: for invalid input; the message names the keyword or the key of the recipe.

    Example:
        >>> plan("r.yaml", gpus=8, gpu="h100", overrides={"stages.0.context": "128k"})  # doctest: +SKIP
    """
    from ropewalk.dry_run.run import plan
    from ropewalk.training.recipe.file import load_recipe

    given, options = _settings("plan", {} if hardware is None else hardware, keywords)
    return plan(load_recipe(recipe, options.overrides), given, _context(context))


@says_what_is_missing
def pack(
    sources: Name | Sequence[Name | Values | SourceSpec] | Values | PackConfig,
    context: RunContext | None = None,
    **keywords: Unpack[of.PackKeywords],
) -> PackResult:
    """Pack documents into rows on disk; call it again with the same arguments to resume after an interruption.

    Args:
        sources: one or several files, folders or Hub data sets of documents; or the settings.
        context: see :func:`ropewalk.data.pack`.
        keywords: options of ``ropewalk data pack``. ``out`` is the folder for the rows, by default ``packed``.

    Returns:
        The result of :func:`ropewalk.data.pack`.

    Raises:
        RopewalkError: for invalid input; the message names the keyword.

    Example:
        >>> pack("books/", tokenizer="meta-llama/Llama-3.1-8B", length="128k", out="rows")  # doctest: +SKIP
    """
    from ropewalk.data.run import pack

    config, options = _settings("pack", sources, keywords)
    context = _context(context)
    return pack(config, replace(context, output=options.out or context.output or Path("packed")))


@says_what_is_missing
def search(
    model: Name | Values | SearchConfig,
    context: RunContext | str | int | None = None,
    **keywords: Unpack[of.SearchKeywords],
) -> SearchResult:
    """Search LongRoPE's rescale factors for a longer context, without training the checkpoint.

    Args:
        model: checkpoint folder, Hub id or ``embedded``; or the settings.
        context: the target length, instead of as a keyword; or a run context, see :func:`ropewalk.search.search`.
        keywords: options of ``ropewalk search``. Without ``out``, no files are written.

    Returns:
        The result of :func:`ropewalk.search.search`.

    Raises:
        RopewalkError: for invalid input; the message names the keyword.

    Example:
        >>> search("embedded", to=512, budget=3, documents=1, held_out=0, device="cpu").table.forwards
        3
    """
    from ropewalk.search.run import search

    (config,) = _settings("search", model, _with_target(context, "target_length", keywords))
    settings = config.settings.within(config.target_length)
    return search(config.model_copy(update={"settings": settings}), _context(context, length=True))


@says_what_is_missing
def extend(
    recipe: Name | Values | Recipe,
    context: RunContext | None = None,
    **keywords: Unpack[of.ExtendKeywords],
) -> RunResult:
    """Run a recipe: evaluate, change RoPE, train, evaluate again, and save.

    Args:
        recipe: recipe file, name of a shipped recipe, mapping of its keys, or recipe.
        context: see :func:`ropewalk.training.extend`.
        keywords: options of ``ropewalk extend``. ``overrides`` changes keys of the recipe, ``rope`` names factor
            tables, and ``resume`` goes on from the last checkpoint, or with ``from_stage`` from the start of a stage.

    Returns:
        The result of :func:`ropewalk.training.extend`.

    Raises:
        RopewalkError: for invalid input, before anything is written; the message names the keyword or the key of the
            recipe. Also if the run fails later; such a run can be resumed.

    Example:
        >>> extend("recipe.yaml", overrides={"output": "runs/32k", "stages.0.context": "32k"})  # doctest: +SKIP
    """
    from ropewalk.training.recipe.file import load_recipe
    from ropewalk.training.run import extend
    from ropewalk.training.stage_rope.given import with_tables

    (options,) = _settings("extend", {}, keywords)
    context = _context(context)
    # Read once and sent to all, so that every rank has the same recipe even if the file changes meanwhile.
    read = context.world.on_rank_0(lambda: with_tables(load_recipe(recipe, options.overrides), options.rope))
    return extend(read, context, options.resume, options.from_stage)


@says_what_is_missing
def evaluate(
    model: Name | Values | EvaluationSettings | None = None,
    context: RunContext | None = None,
    **keywords: Unpack[of.EvaluateKeywords],
) -> EvaluationResult:
    """Run an evaluation, and write its results if there is an output folder.

    Args:
        model: checkpoint folder, Hub id or ``embedded``; or the settings. Not needed with the keyword ``server``, the
            address of a server.
        context: see :func:`ropewalk.evaluation.evaluate`.
        keywords: options of ``ropewalk eval``. Without ``out``, no files are written.

    Returns:
        The result of :func:`ropewalk.evaluation.evaluate`.

    Raises:
        RopewalkError: for invalid input; the message names the keyword.

    Example:
        >>> evaluate("embedded", suites="passkey", lengths=128, samples=1).results[0].task
        'passkey'
    """
    from ropewalk.evaluation.run import evaluate

    config, options = _settings("evaluate", {} if model is None else model, keywords)
    where, rope = _context(context, options.out), config.loading.rope
    if rope is None:
        return evaluate(config, where, None)
    # Needs torch, and a model behind a server none.
    from ropewalk.search.fitted_table import fitted_table

    return evaluate(config, where, lambda path: fitted_table(rope, path))


@overload
def compare(
    what: Name | Sequence[Name] | Values | CompareSettings,
    context: RunContext | None = None,
    /,
    **keywords: Unpack[of.CompareKeywords],
) -> ExperimentResult: ...


@overload
def compare(
    *what: Name, context: RunContext | None = None, **keywords: Unpack[of.CompareKeywords]
) -> ExperimentResult: ...


@says_what_is_missing
def compare(*what: Any, context: RunContext | None = None, **keywords: Any) -> ExperimentResult:
    """Run a recipe with every combination of the given values and compare the results, or compare finished runs.

    Args:
        what: a recipe file or the name of a shipped recipe; or the folders of finished runs or evaluations; or the
            settings.
        context: see :func:`ropewalk.experiments.run.compare`.
        keywords: options of ``ropewalk compare``. ``vary`` maps keys of the recipe to the values to compare. ``out``
            is the folder for the runs, which a recipe needs.

    Returns:
        The result of :func:`ropewalk.experiments.run.compare`.

    Raises:
        RopewalkError: for invalid input, before any run starts; the message names the keyword.

    Example:
        >>> compare("runs/before", "runs/after")  # doctest: +SKIP
        >>> compare("demo", vary={"stages.0.rope.method": ["theta", "yarn"]}, out="methods")  # doctest: +SKIP
    """
    from ropewalk.experiments.run import compare

    if what and isinstance(what[-1], RunContext | None):
        what, context = what[:-1], what[-1]
    config, options = _settings("compare", what[0] if len(what) == 1 else what, keywords)
    return compare(config, _context(context, options.out))


@says_what_is_missing
def audit(
    model: Name | Values | AuditSettings = "embedded",
    context: RunContext | None = None,
    **keywords: Unpack[of.AuditKeywords],
) -> AuditResult:
    """Measure how far rounding breaks the relative positions of a checkpoint's RoPE.

    Args:
        model: checkpoint folder, Hub id or ``embedded``; or the settings.
        context: see :func:`ropewalk.audit.audit`.
        keywords: options of ``ropewalk audit``.

    Returns:
        The result of :func:`ropewalk.audit.audit`.

    Raises:
        RopewalkError: for invalid input; the message names the keyword.

    Example:
        >>> audit("embedded", length=64, samples=1, shifts=[0, "1k"], dtypes="bfloat16")  # doctest: +SKIP
    """
    from ropewalk.audit.run import audit

    config, options = _settings("audit", model, keywords)
    context = _context(context)
    return audit(config, context if "device" not in keywords else replace(context, device=options.device))


@says_what_is_missing
def verify(
    recipe: Name | Values | VerifySettings = "demo",
    context: RunContext | None = None,
    **keywords: Unpack[of.VerifyKeywords],
) -> VerifyResult:
    """Check that packing, parallelism, and saving and loading checkpoints do not change a recipe's results.

    Args:
        recipe: recipe file or name of a shipped recipe; or the settings.
        context: see :func:`ropewalk.verification.verify`.
        keywords: options of ``ropewalk verify``. ``overrides`` changes keys of the recipe.

    Returns:
        The result of :func:`ropewalk.verification.verify`.

    Raises:
        RopewalkError: for invalid input; the message names the keyword or the key of the recipe.

    Example:
        >>> verify("recipe.yaml", layers=2, length="4k").failed  # doctest: +SKIP
        []
    """
    from ropewalk.verification.run import verify

    (config,) = _settings("verify", recipe, keywords)
    return verify(config, _context(context))


def _settings(job: str, given: Any, keywords: Any) -> list[Any]:
    first, kinds = JOBS[job]
    return settings_from({**as_keywords(kinds[0], first, given), **keywords}, *kinds)


def _with_target(given: RunContext | str | int | None, name: str, keywords: Any) -> Any:
    """The keywords, with a second argument that is a length under its name."""
    if isinstance(given, RunContext | None):
        return keywords
    if name in keywords:
        raise RopewalkError(f"{name} is given twice, as {given!r} and {keywords[name]!r}")
    return {**keywords, name: given}


def _context(
    context: RunContext | str | int | None, out: Path | None = None, length: bool = False
) -> RunContext:
    """The run context of a job, whose second argument may also be a length."""
    if length and not isinstance(context, RunContext):
        context = None
    if not isinstance(context, RunContext | None):
        raise RopewalkError(f"context must be a RunContext, got {context!r}")
    context = context or RunContext()
    return context if out is None else replace(context, output=out)
