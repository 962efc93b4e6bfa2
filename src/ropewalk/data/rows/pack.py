"""Pack sources into rows on disk; runs are resumable, cached, and can be shared between machines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ropewalk.data.mixture.gzip_ratio import drop_by_gzip_ratio, gzip_report
from ropewalk.data.mixture.mixture import mix
from ropewalk.data.mixture.settings import MixtureSettings
from ropewalk.data.mixture.synthetic import VERSION as SYNTHETIC_VERSION
from ropewalk.data.mixture.synthetic import synthetic_report
from ropewalk.data.read.files import hidden_entries
from ropewalk.data.read.identity import inputs_identity
from ropewalk.data.read.input_splits import InputSplit, plan_input_splits
from ropewalk.data.read.readers import ReadingCounts, training_documents
from ropewalk.data.rows.assemble import PlannedRows, pack_documents, refuse_no_rows
from ropewalk.data.rows.manifest import LIBRARIES, description, length_states
from ropewalk.data.rows.packed_rows import (
    FORMAT,
    FORMAT_VERSION,
    WORK,
    PackedRows,
    is_packed,
    open_rows,
    packed_folders,
)
from ropewalk.data.rows.special_tokens import DocumentEnds, enclosed_lengths
from ropewalk.data.rows.weave import WovenReader, weave
from ropewalk.data.rows.writer import (
    RowsWriter,
    Writing,
    begin,
    release,
    row_files,
    write_rows,
)
from ropewalk.data.settings import (
    LATER_FIELDS,
    PackConfig,
    PackingSettings,
    RowPolicies,
    SourceSpec,
    WorkSettings,
)
from ropewalk.data.tokens.chat import required_template
from ropewalk.data.tokens.corpus import Corpus, tokenise_splits
from ropewalk.data.tokens.samples import sample_tokens
from ropewalk.data.tokens.special_ids import special_ids
from ropewalk.data.tokens.split import hold_out
from ropewalk.data.tokens.tokenise import (
    Encoder,
    Progress,
    SpecialTokens,
    backend_tokenizer,
    load_tokenizer,
    tokenizer_identity,
)
from ropewalk.errors import RopewalkError
from ropewalk.io.digests import digest
from ropewalk.io.files import refuse_url
from ropewalk.runs.executors import on_ray
from ropewalk.runs.tasks import Executor
from ropewalk.versions import software_versions


@dataclass(frozen=True)
class _Job:
    """A packing run with its tokenizer loaded and its sources cut into input splits.

    Attributes:
        config: configuration of the run.
        tokenizer: a transformers tokenizer with a fast backend.
        splits: the input splits of all sources.
        depends: everything that the rows depend on, as JSON values, with their ``digest``.
    """

    config: PackConfig
    tokenizer: Any
    splits: tuple[InputSplit, ...]
    depends: dict[str, Any]


def prepare_rows(
    config: PackConfig,
    cache_dir: str | Path,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> PackedRows:
    """Pack rows into a cache, or open them if the cache already contains them.

    Rows are stored in a subfolder of ``cache_dir`` whose name is a digest of everything they depend on: the sources'
    files, the tokenizer, the settings, the mixture, the validation split and the version of the format. Tokenised
    documents are cached beside them, so packing rows of another length does not tokenise again.

    Args:
        config: configuration of the run. Its shard and token store are ignored: one machine packs all rows, and
            ``cache_dir`` holds the tokens.
        cache_dir: folder of the cache; created if missing.
        tokenizer: the config's tokenizer, if it is already loaded.
        progress: called with the numbers of documents and tokens so far; not called if the rows exist.
        note: called with a sentence on the disk that large rows will take.

    Raises:
        RopewalkError: as in :func:`pack_rows`.
    """
    cache = Path(cache_dir).expanduser()
    job = _job(config.alone(), tokenizer, cache)
    return _pack(job, cache / job.depends["digest"], cache / "tokens", progress, None, note)


def held_out_texts(
    config: PackConfig, cache_dir: str | Path, *, tokenizer: Any = None, progress: Progress | None = None
) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Hashes of the texts that :func:`prepare_rows` holds out for validation, for rows of other documents.

    Args:
        config, cache_dir, tokenizer, progress: as for :func:`prepare_rows`. Documents whose tokens are in the cache are
            not tokenised again.

    Returns:
        The hashes in ascending order, and the identity of the documents as in a manifest's ``inputs``.

    Raises:
        RopewalkError: as in :func:`pack_rows`.
    """
    cache = Path(cache_dir).expanduser()
    job = _job(config.alone(), tokenizer, cache)
    corpus = tokenise_splits(
        job.splits,
        job.tokenizer,
        cache / "tokens",
        work=job.config.work,
        progress=progress,
        gzip_ratios=config.mixture.drops,
    )
    try:
        split = hold_out(
            corpus, job.config.validation, special_ids(job.tokenizer, config.rows), job.config.withheld
        )
        return tuple(sorted(corpus.hashes[split.validation].tolist())), job.depends["inputs"]
    finally:
        corpus.close()


def pack_rows(
    config: PackConfig,
    folder: str | Path,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
    written: Writing | None = None,
    note: Callable[[str], None] | None = None,
) -> PackedRows:
    """Read, tokenise, mix and pack documents into a folder, resuming an interrupted call.

    Files are written atomically. A run that was killed and resumed writes the same bytes as an uninterrupted one, and
    so do several machines that share the work.

    Args:
        config: configuration of the run, including this machine's shard.
        folder: folder of the rows; must be new, empty, or contain the same rows.
        tokenizer: the config's tokenizer, if it is already loaded.
        progress: called with the numbers of documents and tokens so far.
        written: called with the number of rows on disk, and their total.
        note: called with a sentence on the disk that large rows will take.

    Raises:
        RopewalkError: for invalid sources or settings, if the tokens do not fill one row, if a file changes while it
            is read, or if the folder contains something else or cannot be written.
    """
    folder = Path(folder).expanduser()
    store = config.work.token_store
    tokens = folder / WORK / "tokens" if store is None else store.expanduser()
    return _pack(_job(config, tokenizer, folder, tokens), folder, tokens, progress, written, note)


def _job(config: PackConfig, tokenizer: Any, *folders: Path) -> _Job:
    """Check a packing run before anything is written; ``folders`` are those that it will write to."""
    for folder in folders:
        refuse_url(folder, "rows and token shards")
        _refuse_circles(config.sources, folder)
    tokenizer = load_tokenizer(config.tokenizer) if tokenizer is None else tokenizer
    # For its error alone: a tokenizer that lacks a required token is refused before anything is read.
    config.rows.bos_policy(special_ids(tokenizer, config.rows))
    splits = plan_input_splits(config.sources)
    # For its error alone: ids of another tokenizer are refused before anything is written.
    samples = sample_tokens(config.sources, tokenizer)
    if (samples and config.mixture.drops) or config.mixture.synthetic_share is not None:
        # For its error alone too.
        Encoder.of(tokenizer).decode(np.zeros(0, np.int32))
    _read_first_documents(splits)
    depends = {
        "format_version": FORMAT_VERSION,
        "inputs": inputs_identity(config.sources),
        "settings": config.rows.model_dump(),
        # Settings without effect, such as the seed if the corpus is read unchanged, must not change the digest.
        "mixing": None if config.mixture.unchanged else config.mixture.model_dump(exclude={"preset"}),
        "specs": [_spec(source) for source in config.sources],
        "tokenizer": tokenizer_identity(tokenizer),
        "validation": config.validation.model_dump(),
    }
    refuse_cut_documents(config.sources, config.rows, config.mixture)
    if any(source.messages_field for source in config.sources):
        depends["chat_template"] = required_template(tokenizer).digest
    if any("kind" in split.identity for split in splits):
        # Earlier versions packed such files as single texts.
        depends["kinds"] = "by content"
    if config.mixture.synthetic_share is not None:
        depends["synthetic"] = SYNTHETIC_VERSION
    if config.withheld:
        depends["withheld"] = config.withheld
    # Round-trip through JSON so that later comparisons with the file see lists instead of tuples.
    depends = {"digest": digest(depends)[:32], **json.loads(json.dumps(depends))}
    return _Job(config, tokenizer, splits, depends)


def _read_first_documents(splits: Sequence[InputSplit]) -> None:
    """Read the first document of each source, for its errors alone; a dataset on the Hub would have to be opened."""
    seen: set[SourceSpec] = set()
    for split in splits:
        if split.files and split.spec not in seen and any(training_documents(split, ReadingCounts())):
            seen.add(split.spec)


def _spec(source: SourceSpec) -> dict[str, Any]:
    """A source as JSON values; without unset later fields, so that rows of earlier versions are found."""
    return source.model_dump(exclude=set(LATER_FIELDS) - source.later_fields.keys())


def refuse_cut_documents(
    sources: Sequence[SourceSpec], policies: RowPolicies, mixture: MixtureSettings | None = None
) -> None:
    """Raise if packing could cut or shuffle a chat, a document with spans of loss, or one with a synthetic task.

    Documents that are too long for a row get no task, so those with a task may be packed beside others that are split.

    Raises:
        RopewalkError: with the setting.
    """
    masked = any(source.masks_loss for source in sources)
    if not masked and (mixture is None or mixture.synthetic_share is None):
        return
    what = "documents with spans of loss" if masked else "documents with synthetic tasks"
    if any(source.messages_field for source in sources):
        what = "chats"
    for name, bad, instead in (
        ("packing", policies.packing == "sequential", "best_fit"),
        (
            "long_documents",
            masked and policies.long_documents == "split",
            "skip, or to truncate, which keeps only the start of one that is longer than a row",
        ),
        ("interleave", policies.interleave is not None, "false"),
    ):
        if bad:
            value = getattr(policies, name) if name != "interleave" else "true"
            raise RopewalkError(
                f"{name} {value} would cut {what}, which must stay whole; set {name} to {instead}"
            )


def _pack(
    job: _Job,
    folder: Path,
    tokens: Path,
    progress: Progress | None,
    written: Writing | None,
    note: Callable[[str], None] | None,
) -> PackedRows:
    if is_packed(folder) and begin(folder, job.depends):
        return open_rows(folder)
    # Connected before the folder is begun, so that a cluster that cannot take part leaves nothing behind.
    with _executor(job.config.work, [folder, tokens]) as executor:
        return _pack_on(executor, job, folder, tokens, progress, written, note)


@contextmanager
def _executor(work: WorkSettings, folders: Sequence[Path]) -> Iterator[Executor | None]:
    """Where the settings say that tasks run; None for as many processes of this machine as are worth it."""
    if work.engine != "ray":
        yield None
        return
    # Other versions may give other tokens.
    with on_ray(work.address, work.workers, folders, ["tokenizers"]) as cluster:
        yield cluster


def _pack_on(
    executor: Executor | None,
    job: _Job,
    folder: Path,
    tokens: Path,
    progress: Progress | None,
    written: Writing | None,
    note: Callable[[str], None] | None,
) -> PackedRows:
    config, tokenizer = job.config, job.tokenizer
    if begin(folder, job.depends):
        return open_rows(folder)
    try:
        corpus = tokenise_splits(
            job.splits,
            tokenizer,
            tokens,
            work=config.work,
            executor=executor,
            progress=progress,
            gzip_ratios=config.mixture.drops,
        )
        # The folder's name and manifest state the inputs as they were at the start.
        if inputs_identity(config.sources) != job.depends["inputs"]:
            raise RopewalkError(
                "a source file changed during packing; pack again when no program writes to the file"
            )
        try:
            packed, contents, validation, reader = _planned(config, tokenizer, corpus)
        except RopewalkError:
            # Refused before anything was written for these settings, so the folder is free for others.
            release(folder)
            raise
        contents["counts"]["reading"]["hidden_entries"] = hidden_entries(config.sources)
        manifest = {
            "format": FORMAT,
            **job.depends,
            "tokenizer": {"name_or_path": config.tokenizer, **job.depends["tokenizer"]},
            **contents,
            "versions": software_versions(LIBRARIES),
        }
        writer = RowsWriter(folder, manifest, row_files(packed))
        try:
            return write_rows(
                writer, packed, corpus, reader, validation, config.work, executor, written, note
            )
        finally:
            corpus.close()
    except (OSError, RopewalkError):
        # Another process may have finished the same rows and removed the folder of unfinished work.
        if is_packed(folder):
            shutil.rmtree(folder / WORK, ignore_errors=True)
            return open_rows(folder)
        raise


def _planned(
    config: PackConfig, tokenizer: Any, corpus: Corpus
) -> tuple[PlannedRows, dict[str, Any], NDArray[np.int64], WovenReader]:
    """Plan all rows.

    Returns:
        The plan, its part of the manifest, the numbers of the held-out documents, and what reads the documents' tokens.
    """
    settings = config.rows
    # Held out before mixing, so that a repeated document is never on both sides.
    special = special_ids(tokenizer, settings)
    split = hold_out(corpus, config.validation, special, config.withheld)
    tags = None if settings.tag is None else tag_tokens(tokenizer, settings.tag, corpus.sources, special)
    documents, mixture, dropped = split.training, None, None
    if corpus.gzip_ratios is not None and corpus.zlib is not None:
        kept, found = drop_by_gzip_ratio(
            corpus.lengths[documents],
            corpus.source_ids[documents],
            corpus.sources,
            corpus.gzip_ratios[documents],
            config.mixture,
        )
        documents, dropped = documents[kept], gzip_report(found, config.mixture, corpus.zlib)
    # Before mixing, so that the mixture is that of the rows.
    documents = _of_kind(documents, corpus, settings, special, tags)
    if not config.mixture.as_is:
        mixture = mix(corpus.lengths[documents], corpus.source_ids[documents], corpus.sources, config.mixture)
        documents = documents[mixture.documents]
    # Compute before planning: both need memory per document, and this memory is free again afterwards.
    others = documents if documents is not split.training else None
    lengths = length_states(corpus, split.training, others, settings.context)
    woven = None
    if config.mixture.synthetic_share is None:
        reader, numbers, ends = WovenReader(corpus.reader, len(corpus)), documents, _ends(corpus, documents)
    else:
        woven = weave(corpus, documents, Encoder.of(tokenizer), config.mixture, settings, special, tags)
        reader, numbers, ends = woven.reader, woven.documents, woven.ends
    packed = pack_documents(numbers, ends, corpus.sources, settings, special, tags)
    counts = packed.counts(ends)
    refuse_no_rows(packed, counts, len(split.validation) + split.withheld_duplicates)
    contents = {**description(corpus, split, mixture, documents, counts), **lengths}
    if dropped is not None:
        contents["gzip_ratios"] = dropped
    if woven is not None:
        contents["counts"]["mixture"] |= {
            "synthetic_tokens": woven.added,
            "synthetic_cut_tokens": woven.cut,
        }
        contents["synthetic"] = synthetic_report(woven.counts, config.mixture, woven.added, woven.cut)
    return packed, contents, split.validation, reader


def _ends(corpus: Corpus, documents: NDArray[np.int64]) -> DocumentEnds:
    return DocumentEnds(
        corpus.lengths[documents],
        corpus.first_ids[documents],
        corpus.last_ids[documents],
        corpus.source_ids[documents],
    )


def _of_kind(
    documents: NDArray[np.int64],
    corpus: Corpus,
    settings: PackingSettings,
    special: SpecialTokens,
    tags: Sequence[NDArray[np.int32]] | None,
) -> NDArray[np.int64]:
    """The documents whose lengths the settings accept, in order; the same array if they accept every length."""
    if settings.kind is None:
        return documents
    lengths = enclosed_lengths(_ends(corpus, documents), special, tags)
    kept = np.ones(len(documents), bool)
    if settings.documents_above is not None:
        kept &= lengths > settings.documents_above
    if settings.documents_up_to is not None:
        kept &= lengths <= settings.documents_up_to
    if not kept.any():
        raise RopewalkError(
            f"there are no {settings.kind} to pack: the {len(documents):,} documents have "
            f"{int(min(lengths, default=0)):,} to {int(max(lengths, default=0)):,} tokens; give other documents"
        )
    return documents[kept]


def tag_tokens(
    tokenizer: Any, tag: str, sources: Sequence[str], special: SpecialTokens
) -> list[NDArray[np.int32]]:
    """Encode the tag of each source, without special tokens.

    Raises:
        RopewalkError: if a source's tag gives no token, or a BOS or EOS token.
    """
    # Use the same backend as for documents, the one that the tokenizer's identity covers.
    backend, tags = backend_tokenizer(tokenizer), []
    for source in sources:
        ids = backend.encode(tag.format(source=source), add_special_tokens=False).ids
        if not ids:
            raise RopewalkError(
                f"the tag {tag!r} produces no token for the source {source!r}; change the tag"
            )
        if {special.bos, special.eos} & set(ids):
            raise RopewalkError(
                f"the tag {tag!r} contains a BOS or EOS token for the source {source!r}; change the tag"
            )
        tags.append(np.array(ids, np.int32))
    return tags


def _refuse_circles(specs: Sequence[SourceSpec], cache: Path) -> None:
    """Raise if a source folder contains packed rows, or contains the folder that rows are written to."""
    for spec in specs:
        path = Path(spec.path).expanduser()
        if not path.is_dir():
            continue
        if cache.resolve().is_relative_to(path.resolve()):
            raise RopewalkError(
                f"the output folder {cache} lies inside the source {spec.path}; choose a folder outside it"
            )
        if is_packed(path) or packed_folders(path):
            raise RopewalkError(f"{spec.path} contains packed rows; give the original documents instead")
