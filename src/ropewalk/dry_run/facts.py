"""What a proposed recipe is made from: what was seen of the documents, and the machine that trains."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.attention.engines.capabilities import LEAST_CAPABILITY, Capability
from ropewalk.data import read_documents
from ropewalk.data.read.embedded import resolve_model
from ropewalk.data.read.files import is_named, list_folder, names_records, plain_stem
from ropewalk.data.read.first_lengths import first_lengths
from ropewalk.data.read.records import NoTextFieldError
from ropewalk.data.settings import SourceSpec
from ropewalk.data.tokens.tokenise import lacks_tokenizer
from ropewalk.dry_run.settings import HardwareSettings
from ropewalk.errors import RopewalkError
from ropewalk.models.checkpoint.weights import weight_files
from ropewalk.parallel.context import RunContext
from ropewalk.planning.practice import Practice

MOST_PARTS = 20
"""Most files or folders of a folder that are named as possible sources."""

TEXT_FIELDS = ("text", "content", "document", "body", "raw_content")
"""Usual names of the field with the text; the first is taken wherever a record has it."""


@dataclass(frozen=True)
class DocumentFacts:
    """What was seen of the documents.

    Attributes:
        read: documents read.
        complete: whether these are all.
        tokens: their tokens, estimated from some of them, or from their characters without a tokenizer.
        longest: tokens of the longest of those read, estimated likewise.
    """

    read: int
    complete: bool
    tokens: int
    longest: int


@dataclass(frozen=True)
class MachineFacts:
    """The machine that the recipe is for.

    Attributes:
        cores: CPU cores of the one that it was written on.
        gpus: CUDA devices; 0 on a machine without.
        gpu_bytes: memory of one of them, bytes.
        memory_bytes: memory of the machine itself, bytes.
        named: GPU model, if it was named; None for this machine.
        capability: compute capability of the GPUs.
    """

    cores: int
    gpus: int
    gpu_bytes: int
    memory_bytes: int
    named: str | None = None
    capability: Capability = LEAST_CAPABILITY


def with_text_field(path: str, given: str | None) -> SourceSpec:
    """The source with the text field that its first document has.

    Raises:
        RopewalkError: if the source cannot be read, or no usual name or several are fields of its first record.
    """
    found: list[SourceSpec] = []
    refused: NoTextFieldError | None = None
    for name in (given,) if given else TEXT_FIELDS:
        spec = SourceSpec(path=path, text_field=name)
        try:
            next(iter(read_documents([spec])), None)
        except NoTextFieldError as error:
            refused = refused or error
            continue
        # A file without fields is read whatever the name.
        if name == TEXT_FIELDS[0] or given:
            return spec
        found.append(spec)
    if len(found) == 1:
        return found[0]
    several = f" (probably {' or '.join(repr(each.text_field) for each in found)})" if found else ""
    raise RopewalkError(f"{refused}{several}") from refused


def parts_of(spec: SourceSpec) -> tuple[str, tuple[str, ...]] | None:
    """What could be sources of their own in a folder: ``folder`` or ``file`` and the names, or None.

    Folders beside each other are, and a few files of many records under names of their own; files that are numbered
    (``part-0.jsonl``) are parts of one source.
    """
    folder = Path(spec.path).expanduser()
    if is_named(spec.path) or not folder.is_dir():
        return None
    files = list_folder(folder).files
    inside = [path.relative_to(folder) for path in files]
    folders = tuple(dict.fromkeys(path.parts[0] for path in inside if len(path.parts) > 1))
    records = all(map(names_records, files))
    if records and 1 < len(folders) <= MOST_PARTS and all(len(path.parts) > 1 for path in inside):
        return "folder", folders
    names = tuple(plain_stem(path) for path in files)
    if records and not folders and 1 < len(names) <= MOST_PARTS:
        numberless = {re.sub(r"\d+", "", name) for name in names}
        return ("file", names) if len(numberless) == len(names) else None
    return None


def remark_on_parts(spec: SourceSpec) -> str | None:
    """How to make the parts of a folder sources of their own, in a sentence without its full stop; None if none."""
    parts = parts_of(spec)
    if parts is None:
        return None
    kind, names = parts
    return (
        f"{spec.path} has the {kind}s {', '.join(names)}; with source_per: {kind}, each is a source with its own "
        "statistics and weight"
    )


def look_at(specs: Sequence[SourceSpec], tokenizer: Any, context: RunContext) -> DocumentFacts:
    """Read the first documents, and count the tokens of some of these.

    Args:
        specs: the documents.
        tokenizer: the model's tokenizer; None if there is none here.
        context: reporter of progress.

    Raises:
        RopewalkError: as for :func:`ropewalk.data.read_documents`.
    """
    lengths, complete = first_lengths(specs, tokenizer, context)
    return DocumentFacts(len(lengths), complete, int(sum(lengths)), int(max(lengths, default=0)))


def document_warnings(found: DocumentFacts | None, target: int, practice: Practice) -> Iterator[str]:
    """Why training on the documents would teach little: none is as long as the target, or published runs took more.

    Args:
        found: what was seen of the documents; None if there are none.
        target: tokens of a row of the last stage.
        practice: what published runs of such models took.
    """
    if found is None:
        return
    if found.longest < target:
        which = "these documents" if found.complete else f"the first {found.read:,} documents"
        yield (
            f"None of {which} reaches {target:,} tokens (the longest has about {found.longest:,}), so the model will "
            "see no dependencies as long as the target."
        )
    if found.complete and found.tokens < practice.least_tokens:
        yield f"About {found.tokens:,} tokens are few: {practice.tokens_words}."


def this_machine() -> MachineFacts:
    """Cores and GPUs of this machine."""
    import torch

    from ropewalk.training.preflight import device_bytes

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else 0
    return MachineFacts(os.cpu_count() or 1, gpus, int(memory), device_bytes(torch.device("cpu")))


def named_machine(hardware: HardwareSettings) -> MachineFacts:
    """A machine of these GPUs, with what data sheets say of them."""
    known = hardware.cluster
    return MachineFacts(
        os.cpu_count() or 1,
        hardware.gpus or known.ranks_per_node,
        known.bytes_per_rank,
        known.host_bytes,
        hardware.gpu,
        known.capability,
    )


def folder_of(model: str) -> Path:
    """The folder of a model that is named by a folder or a file of it; no folder is there for an id of the Hub."""
    path = Path(resolve_model(model)).expanduser()
    return path.parent if path.is_file() else path


def missing_parts(model: str) -> tuple[str, ...]:
    """What a run needs and a model's folder does not have: weights, a tokenizer; none for a model on the Hub.

    Args:
        model: folder, file or Hub id.
    """
    folder = folder_of(model)
    if not folder.is_dir():
        return ()
    missing = [] if weight_files(folder) else [f"weights (model.safetensors) in {folder}"]
    if lacks_tokenizer(folder):
        missing.append(f"a tokenizer (tokenizer.json) in {folder}")
    return tuple(missing)


def gpus_of(machine: MachineFacts) -> str:
    """The GPUs in words: ``8 GPUs of this machine``, ``8 GPUs (h100)``."""
    count = f"{machine.gpus} GPU{'s' * (machine.gpus != 1)}"
    return f"{count} of this machine" if machine.named is None else f"{count} ({machine.named})"
