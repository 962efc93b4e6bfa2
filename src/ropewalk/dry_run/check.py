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
from ropewalk.dry_run.facts import folder_of, missing_parts
from ropewalk.io.results import Result
from ropewalk.parallel import MeshShape
from ropewalk.training.memory_need import USABLE
from ropewalk.training.preflight import announcement, device_bytes, least_bytes, resolve
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
            nothing was compared with it.
        missing: what the run needs and this machine does not have: the model or parts of it, documents, memory.
        ready: whether a run could start here: all that is missing, at most the model, can be downloaded by it.
    """

    model: str
    output: str
    stages: tuple[StageOutline, ...]
    tokens: int
    resolved: tuple[str, ...] | None
    missing: tuple[str, ...]
    ready: bool


def check(recipe: Recipe) -> RecipeCheck:
    """Check a recipe; if its model is on this machine, make all checks that a run makes at its start.

    Without a tokenizer, those that need one are left out. Nothing is downloaded or written.

    Raises:
        RopewalkError: for the first error; the message names the key, its value, and what would work.
    """
    stages = tuple(_outlines(recipe))
    found, parts = None, missing_parts(recipe.model)
    if _is_on_this_machine(recipe.model):
        found = resolve(recipe, with_tokenizer=not lacks_tokenizer(folder_of(recipe.model)))
    model = (_missing_model(recipe.model),) if found is None else parts
    memory = () if found is None else tuple(_missing_memory(found))
    documents = tuple(_missing_documents(recipe))
    return RecipeCheck(
        recipe.model,
        recipe.output,
        stages,
        sum(stage.tokens for stage in stages),
        None if found is None else tuple(announcement(found)),
        model + memory + documents,
        not (parts or memory or documents) and (found is not None or _may_be_on_the_hub(recipe.model)),
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


def _missing_memory(resolved: ResolvedRecipe) -> Iterator[str]:
    """Stages that do not fit this machine, however its devices share them: by what they need at least."""
    on_gpu = resolved.device.type == "cuda"
    devices = torch.cuda.device_count() if on_gpu else 1
    memory = devices * device_bytes(resolved.device)
    whose = f"its {devices} GPU{'s' * (devices > 1)}" if on_gpu else "its CPU"
    for number, least in least_bytes(resolved, MeshShape(ring=devices)):
        if devices * least > USABLE * memory:
            yield (
                f"memory for stages.{number}: a step takes {devices * least / 1e9:,.2f} GB or more, but a run on this "
                f"machine may fill {USABLE * memory / 1e9:,.2f} GB of {whose}; ropewalk plan says what others take"
            )


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
    return not source.path.startswith("hf:") and source.path.partition(":")[0] != EMBEDDED
