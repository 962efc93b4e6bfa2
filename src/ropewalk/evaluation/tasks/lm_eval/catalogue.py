"""Which tasks lm_eval has, where their files lie, and how a task's data are replaced by the user's.

lm_eval reads fourteen thousand files to know all its tasks, which takes half a minute. A name mostly says in
which folder its task lies, so that folder alone is read; failing that, the names in all files are searched.
"""

from __future__ import annotations

import difflib
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import jinja2
import lm_eval.tasks
import numpy as np
import pyarrow
import torch
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from ropewalk.data.read.hub import offline
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.lm_eval.model import quiet_libraries
from ropewalk.models.config_file import one_line

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Documents of each split, with the fields of the hub's dataset."""

STOCK = Path(lm_eval.tasks.__file__).parent
FOLDERS = {"mmlu": "mmlu/default"}
"""Folders that hold more families than the one that is named alike."""
FILE_FORMATS = frozenset({"arrow", "csv", "json", "pandas", "parquet", "text"})
"""Names under which ``datasets`` reads files, where other names are datasets of the hub."""
SPLITS = ("training_split", "validation_split", "test_split")

_NAME = re.compile(r"^[\"']?(?:task|group)[\"']?\s*:\s*[\"']?([\w.+\-]+)[\"']?\s*$", re.MULTILINE)
_TAGS = re.compile(r"^[\"']?tag[\"']?\s*:[ \t]*(\S.*)?((?:\n[ \t]*-.*)*)", re.MULTILINE)
_WORD = re.compile(r"[\w.+\-]*\w")


@dataclass(frozen=True)
class StockTask:
    """What a task says of its data.

    Attributes:
        name: of the task.
        dataset: on the hub, or the name of a file format.
        config: of the dataset (MMLU's subject, say), or None.
        splits: names of all splits that it uses.
        evaluated: the split that holds the questions; None where it cannot be known, as for tasks in Python.
        from_hub: whether its data come from the hub.
    """

    name: str
    dataset: str
    config: str | None
    splits: tuple[str, ...]
    evaluated: str | None
    from_hub: bool


class Catalogue:
    """The tasks that were asked for, and those that they consist of.

    Args:
        names: tasks, groups and tags.
        include_path: a folder of the user's own tasks, which go before lm_eval's.

    Raises:
        RopewalkError: if the folder does not exist, or for a name that there is not; the message gives the
            nearest that there is.
    """

    def __init__(self, names: Sequence[str], include_path: str | os.PathLike[str] | None = None) -> None:
        own = [] if include_path is None else [Path(include_path).expanduser()]
        if own and not own[0].is_dir():
            raise RopewalkError(f"there is no folder {str(own[0])!r} of lm_eval tasks")
        with quiet_libraries():
            self._manager = _manager_for(names, own)
        self._index: dict[str, Any] = self._manager.task_index

    def tasks_of(self, name: str) -> list[StockTask]:
        """The tasks that a task, group or tag consists of, in lm_eval's order."""
        return list(_leaves(self._index, name))

    def build(self, name: str, local: Mapping[str, Rows]) -> tuple[dict[str, Any], dict[str, Any]]:
        """lm_eval's objects of the tasks and groups under a name, with their data.

        Args:
            name: of a task, group or tag.
            local: rows by split by task; members of a group that are not in it are left out, if any are.

        Raises:
            RopewalkError: if the rows are no table, or the task is a program that loads its data itself.
        """
        before = dict(self._index)
        try:
            if local:
                for task, rows in local.items():
                    entry = self._index[task]
                    self._index[task] = replace(entry, yaml_path=None, cfg=_with_rows(entry, rows))
                _prune(self._index, name, set(local))
            loaded = self._manager.load([name])
        finally:
            self._index.clear()
            self._index.update(before)
        return dict(loaded["tasks"]), dict(loaded.get("groups") or {})


def is_group(group: Any) -> bool:
    """Whether the members of lm_eval's group have a common score."""
    return bool(group.aggregate_metric_list)


def _manager_for(names: Sequence[str], own: list[Path]) -> TaskManager:
    """An index of as few folders as hold the names and all that they consist of."""
    index = TaskManager(include_path=own, include_defaults=False).task_index if own else {}
    folders = [folder for name in names if name not in index and (folder := _likely_folder(name))]
    manager = TaskManager(include_path=[*dict.fromkeys(folders), *own], include_defaults=False)
    lost = [name for name in names if name not in manager.task_index]
    if lost:
        known = _names_in_files()
        for name in lost:
            _check_known(name, [*known, *manager.task_index])
        folders += [known[name] for name in lost]
        manager = TaskManager(include_path=[*dict.fromkeys(folders), *own], include_defaults=False)
    if not all(_complete(manager.task_index, name) for name in names):
        manager = TaskManager(include_path=own or None)
        for name in names:
            _check_known(name, list(manager.task_index))
    return manager


def _likely_folder(name: str) -> Path | None:
    """The folder of lm_eval that is called like the beginning of a name, the longest beginning first."""
    ends = [match.start() for match in re.finditer("[_-]", name)]
    for end in [len(name), *reversed(ends)]:
        folder = STOCK / FOLDERS.get(name[:end], name[:end])
        if name[:end] and folder.is_dir():
            return folder
    return None


@cache
def _names_in_files() -> dict[str, Path]:
    """Folders of lm_eval by the names of tasks, groups and tags; a second's work, where an index takes thirty."""
    names: dict[str, Path] = {}
    for path in sorted(STOCK.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8", errors="replace")
        folder = STOCK / path.relative_to(STOCK).parts[0]
        found = _NAME.findall(text)
        for one, many in _TAGS.findall(text):
            found += _WORD.findall(f"{one} {many}")
        for name in found:
            names.setdefault(name, folder)
    return names


def _check_known(name: str, known: Sequence[str]) -> None:
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}" if near else "lm-eval ls tasks lists those that there are"
        raise RopewalkError(f"unknown lm_eval task {name!r}; {hint}")


def _members(entry: Any) -> list[Any]:
    if entry.kind.name == "TAG":
        return sorted(entry.tags)
    return _listed(entry.cfg or {}) if entry.kind.name == "GROUP" else []


def _listed(config: Mapping[str, Any]) -> list[Any]:
    listed = config.get("task")
    return listed if isinstance(listed, list) else []


def _name_of(member: Any) -> str:
    return str(member.get("group", member.get("task")) if isinstance(member, dict) else member)


def _complete(index: Mapping[str, Any], member: Any) -> bool:
    """Whether all that a member of a group consists of is in the index, or is defined by the group itself."""
    entry = index.get(_name_of(member))
    if entry is not None:
        return all(_complete(index, each) for each in _members(entry))
    if isinstance(member, dict) and _listed(member):
        return all(_complete(index, each) for each in _listed(member))
    return isinstance(member, dict) and bool(
        member.keys() & {"class", "custom_dataset", "dataset_path", "include"}
    )


def _leaves(index: Mapping[str, Any], member: Any) -> Iterator[StockTask]:
    """The tasks below a member of a group, which may change settings of what it names, or define it."""
    entry, own = index.get(_name_of(member)), member if isinstance(member, dict) else {}
    below = _listed(own) if entry is None else _members(entry)
    if below:
        for each in below:
            yield from _leaves(index, each)
    elif entry is None:
        yield replace(_stock_task(_name_of(member), own), evaluated=None)
    else:
        yield _stock_task(entry.name, {**(entry.cfg or {}), **own})


def _stock_task(name: str, config: Mapping[str, Any]) -> StockTask:
    fewshot = config.get("fewshot_split") or (config.get("fewshot_config") or {}).get("split")
    splits = [config.get(key) for key in SPLITS] + [fewshot]
    # A task that is a program names its dataset in the program, if it has one.
    dataset = str(config.get("dataset_path") or (name if "class" in config else ""))
    return StockTask(
        name=name,
        dataset=dataset,
        config=config.get("dataset_name"),
        splits=tuple(dict.fromkeys(str(split) for split in splits if split)),
        evaluated=config.get("test_split") or config.get("validation_split"),
        from_hub=bool(dataset) and dataset not in FILE_FORMATS and not Path(dataset).exists(),
    )


def _prune(index: dict[str, Any], member: Any, keep: set[str]) -> bool:
    """Leave the tasks that have no data out of a group and the groups in it; whether any task is left."""
    name = _name_of(member)
    entry = index.get(name)
    if entry is None or entry.kind.name not in ("TAG", "GROUP"):
        return name in keep
    members = [each for each in _members(entry) if _prune(index, each, keep)]
    if entry.kind.name == "TAG":
        index[name] = replace(entry, tags=set(members))
    else:
        index[name] = replace(entry, yaml_path=None, cfg={**entry.cfg, "task": members})
    return bool(members)


def _with_rows(entry: Any, rows: Rows) -> dict[str, Any]:
    """A task's own configuration with other documents; splits that have none are not asked for."""
    if entry.kind.name == "PY_TASK":
        raise RopewalkError(
            f"{entry.name} is a Python task that loads its data itself; it takes none from files"
        )
    config = dict(load_yaml(entry.yaml_path, resolve_func=True) if entry.yaml_path else entry.cfg)
    stock = _stock_task(entry.name, config)
    tables = datasets.DatasetDict({split: _table(entry.name, each) for split, each in rows.items()})
    config |= {"custom_dataset": lambda **_: tables, "dataset_kwargs": None}
    config |= {key: config.get(key) if config.get(key) in rows else None for key in SPLITS}
    fewshot = dict(config.get("fewshot_config") or {})
    split = config.get("fewshot_split") or fewshot.get("split")
    if split not in rows and not fewshot.get("samples"):
        split = _other_fewshot_split(config, stock.evaluated)
    fewshot.pop("split", None)
    return config | {"fewshot_split": split, "fewshot_config": fewshot or None}


def _other_fewshot_split(config: Mapping[str, Any], evaluated: str | None) -> str | None:
    """Where examples come from without a split of their own; lm_eval leaves out the question where it says None
    or the test split, and there alone."""
    others = [config[key] for key in SPLITS if config[key] and config[key] != evaluated]
    if others and config["training_split"]:
        return None
    if others:
        return str(others[0])
    return config["test_split"] or None


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    fields = dict.fromkeys(field for row in rows for field in row)
    try:
        return datasets.Dataset.from_list([{field: row.get(field) for field in fields} for row in rows])
    except (pyarrow.ArrowException, TypeError, OverflowError) as error:
        raise RopewalkError(f"the rows of {name} are no table: {error}") from error


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
