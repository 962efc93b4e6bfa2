"""The config of a checkpoint as transformers reads it, checked against its file."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from ropewalk.errors import RopewalkError
from ropewalk.io.files import check_model_place, not_found, refuse_adapter
from ropewalk.models.config.file import (
    CONFIG_ERRORS,
    class_of,
    config_from_json,
    one_line,
    read_config_file,
    read_model_config,
)
from ropewalk.models.config.model import ModelConfig

log = logging.getLogger("ropewalk")


def read_config(path_or_id: str | os.PathLike[str], trust_remote_code: bool = False) -> ModelConfig:
    """The config of a folder or hub id as transformers reads it; defaults of its class are logged once.

    Returns:
        The config; its ``source`` is the transformers config.

    Raises:
        RopewalkError: if there is no config, it does not mention RoPE, or it contradicts itself.
    """
    from transformers import AutoConfig

    _check_exists(path_or_id)
    # The file is read first: if two values contradict each other, a class silently takes one of them, and the errors
    # of classes name no layer.
    checkpoint = None if trust_remote_code else _of_known_class(str(path_or_id))
    try:
        config = AutoConfig.from_pretrained(path_or_id, trust_remote_code=trust_remote_code)
    except (*CONFIG_ERRORS, OSError) as error:
        if not Path(path_or_id).exists():
            raise not_found(path_or_id, "config.json", error) from error
        raise RopewalkError(f"cannot read a model config from {path_or_id}: {one_line(error)}") from error
    if getattr(config.get_text_config(), "alibi", False):
        raise RopewalkError(f"the checkpoint in {path_or_id} has ALiBi positions and no RoPE")
    read = ModelConfig.of(config)
    # Both are computed on first use; asked for here, so that a contradiction is an error now and not during loading.
    _ = (read.methods, read.layers)
    if type(config).__module__.startswith("transformers."):
        checkpoint = checkpoint or read_model_config(str(path_or_id))
        _log_defaults(str(path_or_id), checkpoint)
        # transformers fills in an original length, and its config no longer shows that the file states none.
        if checkpoint.max_position_embeddings and checkpoint.trained_length != read.trained_length:
            return replace(read, given_length=checkpoint.trained_length)
    return read


def _of_known_class(path_or_id: str) -> ModelConfig | None:
    """The contents of a config file, if transformers has a class for it."""
    raw = read_config_file(path_or_id)
    return None if class_of(raw.get("model_type")) is None else config_from_json(raw, path_or_id)


def _log_defaults(path_or_id: str, checkpoint: ModelConfig) -> None:
    """Log values that come from the class: Llama 2's config.json states no theta, and transformers fills one in."""
    if checkpoint.defaults and path_or_id not in _defaults_logged:
        _defaults_logged.add(path_or_id)
        for key, value in checkpoint.defaults.items():
            log.warning(
                "%s/config.json does not state %s; %s's default of %s is used",
                path_or_id.rstrip("/"),
                key,
                checkpoint.config_class,
                f"{value:g}" if isinstance(value, float) else value,
            )


_defaults_logged: set[str] = set()
"""Checkpoints whose defaults were logged; once in each process is enough."""


def _check_exists(path_or_id: str | os.PathLike[str]) -> None:
    path = Path(path_or_id)
    refuse_adapter(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise RopewalkError(
                f"the folder {path} has no config.json; give a model folder in Hugging Face format"
            )
    elif path.is_file():
        raise RopewalkError(f"{path} is a file; give a model folder in Hugging Face format")
    else:
        check_model_place(path_or_id)
