"""One evaluation from the command line: load or connect, measure, write, print."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ropewalk.cli.output import notes
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.text import documents_of

if TYPE_CHECKING:
    from ropewalk.evaluation import Stores, Subject
    from ropewalk.evaluation.results import TaskResult
    from ropewalk.evaluation.settings import Loading, Serving, Settings
    from ropewalk.search.fitted_table import FittedTable


def table_of(loading: Loading, path: str) -> FittedTable | None:
    """The factor table as it applies to a checkpoint; None where the checkpoint runs as it is."""
    from ropewalk.search.fitted_table import fitted_table

    return None if loading.rope is None else fitted_table(loading.rope, path)


@dataclass(frozen=True)
class Output:
    """What becomes of the results."""

    out: Path | None
    samples_dir: Path | None
    as_json: bool


def measure(
    model: str,
    settings: Settings,
    text: str,
    loading: Loading,
    serving: Serving | None,
    last: int | None,
    output: Output,
) -> None:
    """Measure one model, or the mean of the last checkpoints of a folder; write and print what came out."""
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.evaluation.aggregate import mean_over_checkpoints

    path = resolve_model(model)
    paths = last_checkpoints(Path(path), last) if last is not None else [Path(path)]
    settings = with_lengths(settings, str(paths[0]), table_of(loading, str(paths[0])))
    found: dict[str, list[TaskResult]] = {}
    identities = []
    for each in paths:
        where = str(each) if last is not None else path
        out = output.out / each.name if output.out is not None and last is not None else output.out
        label = f"{each.name}: " if last is not None else ""
        results, identity = _one(where, settings, text, loading, serving, replace(output, out=out), label)
        found[each.name] = results
        identities.append({"name": each.name, **identity} if last is not None else identity)
    results = mean_over_checkpoints(found) if last is not None else found[paths[0].name]
    own = list(zip(identities, found.values(), strict=True)) if last is not None else []
    finish(model, settings, text, identities, results, own, output)


def finish(
    model: str,
    settings: Settings,
    text: str,
    identities: Sequence[Mapping[str, Any]],
    results: Sequence[TaskResult],
    checkpoints: Sequence[tuple[Mapping[str, Any], Sequence[TaskResult]]],
    output: Output,
) -> None:
    """Write and print results.

    Args:
        model, settings, text, output: as for :func:`measure`.
        identities: what each checkpoint's results depend on.
        results: of the model, or the mean of the checkpoints'.
        checkpoints: of a mean, what each is known by and its own results; empty for one model.
    """
    from ropewalk.cli.evaluate_output import show, write
    from ropewalk.evaluation.record import summarise
    from ropewalk.versions import software_versions

    record = {
        **({"checkpoints": list(identities)} if checkpoints else identities[0]),
        "model": model,
        "suites": list(settings.suites),
        "lengths": settings.lengths_of(""),
        "text": text if reads_text(settings) else None,
        "settings": settings_json(settings),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "results": [result.to_json() for result in results],
        "summary": summarise(results, settings.threshold),
        "versions": software_versions(),
    }
    if output.out is not None:
        write(output.out, record, results, checkpoints)
    show(record, results, output)
    if all(result.status != "ok" for result in results):
        raise RunFailure(f"nothing could be run: {results[0].reason}")


def reads_text(settings: Settings) -> bool:
    """Whether a suite reads the losses of documents."""
    from ropewalk.evaluation.settings import LIKELIHOOD_SUITES

    return bool(set(LIKELIHOOD_SUITES) & set(settings.suites))


def settings_json(settings: Settings) -> dict[str, Any]:
    """Settings as JSON values."""
    value = settings.model_dump()
    materials = value.pop("materials")
    materials["harness"] = {name: str(path) for name, path in materials["harness"].items()}
    return {**value, **{k: str(v) if isinstance(v, Path) else v for k, v in materials.items()}}


def last_checkpoints(folder: Path, last: int) -> list[Path]:
    """The last checkpoints of a folder, earliest first, by the numbers in their names.

    Raises:
        RopewalkError: if there are none.
    """
    if not folder.is_dir():
        raise RopewalkError(f"--average needs a folder of checkpoints, and {folder} is none")
    found = [
        each
        for each in folder.iterdir()
        if each.is_dir() and not each.name.startswith(".") and (each / "config.json").is_file()
    ]
    if not found:
        raise RopewalkError(f"{folder} holds no checkpoints: no folder in it has a config.json")
    ordered = sorted(found, key=lambda each: ([int(n) for n in re.findall(r"\d+", each.name)], each.name))
    if len(ordered) < last:
        notes.print(
            f"{folder} holds {len(ordered)} checkpoints, fewer than {last}: all are measured", markup=False
        )
    return ordered[-last:]


def with_lengths(settings: Settings, path: str, table: FittedTable | None = None) -> Settings:
    """Settings with the length that the config or the table states, where none was given and one is needed."""
    from ropewalk.evaluation.settings import HARNESS_SUITES
    from ropewalk.planning.inspection import read_checkpoint as read_config

    if settings.lengths or set(settings.suites) <= {*HARNESS_SUITES, "lm_eval"}:
        return settings
    stated = table.context if table else read_config(path).values.get("max_position_embeddings")
    if stated is None:
        raise RopewalkError(f"the config of {path} states no max_position_embeddings; give --lengths")
    return settings.model_copy(update={"lengths": (int(stated),)})


def _one(
    path: str,
    settings: Settings,
    text: str,
    loading: Loading,
    serving: Serving | None,
    output: Output,
    label: str,
) -> tuple[list[TaskResult], dict[str, Any]]:
    """One model's results, and what they depend on."""
    from ropewalk.cli.progress import ConsoleReporter
    from ropewalk.data import load_tokenizer
    from ropewalk.evaluation.run import check, measured
    from ropewalk.planning.inspection import read_checkpoint as read_config

    if serving is None:
        read_config(path)
    if settings.evaluator is not None:
        read_config(settings.evaluator)
    tokenizer = load_tokenizer(path)
    documents = None
    if reads_text(settings) and serving is None:
        documents = documents_of(text, tokenizer, max(settings.lengths_of("")), settings.rows)
    subject, facts = _subject(path, tokenizer, loading, serving)
    try:
        # Before a folder is made: what is refused leaves nothing behind.
        check(subject, settings, documents)
        with ExitStack() as stack:
            stores, identity = stores_of(path, tokenizer, settings, text, facts, output, stack)
            advance = stack.enter_context(ConsoleReporter(notes).bar(f"{label}evaluation", None))
            results = measured(
                subject,
                settings,
                documents,
                stores,
                progress=lambda what, done, total: advance(done, f"{what} {done}/{total}"),
            )
    finally:
        # The next checkpoint needs the memory of this one.
        del subject
        gc.collect()
    return results, {**identity, **facts}


def _subject(
    path: str, tokenizer: Any, loading: Loading, serving: Serving | None
) -> tuple[Subject, dict[str, Any]]:
    """The model to ask, and what of its set-up decides the results."""
    from ropewalk.evaluation import Subject

    if serving is not None:
        from ropewalk.evaluation.backends import ServerBackend

        backend = ServerBackend(
            serving.url,
            serving.model,
            tokenizer,
            serving.concurrency,
            serving.timeout,
            serving.retries,
            send=serving.send,
            extra=serving.extra,
        )
        backend.check()
        for note in backend.notes:
            notes.print(note, markup=False, soft_wrap=True)
        _warn_of_factors(path)
        told = {"notes": backend.notes} if backend.notes else {}
        return Subject(tokenizer, backend, None, _stated(path)), {"backend": backend.description, **told}
    from ropewalk.attention import check_engine
    from ropewalk.models.load import attention_spec, choose_device, load_model

    where = choose_device(loading.device)
    table = table_of(loading, path)
    loaded = load_model(
        path,
        rope=table.method if table else None,
        engine=loading.engine,
        dtype=loading.dtype,
        exact_rope=loading.exact_rope,
        device=where,
        max_position_embeddings=table.context if table else None,
    )
    subject = Subject.in_memory(loaded, tokenizer, loading.batch_size, loading.prefill_chunk)
    spec = attention_spec(loaded.config.get_text_config(), loaded.device, loaded.dtype, backward=False)
    return subject, {
        "backend": subject.backend.description,
        "engine": check_engine(loading.engine, spec),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "exact_rope": loading.exact_rope,
        **rope_facts(table),
    }


def _warn_of_factors(path: str) -> None:
    """Say what servers make of longrope, which not all of them read, where the model's folder says longrope."""
    from ropewalk.planning.inspection import read_checkpoint as read_config
    from ropewalk.rope import LongRope, methods_from_config
    from ropewalk.rope.config import notes_on

    if not (Path(path) / "config.json").is_file():
        return
    config = read_config(path).values
    methods = methods_from_config(config).values()
    if any(isinstance(method, LongRope) for method in methods):
        for note in notes_on(config):
            notes.say(f"longrope behind a server: {note}")


def rope_facts(table: FittedTable | None) -> dict[str, Any]:
    """What results under a factor table are known by; nothing for a checkpoint as it is."""
    return {"rope": table.record} if table else {}


def _stated(path: str) -> int | None:
    """Tokens that the config beside a tokenizer states; None where there is no config."""
    from ropewalk.planning.inspection import read_checkpoint as read_config

    if not (Path(path) / "config.json").is_file():
        return None
    stated = read_config(path).values.get("max_position_embeddings")
    return None if stated is None else int(stated)


def stores_of(
    path: str,
    tokenizer: Any,
    settings: Settings,
    text: str,
    facts: dict[str, Any],
    output: Output,
    stack: ExitStack,
) -> tuple[Stores, dict[str, Any]]:
    """Where this run keeps what it has, and what its folder is known by."""
    from ropewalk.data import SourceSpec
    from ropewalk.data.read.identity import inputs_identity
    from ropewalk.data.tokens.tokenise import tokenizer_identity
    from ropewalk.evaluation import Stores
    from ropewalk.evaluation.finished import FinishedResults
    from ropewalk.evaluation.identity import model_digest
    from ropewalk.evaluation.predictions import PredictionLog
    from ropewalk.evaluation.record import FINISHED, PREDICTIONS, begin
    from ropewalk.io.digests import digest
    from ropewalk.io.lock import locked
    from ropewalk.search.fitted_table import other_checkpoint

    identity = {
        "model_sha256": None if "address" in facts["backend"] else model_digest(path),
        "tokenizer_sha256": tokenizer_identity(tokenizer)["sha256"],
    }
    told = other_checkpoint(facts["rope"], identity["model_sha256"]) if "rope" in facts else []
    for note in told:
        notes.say(note)
    noted = {**identity, "notes": told} if told else identity
    samples = output.samples_dir or default_samples_folder()
    if output.out is None:
        return Stores(PredictionLog(), FinishedResults(), samples), noted
    # A server may come back at another port, a run on another device or on more of them.
    where = ("address", "device", "parallel")
    decides = {k: v for k, v in facts.items() if k not in (*where, "backend", "notes")}
    decides["backend"] = {k: v for k, v in facts["backend"].items() if k not in where}
    known = {
        **identity,
        **decides,
        # The threshold decides what is said of the results, and no result.
        "settings": {key: value for key, value in settings_json(settings).items() if key != "threshold"},
        "special_tokens": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        "chat_template": digest(tokenizer.chat_template) if settings.chat else None,
        "materials": materials_identity(settings),
    }
    if reads_text(settings):
        known["text"] = inputs_identity([SourceSpec(path=text)])
    stack.enter_context(locked(output.out, "give another --out"))
    begin(output.out, known)
    predictions, finished = PredictionLog(output.out / PREDICTIONS), FinishedResults(output.out / FINISHED)
    return Stores(predictions, finished, samples), noted


def materials_identity(settings: Settings) -> dict[str, Any]:
    """Digests of what the user's paths hold, and of what else decides results without being a setting."""
    from importlib.metadata import version

    from ropewalk.evaluation.identity import model_digest, path_digest
    from ropewalk.evaluation.settings import HARNESS_SUITES
    from ropewalk.evaluation.tasks.lm_eval.retention import harness_installed

    given = settings.materials
    paths = {"essays": given.essays, "harness_tasks": given.harness_tasks, **dict(given.harness)}
    paths |= {
        name: Path(value) for name, value in (("squad", given.squad), ("hotpotqa", given.hotpotqa)) if value
    }
    found: dict[str, Any] = {
        name: path_digest(path.expanduser())
        for name, path in paths.items()
        if path is not None and path.expanduser().exists()
    }
    if settings.evaluator is not None:
        found["evaluator"] = model_digest(settings.evaluator)
    if {*HARNESS_SUITES, "lm_eval"} & set(settings.suites) and harness_installed():
        found["lm_eval"] = version("lm_eval")
    return found


def default_samples_folder() -> Path:
    """Where prompts are kept between runs: below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ropewalk" / "samples"
