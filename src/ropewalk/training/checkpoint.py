"""Checkpoints: a folder that plain transformers loads, with all that an exact resume needs beside it."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ropewalk.errors import RopewalkError
from ropewalk.files import new_folder, write_json
from ropewalk.integrations.models import save_model
from ropewalk.training.optimizer import MasterAdamW

TENSORS = "training_state.safetensors"
POSITION = "training_state.json"
_NAME = re.compile(r"stage(\d+)-step(\d+)")


@dataclass(frozen=True)
class Position:
    """How far a run has come.

    Attributes:
        stage: counted from 0.
        step: optimiser steps of this stage that are done.
        tokens: tokens trained on so far, over all stages.
    """

    stage: int
    step: int
    tokens: int


def save_checkpoint(
    folder: Path, model: Any, tokenizer: Any, optimizer: MasterAdamW, position: Position, keep: int
) -> Path:
    """Write one checkpoint below ``folder``, whole or not at all, then delete all but the latest ``keep``.

    Its weights are the optimiser's float32 masters, whatever dtype the model computes in.
    """
    path = folder / f"stage{position.stage}-step{position.step:06d}"
    with new_folder(path) as partial:
        save_model(model, partial, tokenizer, optimizer.weights(model.state_dict()))
        tensors = {**optimizer.state(), **_rng_state()}
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, partial / TENSORS)
        write_json(partial / POSITION, asdict(position))
    for old in checkpoints_in(folder)[:-keep]:
        shutil.rmtree(old)
    return path


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints below a folder, earliest first."""
    found = [(match, path) for path in folder.glob("stage*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda item: (int(item[0][1]), int(item[0][2])))]


def read_position(path: Path) -> Position:
    """How far the run had come at a checkpoint."""
    try:
        return Position(**json.loads((path / POSITION).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise RopewalkError(f"{path} is no checkpoint of a run: {error}") from error


def restore(path: Path, optimizer: MasterAdamW) -> None:
    """Put the optimiser and the random number generators where they were at a checkpoint."""
    try:
        tensors = load_file(path / TENSORS)
        optimizer.load_state(tensors)
        _restore_rng(tensors)
    except (OSError, KeyError, SafetensorError) as error:
        raise RopewalkError(f"the training state in {path} is damaged or incomplete: {error}") from error


def _rng_state() -> dict[str, Tensor]:
    state = {"rng.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["rng.cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_rng(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["rng.cpu"])
    if torch.cuda.is_available() and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"])
