"""A cache of generated samples: one file for each task and length, shared by all models with the same tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ropewalk.data.tokens.tokenise import tokenizer_identity
from ropewalk.errors import RopewalkError
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.samples import Sample, Task
from ropewalk.io.digests import digest
from ropewalk.io.files import field_fault, parse_json, replacing

SAMPLES_FORMAT = 1
"""Version of the sample files and generators; increase it with every change that alters a task's prompts."""


def sample_identity(task: Task, encoder: PromptEncoder, length: int, count: int, seed: int) -> dict[str, Any]:
    """Return everything that the samples depend on, as JSON values."""
    return {
        "format": SAMPLES_FORMAT,
        "suite": task.suite,
        "task": task.name,
        "settings": dict(task.settings()),
        "tokenizer": tokenizer_identity(encoder.tokenizer)["sha256"],
        # The tokenizer's digest covers its backend, which does not say which token is BOS.
        "bos": encoder.tokenizer.bos_token_id,
        "chat_template": digest(encoder.tokenizer.chat_template) if encoder.chat else None,
        # Samples of prompts without a template are those of earlier versions.
        **({"system": encoder.system, "thinking": encoder.thinking} if encoder.chat else {}),
        **({"as_turns": True} if encoder.as_turns else {}),
        "length": length,
        "count": count,
        "seed": seed,
    }


def cached_samples(
    task: Task, encoder: PromptEncoder, length: int, count: int, seed: int, folder: Path | None
) -> Iterator[Sample]:
    """Read the samples of a task and length from the cache, or generate and cache them.

    Args:
        task: generates the samples.
        encoder: encodes the prompts and counts their tokens.
        length: maximum number of tokens of prompt and answer together.
        count: number of samples.
        seed: random seed.
        folder: folder of cached samples; None disables the cache.

    Raises:
        RopewalkError: if the length is too short, or the folder or a file in it cannot be used.
    """
    if folder is None:
        yield from task.samples(encoder, length, count, seed)
        return
    identity = sample_identity(task, encoder, length, count, seed)
    # The digest covers everything that decides the samples, so a changed task never reads another's file.
    path = folder / f"{task.suite}-{task.name}-{length}-{digest(identity)[:16]}.jsonl"
    # Two processes may both generate them: each renames a file of its own into place, and both are equal.
    if not path.is_file():
        made = task.samples(encoder, length, count, seed)
        with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
            file.write(json.dumps(identity) + "\n")
            written = 0
            for sample in made:
                file.write(json.dumps(sample.to_json()) + "\n")
                written += 1
            # The count at the end shows a reader that the file is complete.
            file.write(json.dumps({"samples": written}) + "\n")
    yield from _read_samples(path, identity)


def _read_samples(path: Path, identity: dict[str, Any]) -> Iterator[Sample]:
    try:
        with path.open("rb") as file:
            if parse_json(file.readline(), strict=True) != identity:
                raise RopewalkError(
                    f"the samples in {path} were generated with settings that do not match the file's name; delete "
                    "the file to generate the samples again"
                )
            value: Any = {}
            read = 0
            # One line at a time, because a file of long prompts may not fit in memory.
            for line in file:
                value = parse_json(line, strict=True)
                if not isinstance(value, dict):
                    raise TypeError("a line is not a JSON object")
                # Every line is a sample but the last, which has their number.
                if "samples" not in value:
                    yield Sample.from_json(value)
                    read += 1
            if value.get("samples") != read:
                raise RopewalkError(f"{path} is incomplete; delete the file to generate the samples again")
    # RopewalkError is a ValueError, which the next clause would wrap.
    except RopewalkError:
        raise
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RopewalkError(
            f"cannot read the samples in {path} ({field_fault(error)}); delete the file to generate the samples again"
        ) from error
