"""Finding a checkpoint's ``config.json`` and reading it strictly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ropewalk.errors import RopewalkError
from ropewalk.io.files import check_model_place, not_found


def read_config_file(model: str, at: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The JSON object in a folder's ``config.json``, in a file, or in that of a model on the Hugging Face Hub.

    Args:
        model: folder, path of the file itself, or hub id.
        at: where it lies, if ``model`` is a name that only the caller knows.

    Raises:
        RopewalkError: if there is none, or it is no JSON object, or holds a key twice.
    """
    return _read_json(_find(model, at))


def _find(model: str, at: str | os.PathLike[str] | None) -> Path:
    path = Path(model if at is None else at).expanduser()
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise RopewalkError(f"{model} has no config.json")
    elif not path.is_file():
        check_model_place(model)
        path = _from_hub(model)
    return path


def _from_hub(model: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise not_found(model, "config.json", error) from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object)
    except (OSError, ValueError, RecursionError) as error:
        raise RopewalkError(f"cannot read {path} as JSON: {error}") from error
    if not isinstance(config, dict):
        raise RopewalkError(f"{path} must hold a JSON object, got {type(config).__name__}")
    return config


def _object(pairs: list[tuple[str, Any]]) -> Any:
    """A JSON object; Python would silently keep the last of two values. transformers writes infinities as one."""
    if len(pairs) == 1 and pairs[0][0] == "__float__":
        return float(pairs[0][1])
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values and values[key] != value:
            raise RopewalkError(
                f"the config has {key} twice, {values[key]!r} and {value!r}; remove the one that is wrong"
            )
        values[key] = value
    return values
