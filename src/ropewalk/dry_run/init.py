"""Propose a recipe after a look at the model, the documents and this machine: every line with the reason for it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ropewalk.attention.engines.capabilities import LEAST_CAPABILITY, Capability
from ropewalk.data import load_tokenizer, read_documents
from ropewalk.data.read.embedded import EMBEDDED, resolve_model
from ropewalk.data.read.first_lengths import first_lengths
from ropewalk.data.read.records import NoTextFieldError
from ropewalk.data.settings import SourceSpec
from ropewalk.dry_run.check import check
from ropewalk.dry_run.settings import Gpu
from ropewalk.errors import RopewalkError
from ropewalk.io.files import write_text
from ropewalk.io.lengths import format_length
from ropewalk.io.results import Result
from ropewalk.io.settings import (
    COMMON,
    DOCUMENTS,
    MODEL_NAME,
    TARGET_LENGTH,
    FilePath,
    Length,
    Option,
    Settings,
)
from ropewalk.models.config.parameters import count_parameters
from ropewalk.parallel.context import RunContext
from ropewalk.planning import PlanSettings, plan
from ropewalk.planning.rules import CONTEXT_BOUND
from ropewalk.planning.run import PlanResult
from ropewalk.planning.settings import RULE
from ropewalk.planning.sizing.model_shape import STATE_BYTES
from ropewalk.planning.sizing.time import GPUS
from ropewalk.recipes import SCHEMA_LINE
from ropewalk.training.recipe.file import parse_recipe
from ropewalk.training.recipe.recipe import Recipe

TEXT_FIELDS = ("text", "content", "document", "body", "raw_content")
"""Usual names of the field with the text; the first is taken wherever a record has it."""
STEP_TOKENS = 2**19
"""Tokens of a step, as in the training of AnchorAttention and of most models: half a million."""
MOST_STEPS = 1000
FEWEST_STEPS = 20
"""Steps below which a step is made smaller rather than their number."""
KEPT = 0.9
"""Share of the tokens that is planned for: some are held out for evaluation, and rows leave remainders."""


class InitSettings(Settings):
    """Settings of ``ropewalk init``."""

    model: Annotated[str, Option(argument=True)] = Field(description=f"{MODEL_NAME}.")
    documents: Annotated[tuple[str, ...], Option(metavar="PATH", repeated=True, group=COMMON.group)] = Field(
        min_length=1,
        description=f"Documents to train on: {DOCUMENTS}.",
    )
    target: Annotated[Length, COMMON] = Field(description=TARGET_LENGTH)
    out: Annotated[FilePath, COMMON] = Field(
        default=Path("recipe.yaml"), description="File to write the recipe to. It must not exist yet."
    )
    text_field: str | None = Field(
        default=None,
        description="Record field that holds the text. Default: text if the records have it, otherwise content, "
        "document, body or raw_content if they have only one of these.",
    )
    rule: str | None = Field(default=None, description=RULE)
    gpus: Annotated[int | None, Option(group="The machine that trains")] = Field(
        default=None,
        ge=1,
        description="Number of its GPUs. Default: 8 with --gpu or --memory-gb, otherwise those of this machine.",
    )
    gpu: Annotated[Gpu | None, Option(group="The machine that trains")] = Field(
        default=None,
        description="Its GPU model. Default: h100 with --gpus or --memory-gb, otherwise that of this machine.",
    )
    memory_gb: Annotated[float | None, Option(group="The machine that trains")] = Field(
        default=None,
        gt=0,
        description="Memory of each GPU in GB (10^9 bytes). Default: the memory in its data sheet.",
    )

    @property
    def for_another_machine(self) -> bool:
        """Whether the recipe is for GPUs that are named instead of those of this machine."""
        return any(value is not None for value in (self.gpus, self.gpu, self.memory_gb))


@dataclass(frozen=True)
class DocumentFacts:
    """What was seen of the documents.

    Attributes:
        read: documents read.
        complete: whether these are all.
        tokens: their tokens, estimated from some of them.
        longest: tokens of the longest of those read, estimated likewise.
    """

    read: int
    complete: bool
    tokens: int
    longest: int


@dataclass(frozen=True)
class MachineFacts:
    """The machine that the recipe is for.

    Attributes:
        cores: CPU cores of the one that it was written on.
        gpus: CUDA devices; 0 on a machine without.
        gpu_bytes: memory of one of them, bytes.
        memory_bytes: memory of the machine itself, bytes.
        named: GPU model, if it was named; None for this machine.
        capability: compute capability of the GPUs.
    """

    cores: int
    gpus: int
    gpu_bytes: int
    memory_bytes: int
    named: str | None = None
    capability: Capability = LEAST_CAPABILITY


@dataclass(frozen=True)
class Proposal(Result):
    """A recipe that was written.

    Attributes:
        out: the file.
        documents: what was seen of the documents.
        machine: the machine that it is for.
        adapter: why the recipe trains an adapter; None if it trains the whole model.
        text: the recipe.
        warnings: why a run of it here would teach little, or would not end; they are in the recipe too.
    """

    out: Path
    documents: DocumentFacts
    machine: MachineFacts
    adapter: str | None
    text: str
    warnings: tuple[str, ...] = ()


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
    specs = [_with_text_field(path, settings.text_field) for path in settings.documents]
    documents = look_at(
        specs, load_tokenizer(str(resolve_model(settings.model)), planned.config.vocab_size), context
    )
    machine = named_machine(settings) if settings.for_another_machine else this_machine()
    adapter = reason_for_adapter(planned, machine)
    text = recipe_of(settings, planned, documents, machine, adapter, specs)
    # A recipe that would be refused must not be written.
    check(parse_recipe(text, str(out)))
    write_text(out, text)
    warnings = (*_short_documents(documents, planned.target_length), *_no_gpu(planned, machine))
    return Proposal(out, documents, machine, adapter, text, warnings)


def _with_text_field(path: str, given: str | None) -> SourceSpec:
    """The source with the text field that its first document has.

    Raises:
        RopewalkError: if the source cannot be read, or no usual name or several are fields of its first record.
    """
    found: list[SourceSpec] = []
    refused: NoTextFieldError | None = None
    for name in (given,) if given else TEXT_FIELDS:
        spec = SourceSpec(path=path, text_field=name)
        try:
            next(iter(read_documents([spec])), None)
        except NoTextFieldError as error:
            refused = refused or error
            continue
        # A file without fields is read whatever the name.
        if name == TEXT_FIELDS[0] or given:
            return spec
        found.append(spec)
    if len(found) == 1:
        return found[0]
    several = f" (probably {' or '.join(repr(each.text_field) for each in found)})" if found else ""
    raise RopewalkError(f"{refused}{several}") from refused


def look_at(specs: Sequence[SourceSpec], tokenizer: Any, context: RunContext) -> DocumentFacts:
    """Read the first documents, and count the tokens of some of these.

    Raises:
        RopewalkError: as for :func:`ropewalk.data.read_documents`.
    """
    lengths, complete = first_lengths(specs, tokenizer, context)
    return DocumentFacts(len(lengths), complete, int(sum(lengths)), int(max(lengths, default=0)))


def this_machine() -> MachineFacts:
    """Cores and GPUs of this machine."""
    import torch

    from ropewalk.training.preflight import device_bytes

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0
    return MachineFacts(os.cpu_count() or 1, gpus, int(memory), device_bytes(torch.device("cpu")))


def named_machine(settings: InitSettings) -> MachineFacts:
    """The machine that the settings name, with what data sheets say of its GPUs."""
    name = settings.gpu or "h100"
    known = GPUS[name]
    memory = known.bytes_per_rank if settings.memory_gb is None else int(settings.memory_gb * 1e9)
    return MachineFacts(
        os.cpu_count() or 1,
        settings.gpus or known.ranks_per_node,
        memory,
        known.host_bytes,
        name,
        known.capability,
    )


def _no_gpu(planned: PlanResult, machine: MachineFacts) -> list[str]:
    """A warning if this machine has no GPU; the recipe is for another one if the training does not even fit."""
    if machine.gpus:
        return []
    slow = [
        "This machine has no GPU, so a run here would train on its CPU; ropewalk plan says what GPUs would take."
    ]
    needed = (count_parameters(planned.config) or 0) * STATE_BYTES
    if needed <= machine.memory_bytes:
        return slow
    return [
        f"Not for this machine: it has no GPU and {machine.memory_bytes / 1e9:,.1f} GB of memory, but all weights "
        f"with their gradients and moments take {needed / 1e9:,.1f} GB.",
    ]


def reason_for_adapter(planned: PlanResult, machine: MachineFacts) -> str | None:
    """Why the GPUs hold only an adapter's training; None if they hold the model's, or cannot be asked."""
    if not machine.gpus:
        return None
    import torch

    from ropewalk.training.mesh_choice import DoesNotFit
    from ropewalk.training.preflight import Machine, refuse_too_large

    # One sequence for each process and step, as in the proposed recipe.
    last = {
        "context": planned.target_length,
        "steps": 1,
        "rows_per_step": machine.gpus,
        "learning_rate": 1e-5,
    }
    whole = {
        "model": planned.config.model,
        "output": "-",
        "data": {"sources": [{"path": EMBEDDED}]},
        "stages": [last | {"gradient_checkpointing": True}],
    }
    try:
        refuse_too_large(
            Recipe.model_validate(whole),
            Machine(torch.device("cuda", 0), machine.gpu_bytes, machine.capability),
            machine.gpus,
        )
    except DoesNotFit as error:
        return f"training all weights does not fit on {gpus_of(machine)} ({error})"
    except RopewalkError:
        # Such as a config that lacks a size; the run itself says what does not fit.
        return None
    return None


def gpus_of(machine: MachineFacts) -> str:
    """The GPUs in words: ``8 GPUs of this machine``, ``8 GPUs (h100)``."""
    count = f"{machine.gpus} GPU{'s' * (machine.gpus != 1)}"
    return f"{count} of this machine" if machine.named is None else f"{count} ({machine.named})"


def next_commands(settings: InitSettings, machine: MachineFacts) -> str:
    """What to run after the recipe is written."""
    several = f"torchrun --nproc-per-node {machine.gpus} -m " if machine.gpus > 1 else ""
    first = f"ropewalk recipe check {settings.out}"
    if machine.named is not None:
        first = f"ropewalk plan {settings.out} --gpus {machine.gpus} --gpu {machine.named}"
        if settings.memory_gb is not None:
            first += f" --memory-gb {settings.memory_gb:g}"
    return f"{first}, then {several}ropewalk extend {settings.out}"


def recipe_of(
    settings: InitSettings,
    planned: PlanResult,
    documents: DocumentFacts,
    machine: MachineFacts,
    adapter: str | None,
    sources: Sequence[SourceSpec] | None = None,
) -> str:
    """The recipe as YAML with comments; a pure function.

    Args:
        settings: what was asked for.
        planned: the plan of RoPE and stages.
        documents: what was seen of them.
        machine: this machine.
        adapter: why an adapter is trained, or None.
        sources: the documents with their text fields; None for the settings' own.

    Raises:
        RopewalkError: if the documents do not fill a row of the last stage.
    """
    trained, target = planned.config.trained_length, planned.target_length
    if sources is None:
        field = settings.text_field or TEXT_FIELDS[0]
        sources = [SourceSpec(path=path, text_field=field) for path in settings.documents]
    # An equal share for every stage: together they read as many tokens as the documents have.
    usable = int(KEPT * documents.tokens) // len(planned.stages)
    if usable < target:
        raise RopewalkError(
            f"the documents have about {documents.tokens:,} tokens, too few for a row of {target:,} tokens in each "
            "stage; give more documents with --documents"
        )
    seen = f"{documents.read:,} documents" + ("" if documents.complete else " and more")
    name = f"{Path(settings.model).name.replace(':', '-')}-{format_length(target)}"
    lines = [
        SCHEMA_LINE.rstrip(),
        f"# {settings.model}, from {trained:,} to {target:,} tokens. Written by ropewalk init; change what you like.",
        f"# Next: {next_commands(settings, machine)}",
        *([] if machine.named is None else [f"# For {gpus_of(machine)} of {machine.gpu_bytes / 1e9:g} GB."]),
        *(f"# Note: {note}." for note in planned.config.documented_notes),
        *(f"# {line}" for line in _no_gpu(planned, machine)),
        f"model: {_quoted(settings.model)}",
        f"output: {_quoted(f'runs/{name}')}  # a new folder; a run that was stopped goes on with --resume",
        "data:",
        f"  # {seen} with about {documents.tokens:,} tokens; the longest of these has about {documents.longest:,}.",
        *(
            []
            if documents.complete
            else [
                f"  # Only these were counted: raise steps below for more than {documents.tokens:,} tokens."
            ]
        ),
        *(f"  # {line}" for line in _short_documents(documents, target)),
        "  sources:",
        *(
            f"    - {{path: {_quoted(each.path)}, text_field: {_quoted(each.text_field)}}}"
            for each in sources
        ),
        f"  validation_documents: {min(256, documents.read // 10)}  # held out of training, for perplexity",
        f"  workers: {machine.cores}  # processes that tokenise: the cores of this machine",
    ]
    if planned.advice.lift:
        lines += [
            "# These limits keep the model's attention from reaching the target length; the run removes them.",
            f"lift: [{', '.join(planned.advice.lift)}]",
        ]
    lines.append("stages:")
    if any("context bound" in stage.reason for stage in planned.stages):
        lines.append(f"  # {CONTEXT_BOUND[0].upper()}{CONTEXT_BOUND[1:]}.")
    for stage in planned.stages:
        rows, steps = _budget(usable, stage.context)
        share = rows * steps * stage.context / max(1, usable)
        parameter, checkpointing = stage.recipe_parameter, str(stage.context >= 4096).lower()
        lines += [
            f"  # {stage.reason}.",
            f"  - context: {format_length(stage.context)}",
            f"    rope: {{method: {stage.recipe_method}{parameter}}}",
            "    pattern: anchor  # documents see themselves and one first token, not each other (arXiv:2411.13476)",
            f"    steps: {steps}  # with {rows} rows a step, {share:.0%} of the tokens that are planned for this stage",
            f"    rows_per_step: {rows}  # {rows * stage.context:,} tokens a step",
            f"    learning_rate: {2e-4 if adapter else 2e-5}  # {_RATE[adapter is not None]}",
            f"    warmup_steps: {min(20, steps // 5)}",
            "    schedule: constant",
            f"    gradient_checkpointing: {checkpointing}  # true: less memory for a third more time",
        ]
    if adapter:
        lines += [
            f"# An adapter: {adapter}.",
            "adapter: {method: lora, rank: 16, alpha: 32.0, targets: [attention], also_train: [embeddings, norms]}",
        ]
    lines += [
        "precision: auto  # bfloat16 with RoPE angles in float64 on a GPU, float32 on a CPU",
        "parallel: auto  # chosen for the processes that the run is started with",
        f"checkpoints: {{every: {max(1, _budget(usable, target)[1] // 5)}, keep: 2}}",
        "# Measured before and after, at the trained length too: an extension should not cost what the model could do.",
        "evaluation:",
        "  suites: [perplexity, passkey]",
        f"  lengths: [{trained}, {target}]",
        "  samples: 20",
    ]
    return "\n".join(lines) + "\n"


_RATE = {
    False: "as for AnchorAttention and LongLoRA: small, because the model is trained already",
    True: "ten times that of full training, as usual for adapters",
}


def _quoted(text: str) -> str:
    """A string as YAML reads it; JSON's escapes of characters beyond U+FFFF are no YAML."""
    return json.dumps(text, ensure_ascii=False)


def _short_documents(documents: DocumentFacts, target: int) -> list[str]:
    """A warning if no document is as long as what the model is to learn to read."""
    if documents.longest >= target:
        return []
    which = "these documents" if documents.complete else f"the first {documents.read:,} documents"
    return [
        f"None of {which} reaches {target:,} tokens (the longest has about {documents.longest:,}), so the model will "
        "see no dependencies as long as the target.",
    ]


def _budget(tokens: int, context: int) -> tuple[int, int]:
    """Rows of a step and number of steps for so many tokens."""
    rows = max(1, min(STEP_TOKENS // context, tokens // (FEWEST_STEPS * context)))
    # A power of two can be shared among any usual number of GPUs.
    rows = 1 << (rows.bit_length() - 1)
    return rows, max(1, min(MOST_STEPS, tokens // (rows * context)))
