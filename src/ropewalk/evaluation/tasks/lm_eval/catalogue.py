"""Find tasks of lm_eval, and load them with their own data or the user's.

Indexing all tasks of lm_eval means parsing fourteen thousand files, which takes half a minute. A search for the names
in their text takes a second, and only the folders of the requested names are indexed.
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
from ropewalk.models.config.file import one_line

Rows = Mapping[str, Sequence[Mapping[str, Any]]]
"""Documents of each split, with the fields of the Hub dataset."""

STOCK = Path(lm_eval.tasks.__file__).parent
FILE_FORMATS = frozenset({"arrow", "csv", "json", "pandas", "parquet", "text"})
"""Dataset names by which ``datasets`` reads local files; all other names are Hub datasets."""
SPLITS = ("training_split", "validation_split", "test_split")

# At the beginning of a line only: indented keys belong to the members of a group.
_NAME = re.compile(r"^[\"']?(?:task|group)[\"']?\s*:\s*[\"']?([\w.+\-]+)[\"']?\s*$", re.MULTILINE)
_TAGS = re.compile(r"^[\"']?tag[\"']?\s*:[ \t]*(\S.*)?((?:\n[ \t]*-.*)*)", re.MULTILINE)
_WORD = re.compile(r"[\w.+\-]*\w")


@dataclass(frozen=True)
class StockTask:
    """The data that a task's configuration names.

    Attributes:
        name: name of the task.
        dataset: Hub dataset, or the name of a file format.
        config: configuration of the dataset (such as MMLU's subject), or None.
        splits: names of all splits that the task uses.
        evaluated: split with the questions; None if it is unknown, as for tasks written in Python.
        from_hub: whether the data come from the Hub.
    """

    name: str
    dataset: str
    config: str | None
    splits: tuple[str, ...]
    evaluated: str | None
    from_hub: bool


class Catalogue:
    """Index of the requested tasks, groups and tags, and of the tasks that they consist of.

    Args:
        names: tasks, groups and tags.
        include_path: folder of the user's own tasks, which take precedence over lm_eval's.

    Raises:
        RopewalkError: if the folder does not exist, or a name is unknown; the message suggests the nearest known name.
    """

    def __init__(self, names: Sequence[str], include_path: str | os.PathLike[str] | None = None) -> None:
        own = [] if include_path is None else [Path(include_path).expanduser()]
        if own and not own[0].is_dir():
            raise RopewalkError(f"the folder {str(own[0])!r} of lm_eval tasks does not exist")
        with quiet_libraries():
            self._manager = _manager_for(names, own)
        self._index: dict[str, Any] = self._manager.task_index

    def tasks_of(self, name: str) -> list[StockTask]:
        """Return the tasks that a task, group or tag consists of, in lm_eval's order."""
        return list(_leaves(self._index, name))

    def build(self, name: str, local: Mapping[str, Rows]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Build lm_eval's task and group objects under a name, with their data.

        Args:
            name: name of a task, group or tag.
            local: rows by task and split; if not empty, members of a group without rows are left out.

        Raises:
            RopewalkError: if the rows do not form a table, or the task is written in Python and loads its own data.
        """
        # All tasks of a run share the index, so the rows of this one must not stay in it.
        before = dict(self._index)
        try:
            if local:
                for task, rows in local.items():
                    # Without a path, lm_eval takes the configuration from here and not from the file.
                    entry = self._index[task]
                    self._index[task] = replace(entry, yaml_path=None, cfg=_with_rows(entry, rows))
                _prune(self._index, name, set(local))
            loaded = self._manager.load([name])
        finally:
            self._index.clear()
            self._index.update(before)
        return dict(loaded["tasks"]), dict(loaded.get("groups") or {})


def _manager_for(names: Sequence[str], own: list[Path]) -> TaskManager:
    """Build an index of as few folders as possible that contains the names and their members."""
    # The user's own tasks first: a name that they define needs none of lm_eval's folders.
    index = TaskManager(include_path=own, include_defaults=False).task_index if own else {}
    stock = [name for name in names if name not in index]
    known = _names_in_files() if stock else {}
    for name in stock:
        _check_known(name, [*known, *index])
    folders = dict.fromkeys(known[name] for name in stock)
    manager = TaskManager(include_path=[*folders, *own], include_defaults=False)
    if not all(_complete(manager.task_index, name) for name in names):
        # Indexing all of lm_eval's thousands of tasks takes many seconds, so it is the last resort.
        manager = TaskManager(include_path=own or None)
        for name in names:
            _check_known(name, list(manager.task_index))
    return manager


@cache
def _names_in_files() -> dict[str, Path]:
    """Map names of tasks, groups and tags to folders by a text search: one second instead of thirty for an index."""
    names: dict[str, Path] = {}
    for path in sorted(STOCK.rglob("*.yaml")):
        text = path.read_text(encoding="utf-8", errors="replace")
        # The top folder: members of a group may lie in other folders below it.
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
        hint = f"did you mean {near[0]}?" if near else "lm-eval ls tasks lists all tasks"
        raise RopewalkError(f"unknown lm_eval task {name!r}; {hint}")


def _members(entry: Any) -> list[Any]:
    if entry.kind.name == "TAG":
        # lm_eval keeps the tasks of a tag in a set, whose order changes from process to process.
        return sorted(entry.tags)
    return _listed(entry.cfg or {}) if entry.kind.name == "GROUP" else []


def _listed(config: Mapping[str, Any]) -> list[Any]:
    listed = config.get("task")
    return listed if isinstance(listed, list) else []


def _name_of(member: Any) -> str:
    return str(member.get("group", member.get("task")) if isinstance(member, dict) else member)


def _complete(index: Mapping[str, Any], member: Any) -> bool:
    """Whether a group's member and its own members are all in the index or defined inside the group."""
    entry = index.get(_name_of(member))
    if entry is not None:
        return all(_complete(index, each) for each in _members(entry))
    if isinstance(member, dict) and _listed(member):
        return all(_complete(index, each) for each in _listed(member))
    return isinstance(member, dict) and bool(
        member.keys() & {"class", "custom_dataset", "dataset_path", "include"}
    )


def _leaves(index: Mapping[str, Any], member: Any) -> Iterator[StockTask]:
    """Yield the tasks below a group's member, which may override a named task's settings or define a task inline."""
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
    # A task written in Python names its dataset in the code, if at all; its name stands in for the dataset here.
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
    """Remove tasks without data from a group and its subgroups; return whether any task is left."""
    name = _name_of(member)
    entry = index.get(name)
    if entry is None or entry.kind.name not in ("TAG", "GROUP"):
        return name in keep
    members = [each for each in _members(entry) if _prune(index, each, keep)]
    if entry.kind.name == "TAG":
        index[name] = replace(entry, tags=set(members))
    else:
        # Without a path, lm_eval takes the configuration from here and not from the file.
        index[name] = replace(entry, yaml_path=None, cfg={**entry.cfg, "task": members})
    return bool(members)


def _with_rows(entry: Any, rows: Rows) -> dict[str, Any]:
    """Return a task's configuration with the given rows as its dataset, without splits that have no rows."""
    if entry.kind.name == "PY_TASK":
        raise RopewalkError(
            f"{entry.name} is a Python task that loads its own data and cannot use local files; remove its "
            "--lm-eval-data"
        )
    config = dict(load_yaml(entry.yaml_path, resolve_func=True) if entry.yaml_path else entry.cfg)
    stock = _stock_task(entry.name, config)
    tables = datasets.DatasetDict({split: _table(entry.name, each) for split, each in rows.items()})
    # lm_eval calls custom_dataset in place of the Hub's loader, whose arguments then mean nothing.
    config |= {"custom_dataset": lambda **_: tables, "dataset_kwargs": None}
    config |= {key: config.get(key) if config.get(key) in rows else None for key in SPLITS}
    fewshot = dict(config.get("fewshot_config") or {})
    split = config.get("fewshot_split") or fewshot.get("split")
    if split not in rows and not fewshot.get("samples"):
        split = _other_fewshot_split(config, stock.evaluated)
    fewshot.pop("split", None)
    return config | {"fewshot_split": split, "fewshot_config": fewshot or None}


def _other_fewshot_split(config: Mapping[str, Any], evaluated: str | None) -> str | None:
    """Choose the split of few-shot examples if there is no dedicated one.

    lm_eval excludes the question itself from the examples only if this is None or the test split.
    """
    others = [config[key] for key in SPLITS if config[key] and config[key] != evaluated]
    if others and config["training_split"]:
        return None
    if others:
        return str(others[0])
    return config["test_split"] or None


def _table(name: str, rows: Sequence[Mapping[str, Any]]) -> datasets.Dataset:
    # Rows may lack fields that others have, and a table needs the same fields in all.
    fields = dict.fromkeys(field for row in rows for field in row)
    try:
        return datasets.Dataset.from_list([{field: row.get(field) for field in fields} for row in rows])
    except (pyarrow.ArrowException, TypeError, OverflowError) as error:
        raise RopewalkError(f"the rows of {name} do not form a table: {error}") from error


NOT_THERE = (OSError, datasets.exceptions.DatasetsError)
"""Exceptions for a dataset that is not available; a missing package raises ImportError."""

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
"""Exceptions that lm_eval raises for data without the fields that a task's template needs."""


class CannotRun(RopewalkError):
    """A task cannot run here; the message gives the reason."""


@dataclass(frozen=True)
class Loaded:
    """A task or group with its data.

    Attributes:
        name: name of the task or group, as requested.
        tasks: lm_eval's task objects by name.
        group: lm_eval's group object if its members have a common score, or None.
        fewshot: where each task's few-shot examples come from, in words; empty without examples.
    """

    name: str
    tasks: Mapping[str, Any]
    group: Any
    fewshot: Mapping[str, str]


def load(
    catalogue: Catalogue,
    name: str,
    local: Mapping[str, Rows],
    num_fewshot: int | None,
    seed: int,
    online: Callable[[], bool],
) -> Loaded:
    """Load a task or group with its data.

    Args:
        catalogue: catalogue that contains the name.
        name: name of the task or group.
        local: rows by task and split that replace Hub data; if not empty, tasks of a group without rows are left out.
        num_fewshot: number of few-shot examples; None for the task's default.
        seed: random seed for the choice of examples.
        online: returns whether the Hub is reachable; called only if something is needed from it.

    Raises:
        CannotRun: if data or a package are missing.
        RopewalkError: if the user's data do not fit the task.
    """
    remote = sorted({task.dataset for task in catalogue.tasks_of(name) if task.from_hub} if not local else ())
    with ExitStack() as stack:
        stack.enter_context(quiet_libraries())
        stack.enter_context(seeded(seed))
        reached = bool(remote) and online()
        # Without a network, a cached data set still loads, but only if nothing tries to reach the Hub first.
        if remote and not reached:
            stack.enter_context(offline())
        try:
            tasks, groups = catalogue.build(name, local)
            # Only the user's data are tried out in full: the Hub's were made for the task.
            for each in local:
                _ask_all(tasks[each])
        # RopewalkError is a ValueError, which a clause below would take for data that do not fit.
        except RopewalkError:
            raise
        except ImportError as error:
            raise CannotRun(_missing(error)) from error
        except NOT_THERE as error:
            raise CannotRun(_unreachable(remote, reached, error)) from error
        except UNFIT as error:
            if remote:
                raise CannotRun(f"lm_eval cannot load {', '.join(remote)}: {one_line(error)}") from error
            raise RopewalkError(
                f"the data do not fit the template of the task {name}: {_said(error)}"
            ) from error
    group = groups.get(name)
    for task in tasks.values():
        _set_fewshot(task, num_fewshot, seed)
    fewshot = {key: _fewshot_source(task) for key, task in tasks.items()}
    # lm_eval computes a common score only for groups that list metrics.
    scored = group is not None and bool(group.aggregate_metric_list)
    return Loaded(name, tasks, group if scored else None, fewshot)


def check_runnable(loaded: Loaded, max_length: int) -> None:
    """Raise for tasks that cannot run on a text model with this context.

    Args:
        loaded: task or group from :func:`load`.
        max_length: maximum number of tokens of prompt and answer together.

    Raises:
        CannotRun: if a task executes generated code, is multimodal, or leaves no room for its prompts.
    """
    for name, task in loaded.tasks.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise CannotRun(f"{name} executes code that the model generates, which ropewalk does not allow")
        if getattr(task, "MULTIMODAL", False):
            raise CannotRun(f"{name} is multimodal, and ropewalk evaluates only text")
        settings = task.get_config("generation_kwargs") or {}
        room = max((int(settings.get(key) or 0) for key in _ROOM), default=0)
        # Without a limit in the task, lm_eval generates up to 256 tokens.
        if task.get_config("output_type") == "generate_until" and (room or 256) >= max_length:
            raise CannotRun(
                f"answers of {name} have up to {room or 256} tokens, which leaves no room for a prompt: prompt and "
                f"answer together can have at most {max_length} tokens"
            )


_ROOM = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")


def _ask_all(task: Any) -> None:
    """Render all documents now: lm_eval checks only the first one, and a later one must not fail after hours."""
    for document in task.eval_docs:
        task.doc_to_text(document)
        task.doc_to_target(document)
        if task.config.doc_to_choice is not None:
            task.doc_to_choice(document)


def _set_fewshot(task: Any, num_fewshot: int | None, seed: int) -> None:
    """Set the number of few-shot examples as lm_eval does."""
    own = task.get_config("num_fewshot")
    # As in lm_eval: a task whose own number is 0 keeps it, whatever is asked for.
    if num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=seed)
    wanted = int(task.get_config("num_fewshot"))
    pool = len(getattr(getattr(task, "sampler", None), "df", None) or ())
    left_out = _question_left_out(task)
    if wanted and pool < wanted + left_out:
        raise RopewalkError(
            f"{task.task_name} needs {wanted} few-shot examples, but its data have only "
            f"{max(0, pool - left_out)} to draw from; give more data"
        )


def _question_left_out(task: Any) -> bool:
    """Whether lm_eval draws one extra example to exclude the question, because both come from the same split."""
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
    return "the questions themselves, except the current one" if split == evaluated else f"split {split}"


def _unreachable(remote: Sequence[str], reached: bool, error: BaseException) -> str:
    if not remote:
        return f"the data could not be read: {one_line(error)}"
    why = f" ({one_line(error)})" if reached else ""
    what = "the dataset" if len(remote) == 1 else "the datasets"
    return f"{what} {', '.join(remote)} could not be loaded from the Hub{why}; give local data with --lm-eval-data"


def _missing(error: ImportError) -> str:
    """Shorten lm_eval's hint about missing packages, which is a paragraph, to the name of its extra."""
    extra = re.search(r"lm_eval\[[\"']?(\w+)", str(error))
    if extra:
        return f"packages that the task needs are missing; run pip install lm_eval[{extra[1]}]"
    return f"a package that the task needs is missing: {one_line(error)}"


def _said(error: BaseException) -> str:
    """Format an error with its type, because the text of a KeyError is only the key."""
    return f"{type(error).__name__}: {one_line(error)}"


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global random generators, from which tasks may draw, and restore them afterwards."""
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
