"""Samples on disk: made once for a tokenizer and its settings, read by every model that has this tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ropewalk.data.tokens.tokenise import tokenizer_identity
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.sample import Sample, Task
from ropewalk.io.digests import digest
from ropewalk.io.files import parse_json, replacing

FORMAT = 1
"""Of the files and of the generators: what changes the prompts of a task raises it."""


def sample_identity(task: Task, encoder: PromptEncoder, length: int, count: int, seed: int) -> dict[str, Any]:
    """All that samples depend on, as JSON values."""
    return {
        "format": FORMAT,
        "suite": task.suite,
        "task": task.name,
        "settings": dict(task.settings()),
        "tokenizer": tokenizer_identity(encoder.tokenizer)["sha256"],
        # Which token is BOS stands beside the backend, not in it.
        "bos": encoder.tokenizer.bos_token_id,
        "chat_template": digest(encoder.tokenizer.chat_template) if encoder.chat else None,
        "length": length,
        "count": count,
        "seed": seed,
    }


def stored_samples(
    task: Task, encoder: PromptEncoder, length: int, count: int, seed: int, folder: Path | None
) -> Iterator[Sample]:
    """The samples of a task and length: read where they were made before, else made and kept.

    Args:
        task, encoder, length, count, seed: as in :meth:`Task.samples`.
        folder: where samples are kept; None keeps none.

    Raises:
        RopewalkError: if the length is too short, or the folder or a file in it cannot be used.
    """
    if folder is None:
        yield from task.samples(encoder, length, count, seed)
        return
    identity = sample_identity(task, encoder, length, count, seed)
    path = folder / f"{task.suite}-{task.name}-{length}-{digest(identity)[:16]}.jsonl"
    if not path.is_file():
        made = task.samples(encoder, length, count, seed)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(identity) + "\n")
            written = 0
            for sample in made:
                file.write(json.dumps(sample.to_json()) + "\n")
                written += 1
            file.write(json.dumps({"samples": written}) + "\n")
    yield from _read(path, identity)


def _read(path: Path, identity: dict[str, Any]) -> Iterator[Sample]:
    try:
        with path.open("rb") as file:
            if parse_json(file.readline(), strict=True) != identity:
                raise RopewalkError(f"{path} holds other samples than its name says; delete it")
            value: Any = {}
            read = 0
            for line in file:
                value = parse_json(line, strict=True)
                if not isinstance(value, dict):
                    raise TypeError("a line of it is not a JSON object")
                if "samples" not in value:
                    yield Sample.from_json(value)
                    read += 1
            if value.get("samples") != read:
                raise RopewalkError(f"{path} ends early; delete it to make the samples again")
    except RopewalkError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RopewalkError(
            f"cannot read the samples in {path} ({error}); delete it to make them again"
        ) from error
