"""Which tasks lm_eval has, where their files lie, and how a task's data are replaced by the user's.

lm_eval reads fourteen thousand files to know all its tasks, which takes half a minute. A name mostly says in
which folder its task lies, so that folder alone is read; failing that, the names in all files are searched.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import lm_eval.tasks
import pyarrow
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.tasks.lm_eval.quiet_libraries import quiet_libraries

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
