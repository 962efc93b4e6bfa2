"""Changes of a recipe that ``--resume`` accepts; each key declares its rule with its field."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ropewalk.errors import RopewalkError
from ropewalk.io.settings import OnResume, Settings, model_in
from ropewalk.training.optimizer import learning_rate_at
from ropewalk.training.recipe.recipe import Change, Recipe, Stage

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
class Changes:
    """Differences between a recipe and that of the run which it resumes.

    Attributes:
        onward: changes that apply from now on, for the recipe's history.
        same: keys whose new value must be equivalent to the old one.
        stages: indices of stages that had not started and are new, removed, or have other rows or RoPE.
    """

    onward: tuple[Change, ...]
    same: frozenset[str]
    stages: tuple[int, ...]

    def sentences(self, old: Recipe, new: Recipe) -> list[str]:
        """Sentences for the user on what changes from which step; none if nothing changes."""
        if not self.onward:
            return []
        stage, step = self.onward[0].stage, self.onward[0].step
        changed = [f"{each.key} {_told(each.old)} -> {_told(each.new)}" for each in self.onward]
        notes = [f"the recipe changes after step {step} of stage {stage + 1}: {'; '.join(changed)}"]
        if stage < min(len(old.stages), len(new.stages)):
            notes.extend(_rates(stage, old.stages[stage], new.stages[stage], step))
        return notes


def declared_on_resume(model: type[Settings], name: str, holder: OnResume | None = None) -> OnResume | None:
    """Rule of a key for ``--resume``, from its field, its class, or the key that contains the class; None if none has.

    Args:
        model: settings class of the key.
        name: name of the key.
        holder: rule of the key that contains the class; it applies to classes that declare no rule, since they are
            also used outside recipes.
    """
    own = [each for each in model.model_fields[name].metadata if isinstance(each, OnResume)]
    return own[0] if own else model.on_resume or holder


def on_resume(model: type[Settings], name: str, holder: OnResume | None = None) -> OnResume:
    """Rule of a key for ``--resume``, as in :func:`declared_on_resume`.

    Raises:
        TypeError: if no rule is declared, which is a bug of ropewalk that a test detects.
    """
    found = declared_on_resume(model, name, holder)
    if found is None:
        raise TypeError(f"{model.__name__}.{name} does not say what --resume does with it")
    return found


def is_group(field: FieldInfo) -> bool:
    """Whether a field is a group of keys, which declare their own rules for ``--resume``."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def changes(old: Recipe, new: Recipe, progress: Progress) -> Changes:
    """Compare the recipe of a run with the recipe given with ``--resume``.

    Args:
        old: recipe of the run so far.
        new: recipe given with ``--resume``.
        progress: progress of the run.

    Raises:
        RopewalkError: for a key that may not change, or may no longer change, with the reason.
    """
    onward: list[Change] = []
    same: set[str] = set()
    refused: list[str] = []
    stages: set[int] = set()
    for number in range(max(len(old.stages), len(new.stages))):
        pair = [each.stages[number] if number < len(each.stages) else None for each in (old, new)]
        if number < progress.begun:
            if pair[1] is None:
                refused.append(
                    f"stages (stage {number + 1} has started, but the new recipe has no stage {number + 1})"
                )
            continue
        for key, was, is_ in _differences(_plain(pair[0]), _plain(pair[1]), ("stages", number)):
            rule = _rule(key)
            if rule.kind == "same":
                same.add(_name(key))
            elif rule.kind != "free":
                onward.append(_change(key, was, is_, progress))
                # A key of length 2 is a whole stage, which is new or removed.
                if rule.kind == "fixed" or len(key) == 2:
                    stages.add(number)
    if stages and any(stage.rope.limiting.search is not None for stage in old.stages[: progress.begun]):
        # A longer target takes more documents for its evaluation, possibly those that the search has used.
        refused.append(
            "stages (factors were searched on held-out documents that a changed evaluation could use as well)"
        )
    # Stages that have not begun may change freely, so the rules of resuming apply to the others only.
    begun = min(progress.begun, len(old.stages), len(new.stages))
    before, after = (_plain(each.model_copy(update={"stages": each.stages[:begun]})) for each in (old, new))
    for key, was, is_ in _differences(before, after):
        rule, name = _rule(key), _name(key)
        if rule.kind == "same":
            same.add(name)
        elif rule.kind == "fixed":
            refused.append(f"{name} {_told(was)} -> {_told(is_)} ({rule.why})")
        elif rule.kind == "onward":
            reason = _too_late(key, old, new, progress)
            if reason is None:
                onward.append(_change(key, was, is_, progress))
            else:
                refused.append(f"{name} {_told(was)} -> {_told(is_)} ({reason})")
    if refused:
        raise RopewalkError(
            f"--resume cannot change these keys of the recipe: {', '.join(refused[:3])}; restore the old values, or "
            "start a new run in another output folder"
        )
    return Changes(tuple(onward), frozenset(same), tuple(sorted(stages)))


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


def _rule(key: Key) -> OnResume:
    """Rule of the innermost declared key on a path; keys below it are data of the user, such as sources."""
    model: type[BaseModel] | None = Recipe
    found: OnResume | None = None
    holder: OnResume | None = None
    for depth, part in enumerate(key):
        if isinstance(part, int):
            continue
        if model is None or part not in model.model_fields:
            break
        assert issubclass(model, Settings)
        inner = model_in(model.model_fields[part].annotation)
        # The last field on the path decides: it holds no model, or only indices of a list follow.
        if inner is None or all(isinstance(below, int) for below in key[depth + 1 :]):
            found = on_resume(model, part, holder)
        holder = declared_on_resume(model, part, holder)
        model = inner
    assert found is not None, key
    return found


def _change(key: Key, old: Any, new: Any, progress: Progress) -> Change:
    return Change(key=_name(key), old=old, new=new, stage=progress.stage, step=progress.step)


def _name(key: Key) -> str:
    return ".".join(map(str, key))


def _plain(value: BaseModel | None) -> Any:
    # The history grows whenever a run is resumed with changes, and is no setting.
    return None if value is None else value.model_dump(mode="json", exclude={"history"})


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
