"""The trainer under test: find the user's function, call it with documents, and see what it returns."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.models.config.read import read_config
from ropewalk.verification.settings import TrainerProbeSettings

Documents = tuple[tuple[int, ...], ...]
"""Token ids of each document. No id occurs twice, so that every token of a batch can be recognised."""

SHORTEST = 4
"""Tokens of the shortest document."""
STRIDE = 3
"""Documents are taken in steps of this many of their lengths, so that neighbours have different lengths."""


@dataclass(frozen=True, eq=False)
class Subject:
    """What the user's function returned.

    Attributes:
        name: class of the trainer, or what stands in for it.
        model: the model in memory, without wrappers; None if only losses are known.
        step: runs forward and backward of one optimizer step; None if only losses are known.
        save: saves the model to a folder as the trainer does; None if only losses are known.
        losses: for a loss function, the losses of the documents it is given, one tensor each; otherwise None.
    """

    name: str
    model: Any = None
    step: Callable[[], object] | None = None
    save: Callable[[Path], object] | None = None
    losses: Callable[[Documents], list[Tensor]] | None = None


def make_documents(settings: TrainerProbeSettings) -> Documents:
    """Documents of different lengths, in which every token id is a different number."""
    count, longest = settings.documents, settings.length
    shortest = max(SHORTEST, longest // 4)
    lengths = [shortest + (longest - shortest) * number // max(1, count - 1) for number in range(count)]
    # A stride with a common divisor would take some lengths twice.
    stride = next(each for each in range(STRIDE, count + STRIDE + 1) if math.gcd(each, count) == 1)
    documents, following = [], settings.first_token
    for number in range(count):
        length = lengths[number * stride % count]
        documents.append(tuple(range(following, following + length)))
        following += length
    return tuple(documents)


def load_function(target: str) -> Callable[..., Any]:
    """The function that ``module:function`` or ``file.py:function`` names.

    Raises:
        RopewalkError: if the module or the function cannot be found or imported.
    """
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise RopewalkError(f"TARGET must be module:function or file.py:function, got {target!r}")
    # As `python -m` does, so that modules beside the user are found.
    sys.path.insert(0, str(Path.cwd()))
    try:
        if place.endswith(".py"):
            file = Path(place)
            if not file.is_file():
                raise RopewalkError(f"TARGET names the file {place}, which does not exist; give another file")
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            # Dataclasses and pickled objects look up their module by name.
            sys.modules[file.stem] = module
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
    except RopewalkError:
        raise
    except Exception as error:
        raise RopewalkError(f"cannot import {place}: {_line(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RopewalkError(f"{place} has no function {name}; it has {', '.join(known) or 'none'}")
    checked: Callable[..., Any] = function
    return checked


def make_subject(function: Callable[..., Any], documents: Documents) -> Subject:
    """Call the user's function, with the documents if it takes an argument, and recognise what it returns.

    Raises:
        RopewalkError: if it raises, takes other arguments, or returns nothing that can be probed.
    """
    needed = [
        each
        for each in inspect.signature(function).parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty
    ]
    if len(needed) > 1:
        names = ", ".join(each.name for each in needed)
        raise RopewalkError(
            f"TARGET must take either no argument or only the documents, but it takes {len(needed)} arguments: {names}"
        )
    given = [list(document) for document in documents]
    made = _called(function, *([given] if needed else []))
    if hasattr(made, "train") and hasattr(made, "compute_loss") and hasattr(made, "args"):
        return _of_trainer(made, None if needed else given)
    if (
        isinstance(made, tuple)
        and len(made) == 2
        and isinstance(made[0], torch.nn.Module)
        and callable(made[1])
    ):
        model = _without_wrapper(made[0])
        return Subject("training step", model, made[1], getattr(model, "save_pretrained", None))
    if needed and (losses := _per_document(made, len(documents))) is not None:
        del losses
        return Subject("loss function", losses=lambda changed: _losses(function, changed))
    raise RopewalkError(
        f"TARGET returned a value of type {type(made).__name__} that cannot be probed; return one of: a transformers "
        "Trainer; a pair (model, step), where step() runs the forward and backward passes of one optimizer step; a "
        f"list with one entry for each of the {len(documents)} documents, either its loss or its token losses"
    )


def _called(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except RopewalkError:
        raise
    except Exception as error:
        raise RopewalkError(f"TARGET failed: {_line(error)}") from error


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"


def _of_trainer(trainer: Any, documents: list[list[int]] | None) -> Subject:
    """A Trainer whose one step runs without changing weights and without saving or evaluating.

    Args:
        trainer: a transformers Trainer or a subclass.
        documents: replacement for its data, if its function did not take documents itself.
    """
    name = type(trainer).__name__
    if documents is not None:
        if getattr(trainer.args, "packing", False):
            raise RopewalkError(
                f"{name} packs its data in its constructor; make TARGET a function of one argument, the documents as "
                "lists of token ids, which gives them to the trainer as train_dataset with a column input_ids"
            )
        trainer.train_dataset = [{"input_ids": ids, "labels": ids} for ids in documents]

    def step() -> None:
        arguments = trainer.args
        arguments.max_steps = 1
        # The step is only observed; the model that the user has in memory stays as it is.
        arguments.learning_rate = 0.0
        arguments.save_strategy = arguments.eval_strategy = "no"
        arguments.load_best_model_at_end = False
        _called(trainer.train)

    return Subject(
        name, _without_wrapper(trainer.model), step, lambda folder: trainer.save_model(str(folder))
    )


def _without_wrapper(model: Any) -> Any:
    """The transformers model inside DistributedDataParallel and peft."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _losses(function: Callable[..., Any], documents: Documents) -> list[Tensor]:
    losses = _per_document(_called(function, [list(each) for each in documents]), len(documents))
    if losses is None:
        raise RopewalkError(f"TARGET returned losses for another number of documents than {len(documents)}")
    return losses


def _per_document(made: Any, count: int) -> list[Tensor] | None:
    """One float64 tensor of losses for each document; None if the value is something else."""
    if not isinstance(made, Tensor | Sequence) or isinstance(made, str) or len(made) != count:
        return None
    try:
        return [torch.as_tensor(each).detach().double().cpu().flatten() for each in made]
    except (TypeError, ValueError, RuntimeError):
        return None


def reference_config(subject: Subject, config: str | None) -> Any:
    """The config that states RoPE and windows: that of a checkpoint, or of the model in memory.

    Raises:
        RopewalkError: if the checkpoint cannot be read, or the model has no config.
    """
    from ropewalk.models.config.model import ModelConfig

    if config is not None:
        return read_config(config, False)
    own = getattr(subject.model, "config", None)
    if own is None or not hasattr(own, "get_text_config"):
        raise RopewalkError(
            f"{type(subject.model).__name__} has no transformers config, so its RoPE is unknown; "
            "give a checkpoint with --config"
        )
    return ModelConfig.of(own)
