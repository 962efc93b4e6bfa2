"""Origin of a checkpoint: its name on the Hugging Face Hub, its revision, and what its model card says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.models.checkpoint.card import CARD, card_metadata

KEPT = ("license", "license_name", "license_link", "language")
"""Metadata of a card that also holds for a model that was made from its model."""

_MOST_IN_CARD = 1 << 20


@dataclass(frozen=True)
class Origin:
    """Origin of a checkpoint.

    Attributes:
        name: its id on the Hub, or the last part of its folder's name.
        hub_id: its id on the Hub; None for a folder that is not in the Hub's cache.
        revision: commit on the Hub; None if unknown.
        card: metadata of its model card that also holds for a model made from it, such as the licence.
    """

    name: str
    hub_id: str | None = None
    revision: str | None = None
    card: Mapping[str, Any] = field(default_factory=dict)


def origin_of(path_or_id: str, name: str | None = None) -> Origin:
    """Find out where a checkpoint comes from, from files on this machine alone.

    Args:
        path_or_id: a folder, or a Hub id whose files are in the local cache.
        name: name to use instead of the folder's, such as ``embedded``; None for none.
    """
    folder = cached_folder(path_or_id)
    hub_id = None if Path(path_or_id).is_dir() else path_or_id
    revision = None
    if folder is not None:
        place = folder.resolve()
        # The Hub's cache is models--ORG--NAME/snapshots/REVISION.
        if place.parent.name == "snapshots":
            revision = place.name
            hub_id = hub_id or place.parent.parent.name.removeprefix("models--").replace("--", "/")
    # A published card must not say where folders lie on this machine.
    place = Path(path_or_id).resolve()
    # `extend` writes to OUTPUT/model, so there the parent's name says more.
    own = place.parent.name if place.name == "model" else place.name
    return Origin(hub_id or name or own, hub_id, revision, {} if folder is None else _kept(folder / CARD))


def cached_folder(path_or_id: str) -> Path | None:
    """The folder with a checkpoint's files on this machine; None if there is none.

    Args:
        path_or_id: a folder, or a Hub id whose files may be in the local cache.
    """
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(path_or_id, "config.json")
    except HFValidationError:
        return None
    # The cache also knows files that the Hub does not have, and returns a marker for them.
    return Path(found).parent if isinstance(found, str) else None


def _kept(card: Path) -> dict[str, Any]:
    """The metadata of a card that are kept, as far as they are plain text or lists of it."""
    try:
        with card.open(encoding="utf-8", errors="replace") as file:
            metadata = card_metadata(file.read(_MOST_IN_CARD))
    except OSError:
        return {}
    return {key: metadata[key] for key in KEPT if _is_plain(metadata.get(key))}


def _is_plain(value: Any) -> bool:
    several = value if isinstance(value, list) else [value]
    return bool(several) and all(isinstance(each, str) and each for each in several)
