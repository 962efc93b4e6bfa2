"""Check a recipe without running it: what it would train, and what is still missing on this machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache

from ropewalk.data.read.embedded import EMBEDDED, resolve_model
from ropewalk.data.read.files import hub_advice
from ropewalk.data.settings import SourceSpec
from ropewalk.data.tokens.tokenise import lacks_tokenizer
from ropewalk.dry_run.facts import (
    document_warnings,
    folder_of,
    gpus_of,
    look_at,
    missing_parts,
    named_machine,
)
from ropewalk.dry_run.settings import HardwareSettings, TrainingMachine
from ropewalk.io.results import Result
from ropewalk.models.config.parameters import count_parameters
from ropewalk.models.config.read import read_config
from ropewalk.parallel import MeshShape, World
from ropewalk.parallel.context import RunContext
from ropewalk.planning.practice import practice_for
from ropewalk.training.memory_need import USABLE
from ropewalk.training.mesh_choice import DoesNotFit
from ropewalk.training.preflight import Machine, announcement, device_bytes, least_bytes, resolve
from ropewalk.training.recipe.recipe import Recipe
from ropewalk.training.resolved import ResolvedRecipe


@dataclass(frozen=True)
class StageOutline:
    """One stage of a recipe, as far as the recipe alone says.

    Attributes:
        context: tokens of a row.
        rope: method, with its base where the recipe gives one.
        pattern: which tokens attend to each other.
        steps: optimizer steps.
        rows_per_step: rows of one step.
        tokens: tokens that the stage trains on, padding included.
        learning_rate: peak learning rate.
    """

    context: int
    rope: str
    pattern: str
    steps: int
    rows_per_step: int
    tokens: int
    learning_rate: float


@dataclass(frozen=True)
class RecipeCheck(Result):
    """Result of a check that found no error.

    Attributes:
        model, output: as in the recipe.
        stages: the stages in order.
        tokens: tokens of all stages.
        resolved: lines that a run would print at its start; None if the model is not on this machine, in which case
            nothing was compared with it, or if no arrangement of the named GPUs has the memory.
        missing: what the run needs and this machine does not have: the model or parts of it, documents, memory.
        ready: whether a run could start: all that is missing, at most the model, can be downloaded by it.
        warnings: why training on the documents would teach little.
    """

    model: str
    output: str
    stages: tuple[StageOutline, ...]
    tokens: int
    resolved: tuple[str, ...] | None
    missing: tuple[str, ...]
    ready: bool
    warnings: tuple[str, ...] = ()


def check(
    recipe: Recipe, machine: TrainingMachine | None = None, context: RunContext | None = None
) -> RecipeCheck:
    """Check a recipe; if its model is on this machine, make all checks that a run makes at its start.

    Without a tokenizer, those that need one are left out. Nothing is downloaded or written.

    Args:
        recipe: recipe to check.
        machine: the machine that trains, whose GPUs are compared with the recipe instead of this machine's.
        context: reporter of progress.

    Raises:
        RopewalkError: for the first error; the message names the key, its value, and what would work.
    """
    stages = tuple(_outlines(recipe))
    here, parts = _is_on_this_machine(recipe.model), missing_parts(recipe.model)
    hardware = None if machine is None else machine.hardware
    found, memory = None, tuple[str, ...]()
    if here:
        try:
            found = _resolved(recipe, hardware)
            memory = tuple(_missing_memory(found, hardware))
        except DoesNotFit as error:
            memory = (f"memory: {error}",)
    model = parts if here else (_missing_model(recipe.model),)
    documents = tuple(_missing_documents(recipe))
    return RecipeCheck(
        recipe.model,
        recipe.output,
        stages,
        sum(stage.tokens for stage in stages),
        None if found is None else tuple(announcement(found)),
        model + memory + documents,
        not (parts or memory or documents) and (here or _may_be_on_the_hub(recipe.model)),
        () if found is None else tuple(_warnings(found, context or RunContext())),
    )


def _resolved(recipe: Recipe, hardware: HardwareSettings | None) -> ResolvedRecipe:
    """The recipe on this machine, or on the GPUs that are named.

    Raises:
        RopewalkError: for the first error.
        DoesNotFit: if no arrangement of the named GPUs has the memory.
    """
    reads = not lacks_tokenizer(folder_of(recipe.model))
    if hardware is None:
        return resolve(recipe, with_tokenizer=reads)
    cluster, ranks = hardware.cluster, hardware.gpus or hardware.gpus_per_node
    world = World(0, ranks, 0, min(ranks, cluster.ranks_per_node))
    gpu = Machine(torch.device("cuda", 0), cluster.bytes_per_rank, cluster.capability)
    return resolve(recipe, world, machine=gpu, with_tokenizer=reads)


def _warnings(resolved: ResolvedRecipe, context: RunContext) -> Iterator[str]:
    """Why the documents of the last stage would teach little; none if they are packed or not all on this machine."""
    recipe = resolved.recipe
    last = recipe.stages[-1]
    data = recipe.data if last.data is None else last.data.over(recipe.data)
    here = [
        source for source in data.sources if _is_embedded(source) or Path(source.path).expanduser().exists()
    ]
    if not last.steps or not here or len(here) < len(data.sources):
        return
    config = read_config(resolved.model, recipe.trust_remote_code)
    practice = practice_for(count_parameters(config), recipe.adapter is not None)
    found = look_at(here, resolved.tokenizer, context)
    yield from document_warnings(found, last.context, practice)
    short = resolved.short_lengths[-1]
    if short is not None and found.longest <= short:
        which = "these documents" if found.complete else f"the first {found.read:,} documents"
        yield (
            f"None of {which} has more than the original {short:,} tokens, so there would be no long rows beside the "
            "short ones."
        )


def _outlines(recipe: Recipe) -> Iterator[StageOutline]:
    for stage in recipe.stages:
        limiting = stage.rope.limiting
        base = getattr(limiting, "rope_theta", None)
        # rope_theta may be auto, whose base depends on the model, which may not be on this machine.
        rope = limiting.method if isinstance(base, str | None) else f"{limiting.method} {base:,.0f}"
        tokens = stage.steps * stage.rows_per_step * stage.context
        yield StageOutline(
            stage.context, rope, stage.pattern, stage.steps, stage.rows_per_step, tokens, stage.learning_rate
        )


def _is_on_this_machine(model: str) -> bool:
    """Whether a model's config can be read without the network: from a folder, or from the Hugging Face cache."""
    if model == EMBEDDED or Path(resolve_model(model)).expanduser().exists():
        return True
    try:
        # A file known to be missing on the Hub is returned as a marker object, not as None.
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except ValueError:
        # The text is no id of the Hub, which loading would refuse by name.
        return False


def _may_be_on_the_hub(model: str) -> bool:
    """Whether a model's name has the form of an id of the Hub."""
    try:
        # It checks the name, and asks no one.
        try_to_load_from_cache(model, "config.json")
    except ValueError:
        return False
    return True


def _missing_model(model: str) -> str:
    nowhere = f"model {model}: neither a folder here nor in the Hugging Face cache"
    if not _may_be_on_the_hub(model):
        return f"{nowhere}, and no name of a model on the Hub"
    return f"{nowhere}; the run would download it. The recipe was not checked against it"


def _missing_memory(resolved: ResolvedRecipe, hardware: HardwareSettings | None) -> Iterator[str]:
    """Stages that do not fit the machine, however its devices share them: by what they need at least."""
    on_gpu = resolved.device.type == "cuda"
    devices, machine = torch.cuda.device_count() if on_gpu else 1, "this machine"
    whose = f"its {devices} GPU{'s' * (devices > 1)}" if on_gpu else "its CPU"
    if hardware is None:
        memory = devices * device_bytes(resolved.device)
    else:
        named = named_machine(hardware)
        devices, machine, whose = named.gpus, "that machine", gpus_of(named)
        memory = devices * named.gpu_bytes
    for number, least in least_bytes(resolved, MeshShape(ring=devices)):
        if devices * least > USABLE * memory:
            yield (
                f"memory for stages.{number}: a step takes {devices * least / 1e9:,.2f} GB or more, but a run on "
                f"{machine} may fill {USABLE * memory / 1e9:,.2f} GB of {whose}; {_others(hardware)}"
            )


def _others(hardware: HardwareSettings | None) -> str:
    asked = "--gpus and --gpu check for another machine, and " if hardware is None else ""
    return f"{asked}ropewalk plan says what others take"


def _missing_documents(recipe: Recipe) -> Iterator[str]:
    named: list[tuple[str, Sequence[SourceSpec], Sequence[str]]] = [
        ("data.sources", recipe.data.sources, ()),
        ("data.validation_sources", recipe.data.validation_sources, ()),
        ("data.rows", (), recipe.data.rows),
    ]
    for at, stage in enumerate(recipe.stages):
        if stage.data is not None:
            named.append((f"stages.{at}.data.sources", stage.data.sources, ()))
            named.append((f"stages.{at}.data.rows", (), stage.data.rows))
    for key, sources, rows in named:
        for number, source in enumerate(sources):
            if _is_a_path(source) and not Path(source.path).expanduser().exists():
                where = f"{key}.{number} {source.path}: not here; give your documents with --set"
                yield f"{where}{hub_advice(source.path)}"
        for number, folder in enumerate(rows):
            if not Path(folder).expanduser().exists():
                yield f"{key}.{number} {folder}: not here; write it with ropewalk data pack"


def _is_a_path(source: SourceSpec) -> bool:
    # Sources on the Hub and embedded ones have no path here; whether the Hub has them is not asked.
    return not source.path.startswith("hf:") and not _is_embedded(source)


def _is_embedded(source: SourceSpec) -> bool:
    return source.path.partition(":")[0] == EMBEDDED
