"""Building lm_eval's tasks with their data, and refusing those that cannot run here."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import datasets
import jinja2
import numpy as np
import torch

from ropewalk.data.read.hub import offline
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.lm_eval.quiet_libraries import quiet_libraries
from ropewalk.evaluation.tasks.lm_eval.tasks import Catalogue, Rows, is_group
from ropewalk.models.config_file import one_line

NOT_THERE = (OSError, datasets.exceptions.DatasetsError)
"""What a dataset that cannot be had raises; a missing package is an ImportError."""

UNFIT = (
    jinja2.TemplateError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What lm_eval raises over data that do not have the fields that a task's template asks for."""


class CannotRun(RopewalkError):
    """A task that cannot run here; the message says why."""


@dataclass(frozen=True)
class Loaded:
    """A task or group with its data.

    Attributes:
        name: as it was asked for.
        tasks: lm_eval's task objects by name.
        group: lm_eval's group object, where its members have a common score.
        fewshot: where each task's examples come from, in words; empty where there are none.
        fixed: tasks that take no other number of examples than their own.
    """

    name: str
    tasks: Mapping[str, Any]
    group: Any
    fewshot: Mapping[str, str]
    fixed: tuple[str, ...]


def load(
    catalogue: Catalogue,
    name: str,
    local: Mapping[str, Rows],
    num_fewshot: int | None,
    seed: int,
    online: Callable[[], bool],
) -> Loaded:
    """Build a task or group with its data.

    Args:
        catalogue: knows the name.
        name: of the task or group.
        local: rows by split by the name of a task, in place of the hub's; where any is given, tasks of a group
            that have none are left out.
        num_fewshot: examples before each question; the task's own number if None.
        seed: of the choice of examples.
        online: asked whether the hub can be reached, only where something is needed from it.

    Raises:
        CannotRun: if data or a package are not there.
        RopewalkError: if the user's data do not fit.
    """
    remote = sorted({task.dataset for task in catalogue.tasks_of(name) if task.from_hub} if not local else ())
    with ExitStack() as stack:
        stack.enter_context(quiet_libraries())
        stack.enter_context(seeded(seed))
        reached = bool(remote) and online()
        if remote and not reached:
            stack.enter_context(offline())
        try:
            tasks, groups = catalogue.build(name, local)
            for each in local:
                _ask_all(tasks[each])
        except RopewalkError:
            raise
        except ImportError as error:
            raise CannotRun(_missing(error)) from error
        except NOT_THERE as error:
            raise CannotRun(_unreachable(remote, reached, error)) from error
        except UNFIT as error:
            if remote:
                raise CannotRun(f"lm_eval cannot load {', '.join(remote)}: {one_line(error)}") from error
            raise RopewalkError(f"the data of {name} do not fit its template: {_said(error)}") from error
    group = groups.get(name)
    fixed = tuple(key for key, task in tasks.items() if _set_fewshot(task, num_fewshot, seed))
    fewshot = {key: _fewshot_source(task) for key, task in tasks.items()}
    return Loaded(name, tasks, group if group is not None and is_group(group) else None, fewshot, fixed)


def check_runnable(loaded: Loaded, max_length: int) -> None:
    """Raise for a task that no text model of this context can answer.

    Args:
        loaded: from :func:`load`.
        max_length: tokens that prompt and answer may take together.

    Raises:
        CannotRun: with the reason.
    """
    for name, task in loaded.tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise CannotRun(f"{name} runs code that the model writes, which ropewalk does not")
        if getattr(task, "MULTIMODAL", False):
            raise CannotRun(f"{name} shows the model more than text")
        settings = task.get_config("generation_kwargs") or {}
        room = max((int(settings.get(key) or 0) for key in _ROOM), default=0)
        if task.get_config("output_type") == "generate_until" and (room or 256) >= max_length:
            raise CannotRun(
                f"answers of {name} take up to {room or 256} tokens, which leaves no room for a prompt in {max_length}"
            )


_ROOM = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _ask_all(task: Any) -> None:
    """lm_eval looks at the first document alone; a later one must not fail after hours of other tasks."""
    for document in task.eval_docs:
        task.doc_to_text(document)
        task.doc_to_target(document)
        if task.config.doc_to_choice is not None:
            task.doc_to_choice(document)


def _set_fewshot(task: Any, num_fewshot: int | None, seed: int) -> bool:
    """Set the number of examples as lm_eval does; whether the task refused it."""
    own = task.get_config("num_fewshot")
    fixed = own == 0 and bool(num_fewshot)
    if num_fewshot is not None and not fixed:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)
    wanted = int(task.get_config("num_fewshot"))
    pool = len(getattr(getattr(task, "sampler", None), "df", None) or ())
    left_out = _question_left_out(task)
    if wanted and pool < wanted + left_out:
        raise RopewalkError(
            f"{task.task_name} is asked with {wanted} examples and its data have {max(0, pool - left_out)} to "
            "draw them from; give more, or ask with fewer"
        )
    return fixed


def _question_left_out(task: Any) -> bool:
    """lm_eval draws one example more, and leaves out the question, where it takes both from one split."""
    settings = getattr(task, "fewshot_cfg", None)
    return settings is not None and settings.split == task.config.test_split


def _fewshot_source(task: Any) -> str:
    if not task.get_config("num_fewshot"):
        return ""
    config, settings = task.config, getattr(task, "fewshot_cfg", None)
    if settings is not None and settings.split is None and settings.samples is not None:
        return "the task's own"
    evaluated = config.test_split or config.validation_split
    split = settings.split if settings is not None else None
    split = split or config.training_split or config.validation_split or config.test_split
    return "the questions themselves, but the one asked" if split == evaluated else f"split {split}"


def _unreachable(remote: Sequence[str], reached: bool, error: BaseException) -> str:
    if not remote:
        return f"its data could not be read: {one_line(error)}"
    why = f" ({one_line(error)})" if reached else ""
    what = "its dataset" if len(remote) == 1 else "its datasets"
    return f"{what} {', '.join(remote)} could not be reached on the hub{why}, and no local data were given"


def _missing(error: ImportError) -> str:
    """lm_eval's own hint is a paragraph; which of its extras is wanted is all that matters of it."""
    extra = re.search(r"lm_eval\[[\"']?(\w+)", str(error))
    if extra:
        return f"packages that it needs are missing; pip install lm_eval[{extra[1]}]"
    return f"a package that it needs is missing: {one_line(error)}"


def _said(error: BaseException) -> str:
    """A KeyError's own text is a bare key."""
    return f"{type(error).__name__}: {one_line(error)}"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Tasks may draw from the global generators; whoever called finds them as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
