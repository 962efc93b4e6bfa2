"""How the recipe of a resumed run differs from that of the run so far, and which changes would come too late.

Whether a change fits what was computed so far is a question to the run's steps, which compare what decides them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import Free, free_mark, model_in
from ropewalk.training.recipe.recipe import Recipe, Stage

Key = tuple[str | int, ...]
"""Path of a value in a recipe, such as ``("stages", 0, "steps")``."""

_LONGEST = 60


@dataclass(frozen=True)
class Progress:
    """Progress of a run, as far as it decides which keys may change.

    Attributes:
        stage: index of the current stage, counted from 0.
        step: completed steps of that stage.
        begun: number of stages whose RoPE is decided; later stages may still change completely.
    """

    stage: int = 0
    step: int = 0
    begun: int = 0


@dataclass(frozen=True)
class Change:
    """A key of the recipe that had another value before the run was resumed; a line of the run's history.

    Attributes:
        key: name of the key, such as ``stages.0.steps``.
        old, new: JSON values.
        stage, step: the new value holds for the steps after ``step`` of ``stage``, which is counted from 0 as in keys.
    """

    key: str
    old: Any
    new: Any
    stage: int
    step: int


def changes(old: Recipe, new: Recipe, progress: Progress) -> list[Change]:
    """Compare the recipe of a run with the recipe given with ``--resume``.

    Args:
        old: recipe of the run so far.
        new: recipe given with ``--resume``.
        progress: progress of the run.

    Returns:
        The changes to tell and to remember: those of all keys but the free ones that decide nothing to come.

    Raises:
        RopewalkError: for a change that comes too late to have an effect, with the reason.
    """
    found: list[Change] = []
    late: list[str] = []
    for number in range(len(new.stages), min(progress.begun, len(old.stages))):
        late.append(f"stages (stage {number + 1} has started, but the new recipe has no stage {number + 1})")
    for key, was, is_ in _all_differences(old, new):
        mark = _mark(key)
        if mark is not None and not mark.told:
            continue
        begun = key[0] != "stages" or int(key[1]) < progress.begun
        if mark is not None and begun and (reason := _too_late(key, old, new, progress)) is not None:
            late.append(f"{_name(key)} {_told(was)} -> {_told(is_)} ({reason})")
        found.append(Change(_name(key), was, is_, progress.stage, progress.step))
    if late:
        raise RopewalkError(
            f"--resume cannot change these keys of the recipe: {', '.join(late[:3])}; restore the old values, or "
            "start a new run in another output folder"
        )
    return found


def sentences(found: Sequence[Change], old: Recipe, new: Recipe) -> list[str]:
    """Sentences for the user on what changes from which step; none if nothing changes."""
    if not found:
        return []
    stage, step = found[0].stage, found[0].step
    changed = [f"{each.key} {_told(each.old)} -> {_told(each.new)}" for each in found]
    notes = [f"the recipe changes after step {step} of stage {stage + 1}: {'; '.join(changed)}"]
    if stage < min(len(old.stages), len(new.stages)):
        notes.extend(_rates(stage, old.stages[stage], new.stages[stage], step))
    return notes


def refuse_lost_tables(old: Recipe, new: Recipe, begun: int) -> None:
    """Raise if a stage has begun with the factors of a file that the new recipe does not name (``--rope``).

    The factors themselves are compared elsewhere; this message says which file is meant.

    Args:
        old, new: recipes of the run so far and of today.
        begun: number of stages whose RoPE is decided.
    """
    for number, (was, is_) in enumerate(zip(old.stages[:begun], new.stages, strict=False)):
        files = [each.rope.limiting.factors for each in (was, is_)]
        if files[0] != files[1] and not all(files):
            key = "rope.full_attention.factors" if was.rope.by_layer_type else "rope.factors"
            before, now = (file or "none" for file in files)
            raise RopewalkError(
                f"the run started with stages.{number}.{key} {before}, but the recipe has {now}; restore the old value"
            )


def _too_late(key: Key, old: Recipe, new: Recipe, progress: Progress) -> str | None:
    """Reason why a key that applies from now on can no longer change; None if it can."""
    if key[0] != "stages":
        return None
    number = int(key[1])
    was, steps = old.stages[number].steps, new.stages[number].steps
    if number < progress.stage:
        return f"stage {number + 1} is done"
    if number > progress.stage:
        return None
    if key[2] == "steps":
        if not was:
            return f"stage {number + 1} has no training, so add another stage instead"
        return f"{progress.step} steps of stage {number + 1} are done" if steps < progress.step else None
    if steps <= progress.step:
        return f"all steps of stage {number + 1} are done, so the change has no effect unless you raise steps as well"
    return None


def _rates(number: int, old: Stage, new: Stage, step: int) -> list[str]:
    """Sentence on how the learning rate changes after ``step`` steps of a stage; none if it does not change."""
    # Imported here, because it needs torch, and reading the folder of a run does not.
    from ropewalk.training.update.optimizer import learning_rate_at

    # A decaying schedule is undefined after its last step.
    has_rate = old.steps if old.schedule != "constant" else new.steps
    if all(
        at < has_rate and learning_rate_at(at, old) == learning_rate_at(at, new)
        for at in range(step, new.steps)
    ):
        return []
    before = f"{learning_rate_at(step - 1, old):.3g} in step {step}, and " if step else ""
    instead = f" instead of {learning_rate_at(step, old):.3g}" if step < has_rate else ""
    now = f"{learning_rate_at(step, new):.3g}"
    return [
        f"the learning rate of stage {number + 1} is {before}{now} in step {step + 1}{instead}; "
        f"{new.schedule}, it is {learning_rate_at(new.steps - 1, new):.3g} in the last step, {new.steps}"
    ]


def _mark(key: Key) -> Free | None:
    """The mark of the first key on a path that has one; keys below a model are data of the user, such as sources."""
    model: type[BaseModel] | None = Recipe
    for part in key:
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            return None
        if (mark := free_mark(model, part)) is not None:
            return mark
        model = model_in(model.model_fields[part].annotation)
    return None


def _name(key: Key) -> str:
    return ".".join(map(str, key))


def _all_differences(old: Recipe, new: Recipe) -> Iterator[tuple[Key, Any, Any]]:
    """Paths at which two recipes differ; a stage that only one of them has differs as a whole."""
    was, is_ = (each.model_dump(mode="json") for each in (old, new))
    stages = was.pop("stages"), is_.pop("stages")
    for number in range(max(map(len, stages))):
        before, after = (each[number] if number < len(each) else None for each in stages)
        yield from _differences(before, after, ("stages", number))
    yield from _differences(was, is_)


def _differences(old: Any, new: Any, key: Key = ()) -> Iterator[tuple[Key, Any, Any]]:
    """Paths at which two values differ, each with the old and the new value."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            yield from _differences(old.get(name), new.get(name), (*key, name))
    # Lists of different lengths differ as a whole, since nothing tells which elements correspond.
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for number, pair in enumerate(zip(old, new, strict=True)):
            yield from _differences(*pair, (*key, number))
    elif old != new:
        yield key, old, new


def _told(value: Any) -> str:
    """Text of a value in a message; a stage is described by its context and steps."""
    if isinstance(value, dict) and {"context", "steps"} <= value.keys():
        return f"{value['context']} tokens with {value['steps']} steps"
    text = "none" if value is None else json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
