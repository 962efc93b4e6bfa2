"""The text of a proposed recipe: every line with the reason for it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ropewalk.data.settings import SourceSpec
from ropewalk.data.tokens.special_ids import Doubt, TokenUse
from ropewalk.dry_run.facts import DocumentFacts, MachineFacts, document_warnings, gpus_of
from ropewalk.dry_run.run import SAVINGS
from ropewalk.dry_run.settings import InitSettings
from ropewalk.errors import RopewalkError
from ropewalk.io.lengths import counted, format_length
from ropewalk.models.config.parameters import count_parameters
from ropewalk.planning.practice import Practice
from ropewalk.planning.rules import CONTEXT_BOUND
from ropewalk.planning.run import PlanResult
from ropewalk.planning.sizing.model_shape import STATE_BYTES
from ropewalk.recipes import SCHEMA_LINE

STEP_TOKENS = 2**19
"""Tokens of a step, as in the training of AnchorAttention and of most models: half a million."""
MOST_STEPS = 2000
"""Steps of a stage at most, as in the training of AnchorAttention."""
FEWEST_STEPS = 20
"""Steps below which a step is made smaller rather than their number."""
KEPT = 0.9
"""Share of the tokens that is planned for: some are held out for evaluation, and rows leave remainders."""
CHECKPOINTED_FROM = 4096
"""Tokens of a row from which layers are checkpointed where no dry run says that they need not be."""
PLACE_OF_DOCUMENTS = "documents"
"""Source that stands in a recipe without documents."""
CHOSEN = {**SAVINGS, "keep_attention": "results of attention are computed again"}
"""Settings of a stage that a dry run may choose, with what they do."""


@dataclass(frozen=True)
class StageChoice:
    """What a dry run of a stage has chosen.

    Attributes:
        settings: values of some of :data:`CHOSEN`.
        words: what the stage takes with them, in one sentence without its full stop.
        fits: whether it fits on the machine.
    """

    settings: Mapping[str, Any]
    words: str
    fits: bool = True


@dataclass(frozen=True)
class Draft:
    """A proposed recipe.

    Attributes:
        settings: what was asked for.
        planned: the plan of RoPE and stages.
        machine: the machine that trains.
        practice: learning rate and tokens of published runs.
        documents: what was seen of the documents; None if there are none.
        sources: the documents with their text fields.
        adapter: why an adapter is trained; None if the whole model is.
        savings: settings of every stage that save memory, until a dry run of it says that it can do without.
        missing: what a run needs and is not here, apart from documents.
        choices: what dry runs have chosen, by the index of the stage.
        tokens: the tokens that packing adds to documents; none without a tokenizer.
        doubts: those of the tokenizer that probably do not belong to documents.
        remarks: which folders hold what could be several sources.
    """

    settings: InitSettings
    planned: PlanResult
    machine: MachineFacts
    practice: Practice
    documents: DocumentFacts | None = None
    sources: Sequence[SourceSpec] = ()
    adapter: str | None = None
    missing: tuple[str, ...] = ()
    choices: Mapping[int, StageChoice] = field(default_factory=dict)
    tokens: tuple[TokenUse, ...] = ()
    doubts: tuple[Doubt, ...] = ()
    remarks: tuple[str, ...] = ()
    savings: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model; 0 if its config lacks a size."""
        return count_parameters(self.planned.config) or 0

    @cached_property
    def usable(self) -> int:
        """Tokens of each stage; together the stages read as many tokens as the documents have.

        Raises:
            RopewalkError: if the documents do not fill a row of the last stage.
        """
        stages, target = len(self.planned.stages), self.planned.target_length
        if self.documents is None:
            return MOST_STEPS * STEP_TOKENS
        tokens = int(KEPT * self.documents.tokens)
        if tokens // stages < target:
            raise RopewalkError(
                f"the documents have about {self.documents.tokens:,} tokens, too few for a row of {target:,} tokens in "
                "each stage; give more documents with --documents"
            )
        return tokens // stages

    @property
    def all_missing(self) -> tuple[str, ...]:
        """What a run needs and is not here."""
        if self.documents is not None:
            return self.missing
        return (
            *self.missing,
            f"documents: put them into {PLACE_OF_DOCUMENTS}/, or name others under sources",
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Why a run of the recipe would teach little, or would not end."""
        return (*self._of_documents(), *map(str, self.doubts), *self._no_gpu(), *self._too_large())

    @property
    def steps(self) -> tuple[str, ...]:
        """Where the steps of each stage come from, and what to write if the documents are only samples."""
        return tuple(self._steps(number) for number in range(len(self.planned.stages)))

    def _steps(self, number: int) -> str:
        context = self.planned.stages[number].context
        rows, steps = _budget(self.usable, context)
        taken = f"{steps:,} step{'s' * (steps != 1)} of {rows * context:,} tokens"
        found, practice = self.documents, self.practice
        if found is None:
            return f"{taken}, as no documents were named"
        if found.tokens >= practice.least_tokens:
            return f"{taken}, from the tokens of the documents found"
        stages = len(self.planned.stages)
        usual, _ = _budget(practice.most_tokens // stages, context)
        least, most = (
            max(1, tokens // (stages * usual * context))
            for tokens in (practice.least_tokens, practice.most_tokens)
        )
        return (
            f"{taken}, from the tokens of the documents found; if these are only samples, the tokens of "
            f"published runs would be rows_per_step: {usual} and steps: {least} to {most}"
        )

    @property
    def next_commands(self) -> str:
        """What to run after the recipe is written."""
        settings, machine = self.settings, self.machine
        several = f"torchrun --nproc-per-node {machine.gpus} -m " if machine.gpus > 1 else ""
        first = f"ropewalk recipe check {settings.out}"
        if machine.named is not None:
            first = f"ropewalk plan {settings.out} --gpus {machine.gpus} --gpu {machine.named}"
            if settings.memory_gb is not None:
                first += f" --memory-gb {settings.memory_gb:g}"
        add = "add what is missing, and then " if self.all_missing else ""
        return f"{first}, then {add}{several}ropewalk extend {settings.out}"

    def text(self) -> str:
        """The recipe as YAML with comments; a pure function of the attributes.

        Raises:
            RopewalkError: if the documents do not fill a row of the last stage.
        """
        return "\n".join([*self._head(), *self._data(), *self._stages(), *self._rest()]) + "\n"

    def _head(self) -> Iterator[str]:
        planned, machine, settings = self.planned, self.machine, self.settings
        trained, target = planned.config.trained_length, planned.target_length
        yield SCHEMA_LINE.rstrip()
        yield (
            f"# {settings.model}, from {trained:,} to {target:,} tokens. Written by ropewalk init; change what you "
            "like."
        )
        yield f"# Next: {self.next_commands}"
        yield from (f"# Missing: {each}." for each in self.all_missing)
        if machine.named is not None:
            yield f"# For {gpus_of(machine)} of {machine.gpu_bytes / 1e9:g} GB."
        yield from (f"# Note: {note}." for note in planned.config.documented_notes)
        yield from (f"# {line}" for line in (*self._no_gpu(), *self._too_large()))
        name = f"{Path(settings.model).name.replace(':', '-')}-{format_length(target)}"
        yield f"model: {_quoted(settings.model)}"
        yield f"output: {_quoted(f'runs/{name}')}  # a new folder; a run that was stopped goes on with --resume"

    def _data(self) -> Iterator[str]:
        yield "data:"
        found, sources = self.documents, self.sources
        if found is None:
            yield f"  # No documents were named: the steps below are {MOST_STEPS:,} a stage, as AnchorAttention took."
            sources = (SourceSpec(path=PLACE_OF_DOCUMENTS),)
        else:
            seen = f"{found.read:,} documents" + ("" if found.complete else " and more")
            counted = " (by characters, without a tokenizer)" if self._without_tokenizer else ""
            yield (
                f"  # {seen} with about {found.tokens:,} tokens{counted}; the longest of these has about "
                f"{found.longest:,}."
            )
            if not found.complete:
                yield (
                    f"  # Only these were counted: raise steps below for more than {found.tokens:,} tokens."
                )
        yield from (f"  # {line}" for line in self._of_documents())
        yield from (f"  # {line}." for line in self.remarks)
        yield "  sources:"
        for each in sources:
            yield f"    - {{path: {_quoted(each.path)}, text_field: {_quoted(each.text_field)}}}"
        held_out = 256 if found is None else min(256, found.read // 10)
        yield f"  validation_documents: {held_out}  # held out of training, for perplexity"
        if self.tokens:
            yield f"  # Tokens added to documents: {', '.join(map(str, self.tokens))}."
        for doubt in self.doubts:
            yield f"  # Doubtful: {doubt}."
            yield f"  # {doubt.setting}: {_quoted(doubt.likely)}"
        yield f"  workers: {self.machine.cores}  # processes that tokenise: the cores of this machine"

    @property
    def _without_tokenizer(self) -> bool:
        return any(each.startswith("a tokenizer") for each in self.missing)

    def _stages(self) -> Iterator[str]:
        planned = self.planned
        if planned.advice.lift:
            yield (
                "# These limits keep the model's attention from reaching the target length; the run removes them."
            )
            yield f"lift: [{', '.join(planned.advice.lift)}]"
        yield "stages:"
        if any("context bound" in stage.reason for stage in planned.stages):
            yield f"  # {CONTEXT_BOUND[0].upper()}{CONTEXT_BOUND[1:]}."
        yield f"  # Learning rate: {self.practice.reason}."
        for number, stage in enumerate(planned.stages):
            rows, steps = _budget(self.usable, stage.context)
            share = rows * steps * stage.context / max(1, self.usable)
            choice = self.choices.get(number)
            yield f"  # {stage.reason}."
            if choice is not None:
                yield f"  # {choice.words}."
            yield f"  # Steps: {self._steps(number)}."
            yield f"  - context: {format_length(stage.context)}"
            yield f"    rope: {{method: {stage.recipe_method}{stage.recipe_parameter}}}"
            yield (
                "    pattern: anchor  # documents see themselves and one first token, not each other (arXiv:2411.13476)"
            )
            yield (
                f"    steps: {steps}  # with {counted(rows, 'row')} a step, {share:.0%} of the tokens that are planned "
                "for this stage"
            )
            yield f"    rows_per_step: {rows}  # {rows * stage.context:,} tokens a step"
            yield f"    learning_rate: {self.practice.learning_rate:g}"
            yield f"    warmup_steps: {min(20, steps // 5)}  # a new optimizer knows no moments yet"
            yield "    schedule: constant  # so that a later stage can go on from here"
            settings = {"gradient_checkpointing": stage.context >= CHECKPOINTED_FROM, **self.savings}
            for key, value in {**settings, **({} if choice is None else choice.settings)}.items():
                if value or key in ("gradient_checkpointing", "keep_attention"):
                    yield f"    {key}: {str(value).lower()}  # {CHOSEN[key]}"

    def _rest(self) -> Iterator[str]:
        trained, target = self.planned.config.trained_length, self.planned.target_length
        if self.adapter:
            yield f"# An adapter: {self.adapter}."
            yield (
                "adapter: {method: lora, rank: 16, alpha: 32.0, targets: [attention], also_train: [embeddings, norms]}"
            )
        yield "precision: auto  # bfloat16 with RoPE angles in float64 on a GPU, float32 on a CPU"
        yield "parallel: auto  # chosen for the processes that the run is started with"
        every = max(1, _budget(self.usable, target)[1] // 5)
        yield f"checkpoints: {{every: {every}, keep: 2}}  # five in the last stage, of which two stay"
        yield (
            "# Measured before and after, at the trained length too: an extension should not cost what the model could "
            "do."
        )
        yield "evaluation:"
        yield "  suites: [perplexity, passkey]"
        yield f"  lengths: [{trained}, {target}]"
        yield "  samples: 20  # of passkeys at each length and depth"

    # What is doubtful.

    def _of_documents(self) -> Iterator[str]:
        """Warnings that the documents are short or few."""
        return document_warnings(self.documents, self.planned.target_length, self.practice)

    def _no_gpu(self) -> Iterator[str]:
        """A warning if this machine has no GPU; the recipe is for another one if the training does not even fit."""
        machine = self.machine
        if machine.gpus:
            return
        needed = self.parameters * STATE_BYTES
        if needed <= machine.memory_bytes:
            yield (
                "This machine has no GPU, so a run here would train on its CPU; ropewalk plan says what GPUs would "
                "take."
            )
            return
        yield (
            f"Not for this machine: it has no GPU and {machine.memory_bytes / 1e9:,.1f} GB of memory, but all weights "
            f"with their gradients and moments take {needed / 1e9:,.1f} GB."
        )

    def _too_large(self) -> Iterator[str]:
        """A warning for each stage that does not fit whatever saves memory."""
        for number, choice in self.choices.items():
            if not choice.fits:
                yield f"Stage {number + 1} does not fit: {choice.words}."


def _quoted(text: str) -> str:
    """A string as YAML reads it; JSON's escapes of characters beyond U+FFFF are no YAML."""
    return json.dumps(text, ensure_ascii=False)


def _budget(tokens: int, context: int) -> tuple[int, int]:
    """Rows of a step and number of steps for so many tokens."""
    rows = max(1, min(STEP_TOKENS // context, tokens // (FEWEST_STEPS * context)))
    # A power of two can be shared among any usual number of GPUs.
    rows = 1 << (rows.bit_length() - 1)
    return rows, max(1, min(MOST_STEPS, tokens // (rows * context)))
