"""Propose a recipe after a look at the model, the documents and the machine, and a dry run of its stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ropewalk.data import PackingSettings, load_tokenizer
from ropewalk.data.read.embedded import EMBEDDED, resolve_model
from ropewalk.data.tokens.special_ids import TokenUse, doubtful_tokens, tokens_of_rows
from ropewalk.dry_run.check import check
from ropewalk.dry_run.draft import CHOSEN, Draft, StageChoice
from ropewalk.dry_run.facts import (
    DocumentFacts,
    MachineFacts,
    gpus_of,
    look_at,
    missing_parts,
    named_machine,
    remark_on_parts,
    this_machine,
    with_text_field,
)
from ropewalk.dry_run.run import SAVINGS, PlannedRun, PlannedStage, announced, plan_here
from ropewalk.dry_run.run import plan as plan_recipe
from ropewalk.dry_run.settings import InitSettings
from ropewalk.errors import EngineError, RopewalkError
from ropewalk.io.files import write_text
from ropewalk.io.lengths import duration
from ropewalk.io.results import Result
from ropewalk.models.config.parameters import count_parameters
from ropewalk.parallel.context import RunContext
from ropewalk.planning import PlanSettings, plan
from ropewalk.planning.practice import practice_for
from ropewalk.planning.run import PlanResult
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe


@dataclass(frozen=True)
class Proposal(Result):
    """A recipe that was written.

    Attributes:
        out: the file.
        documents: what was seen of the documents; None if there are none.
        machine: the machine that it is for.
        adapter: why the recipe trains an adapter; None if it trains the whole model.
        stages: what dry runs found of each stage, one sentence each; or why there was none.
        text: the recipe.
        next_commands: what to run after it.
        missing: what a run needs and is not here.
        warnings: why a run of it would teach little, or would not end; they are in the recipe too.
        tokens: the tokens that packing adds to documents; none without a tokenizer.
        remarks: which folders hold what could be several sources.
        steps: where the steps of each stage come from, and what to write if the documents are only samples.
    """

    out: Path
    documents: DocumentFacts | None
    machine: MachineFacts
    adapter: str | None
    stages: tuple[str, ...]
    text: str
    next_commands: str = ""
    missing: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    tokens: tuple[TokenUse, ...] = ()
    remarks: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()

    def statement(self) -> list[str]:
        """What was seen and what is missing, a line each that begins with what it is about."""
        documents, machine = self.documents, self.machine
        data = "none"
        if documents is not None:
            seen = f"{documents.read:,}{'' if documents.complete else ' and more'}"
            data = f"{seen} documents, about {documents.tokens:,} tokens"
        here = f"{machine.cores} cores, {machine.memory_bytes / 1e9:,.1f} GB of memory, "
        gpus = f"{gpus_of(machine)} of {machine.gpu_bytes / 1e9:g} GB" if machine.gpus else "no GPU"
        lines = (
            ("recipe", str(self.out)),
            ("data", data),
            ("machine", gpus if machine.named else f"{here}{gpus}"),
            *([("tokens", ", ".join(map(str, self.tokens)))] if self.tokens else []),
            *([("adapter", self.adapter)] if self.adapter else []),
            *((f"stage {number}", line) for number, line in enumerate(self.stages, start=1)),
            *(("steps", f"stage {number}: {line}") for number, line in enumerate(self.steps, start=1)),
            *(("sources", line) for line in self.remarks),
            *(("missing", line) for line in self.missing),
            *(("warning", line) for line in self.warnings),
            ("next", self.next_commands),
        )
        return [f"{name:8} {value}" for name, value in lines]


def propose(settings: InitSettings, context: RunContext | None = None) -> Proposal:
    """Look at model, documents and machine, and write a recipe that passes its own check.

    Raises:
        RopewalkError: if the file exists, the model cannot be extended to the target, or the documents cannot be read
            or do not fill a row. Nothing is written then.
    """
    out = settings.out
    # A dangling link does not exist, but writing would follow it.
    if out.exists() or out.is_symlink():
        raise RopewalkError(f"{out} already exists; give a new file with --out")
    context = context or RunContext()
    planned = plan(PlanSettings(model=settings.model, target=settings.target, rule=settings.rule), context)
    missing = missing_parts(settings.model)
    sources = [with_text_field(path, settings.text_field) for path in settings.documents]
    tokenizer = None
    if not any(each.startswith("a tokenizer") for each in missing):
        tokenizer = load_tokenizer(str(resolve_model(settings.model)), planned.config.vocab_size)
    documents = look_at(sources, tokenizer, context) if sources else None
    machine = this_machine() if settings.hardware is None else named_machine(settings.hardware)
    training = training_on(machine, planned, context)
    adapter = training.adapter
    practice = practice_for(count_parameters(planned.config), adapter is not None)
    remarks = tuple(filter(None, map(remark_on_parts, sources)))
    draft = Draft(settings, planned, machine, practice, documents, sources, adapter, missing, remarks=remarks)
    draft = replace(draft, savings=training.settings)
    if tokenizer is not None:
        tokens = tokens_of_rows(tokenizer, PackingSettings(context=planned.target_length))
        draft = replace(draft, tokens=tokens, doubts=tuple(doubtful_tokens(tokenizer)))
    recipe = _checked(draft)
    found: tuple[str, ...] = ()
    if settings.dry_run:
        try:
            draft = replace(draft, choices=dict(enumerate(choices_of(_dry_run(recipe, settings, context)))))
        except (RopewalkError, EngineError) as error:
            found = (f"no dry run: {error}",)
        recipe = _checked(draft)
    text = draft.text()
    write_text(out, text)
    found = found or tuple(choice.words for choice in draft.choices.values())
    return Proposal(
        out,
        documents,
        machine,
        adapter,
        found,
        text,
        draft.next_commands,
        draft.all_missing,
        draft.warnings,
        draft.tokens,
        draft.remarks,
        draft.steps,
    )


def _checked(draft: Draft) -> Recipe:
    """The recipe as it is read. One that would be refused must not be written."""
    recipe = parse_recipe(draft.text(), str(draft.settings.out))
    if not draft.missing:
        check(recipe)
    return recipe


def _dry_run(recipe: Recipe, settings: InitSettings, context: RunContext) -> PlannedRun:
    """The recipe on the machine that trains."""
    if settings.hardware is None:
        return plan_here(recipe, context=context)
    return plan_recipe(recipe, settings.hardware, context)


def choices_of(planned: PlannedRun) -> Iterator[StageChoice]:
    """What each stage of a dry run should set: what fits with least cost of time."""
    for stage in planned.stages:
        tried = (*stage.changes, *reversed(stage.spare))
        change = next((change for change in tried if change.fits and change.settings), None)
        if change is not None:
            settings = {key: value for key, value in change.settings.items() if key in CHOSEN}
            yield StageChoice(settings, _words(planned, stage, change.peak or 0, change.seconds))
        elif stage.fits:
            seconds = None if stage.time is None else stage.time.seconds
            yield StageChoice({}, _words(planned, stage, stage.memory.peak, seconds))
        else:
            larger = next((f"; {change.change} would do" for change in stage.changes if change.fits), "")
            words = _words(planned, stage, stage.memory.peak, only="only ")
            yield StageChoice({}, words + larger, fits=False)


def _words(
    planned: PlannedRun, stage: PlannedStage, peak: int, seconds: float | None = None, only: str = ""
) -> str:
    """What a stage takes, in a sentence without its full stop.

    Args:
        planned: the plan.
        stage: the stage.
        peak: most bytes per GPU.
        seconds: time of a step; None if it is not known.
        only: a word before the memory that there is.
    """
    where = f"{planned.ranks} GPU{'s' * (planned.ranks != 1)}" if stage.device == "cuda" else "the CPU"
    shares = "" if planned.ranks == 1 else f" with the mesh {stage.mesh}"
    time = "" if seconds is None else f", about {duration(stage.steps * seconds)} of training"
    return (
        f"A dry run on {where}{shares}: a peak of {peak / 1e9:,.3g} GB, where a run may fill {only}"
        f"{stage.usable / 1e9:,.3g} GB{time}"
    )


@dataclass(frozen=True)
class Training:
    """What can be trained on a machine.

    Attributes:
        adapter: why it is only an adapter; None if it is the whole model, or if that cannot be said.
        settings: settings of a stage that save memory, without which the whole model does not fit.
    """

    adapter: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


def training_on(machine: MachineFacts, planned: PlanResult, context: RunContext | None = None) -> Training:
    """What the GPUs have room for at the target length: settings are tried in the order in which a plan tries them."""
    if not machine.gpus:
        return Training()
    import torch

    from ropewalk.training.mesh_choice import TILE, DoesNotFit
    from ropewalk.training.preflight import Machine, refuse_too_large

    devices = Machine(torch.device("cuda", 0), machine.gpu_bytes, machine.capability)
    # The finest mesh gives a GPU so many tokens.
    tiled = TILE if planned.target_length // machine.gpus > TILE else None
    values = (True, True, tiled, True)
    settings: dict[str, Any] = {}
    refusal: RopewalkError | None = None
    # One process for all dry runs, which is started by the first.
    with announced((context or RunContext()).rank_0_reporter, "all weights, "):
        for name, value in zip(SAVINGS, values, strict=True):
            if value is None:
                continue
            settings[name] = value
            try:
                refuse_too_large(
                    _whole(planned, machine.gpus, settings), devices, machine.gpus, machine.memory_bytes
                )
            except DoesNotFit as error:
                refusal = error
            except RopewalkError:
                # Such as a config that lacks a size; the run itself says what does not fit.
                return Training()
            else:
                # Checkpointing alone is what a recipe has anyway where rows are long.
                return Training(settings=settings if len(settings) > 1 else {})
    tried = f"{', '.join(list(settings)[:-1])} and {list(settings)[-1]}"
    return Training(f"training all weights does not fit on {gpus_of(machine)}, even with {tried} ({refusal})")


def _whole(planned: PlanResult, gpus: int, settings: Mapping[str, Any]) -> Recipe:
    """A recipe that trains all weights at the target length."""
    last = planned.stages[-1]
    # One sequence for each process and step, as in the proposed recipe.
    stage = {
        "context": planned.target_length,
        "steps": 1,
        "rows_per_step": gpus,
        "learning_rate": 1e-5,
        "rope": yaml.safe_load(f"{{method: {last.recipe_method}{last.recipe_parameter}}}"),
        **settings,
    }
    return Recipe.model_validate(
        {
            "model": planned.config.model,
            "output": "-",
            "data": {"sources": [{"path": EMBEDDED}]},
            "stages": [stage],
            "lift": planned.advice.lift,
        }
    )
