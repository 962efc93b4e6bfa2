"""run: measure a checkpoint, the mean of several, or a model behind a server; the door of this room.

In one process or under torchrun: rank 0 alone reads text, makes prompts, writes files and talks; every rank gets the
same result. A run with a folder keeps each answer and result there, and the same settings go on where it was.
"""

from __future__ import annotations

import gc
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import BaseModel

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.aggregate import mean_over_checkpoints, summarise
from ropewalk.evaluation.backends.server import Serving
from ropewalk.evaluation.measure import Stores, check_evaluation, measured
from ropewalk.evaluation.model_under_test import ModelUnderTest
from ropewalk.evaluation.record import EvaluationResult
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.rows import documents_of
from ropewalk.evaluation.settings import OWN, EvaluationSettings, Settings, unread
from ropewalk.evaluation.store import (
    PREDICTIONS,
    RESULT_CACHE,
    PredictionLog,
    ResultCache,
    begin,
    model_digest,
    path_digest,
)
from ropewalk.evaluation.tasks.lm_eval.suites import harness_installed
from ropewalk.evaluation.tasks.longppl import LongPplSettings
from ropewalk.evaluation.tasks.registry import chosen_suites, chosen_tasks, reads_text
from ropewalk.evaluation.tasks.suite import HarnessSuite
from ropewalk.io.lock import locked
from ropewalk.io.settings import Option, names_files

if TYPE_CHECKING:
    import torch

    from ropewalk.models.config import ModelConfig
    from ropewalk.models.load import ModelSetup
    from ropewalk.parallel import Mesh, MeshShape, World
    from ropewalk.parallel.context import RunContext
    from ropewalk.rope import RopeMethod

GO_ON = "the same command goes on where it was"
"""What a user can do after a process was lost."""


class RopeOverride(Protocol):
    """RoPE that a checkpoint is run with in place of its own, such as a table of rescale factors.

    Attributes:
        method: that the model gets.
        context: tokens that it then states as its longest input.
        record: what results under it are known by, as JSON values.
    """

    @property
    def method(self) -> RopeMethod: ...

    @property
    def context(self) -> int: ...

    @property
    def record(self) -> dict[str, Any]: ...

    def notes(self, digest: str | None) -> list[str]:
        """What is to be said of it beside weights with a digest."""


RopeOf = Callable[[str], RopeOverride | None]
"""From a checkpoint's path to the RoPE that it is run with; None for its own."""


def run(
    config: EvaluationSettings,
    context: RunContext,
    rope_of: RopeOf | None = None,
    present: Callable[[EvaluationResult], None] | None = None,
) -> EvaluationResult:
    """Measure what the settings name; write it where the context has an output folder.

    Args:
        config: model and what to measure.
        context: processes, output folder, reporter.
        rope_of: RoPE to run checkpoints with in place of their own.
        present: called on rank 0 with the result before results.json is written: what shows it in the same folder is
            then complete where that stands.

    Raises:
        RopewalkError: for settings that do not go together or with the model, before anything is measured.
        EngineError: if the model or its engine cannot take such rows.
        RunFailure: if a server or the memory gives out; the folder holds what was done.

    Example:
        >>> from ropewalk.parallel.context import RunContext
        >>> what = Settings(suites=("passkey",), lengths=(128,), samples=1)
        >>> run(EvaluationSettings(model="embedded", what=what), RunContext()).results[0].task
        'passkey'
    """
    from ropewalk.data.read.embedded import resolve_model

    # Every process reads the same settings; what is wrong with them is said once.
    context.world.on_rank_0(lambda: _check(config, context.world))
    path = resolve_model(config.model)
    average = config.last if config.average else None
    paths = [Path(path)] if average is None else _last_checkpoints(Path(path), average, context)
    first = path if average is None else str(paths[0])
    settings = context.world.on_rank_0(lambda: _settings_for(config, first, rope_of))
    found: dict[str, list[TaskResult]] = {}
    identities: list[dict[str, Any]] = []
    for each in paths:
        where = path if average is None else str(each)
        own = context
        if average is not None and context.output is not None:
            own = replace(context, output=context.output / each.name)
        label = f"{each.name}: " if average is not None else ""
        one = _Run(config, own, where, settings, label, rope_of)
        found[each.name], identity = one.measured()
        identities.append(identity if average is None else {"name": each.name, **identity})
    results = found[paths[0].name] if average is None else mean_over_checkpoints(found)
    several = () if average is None else zip(identities, map(tuple, found.values()), strict=True)
    identity = identities[0] if average is None else {"checkpoints": identities}
    record = _record(config, settings, identity, results)
    result = EvaluationResult(record, tuple(results), tuple(several))
    if context.is_rank_0:
        if present is not None:
            present(result)
        if context.output is not None:
            result.write(context.output)
    return result


def _check(config: EvaluationSettings, world: World) -> None:
    from ropewalk.models.load import choose_device
    from ropewalk.parallel import require_devices

    check_together(config, world.size)
    if world.size > 1:
        require_devices(world, choose_device(config.loading.device))


def _record(
    config: EvaluationSettings, settings: Settings, identity: Mapping[str, Any], results: Sequence[TaskResult]
) -> dict[str, Any]:
    from ropewalk.versions import software_versions

    return {
        **identity,
        "model": config.model,
        "suites": list(settings.suites),
        "lengths": settings.lengths_of(""),
        "text": config.text if reads_text(settings) else None,
        "settings": settings.to_json(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "results": [result.to_json() for result in results],
        "summary": summarise(results, settings.threshold),
        "versions": software_versions(),
    }


def check_together(config: EvaluationSettings, processes: int) -> None:
    """Raise for settings that do not go together, or not with so many processes.

    Args:
        config: of the run.
        processes: that torchrun started; 1 without it.
    """
    if config.serving is not None and config.average:
        raise RopewalkError(
            "--average measures checkpoints one after the other; a server holds one: leave one out"
        )
    if config.serving is not None and config.loading.rope is not None:
        raise RopewalkError(
            f"--rope {config.loading.rope} is for a model in memory; a server has the factors of the folder that it "
            "loaded, which ropewalk export writes"
        )
    _check_effect(config.what)
    shape = None if config.parallel is None else degrees_in(config.parallel)
    if processes == 1:
        if shape is not None:
            raise RopewalkError(
                f"--parallel {config.parallel} needs several processes; start them with "
                f"{torchrun_line(shape.world_size, str(config.parallel))}"
            )
        return
    from ropewalk.models.load import choose_device

    for option, given in (("--average", config.average), ("--server", config.serving is not None)):
        if given:
            raise RopewalkError(
                f"{option} is for one process, and torchrun started {processes}; leave torchrun out"
            )
    if choose_device(config.loading.device).index is not None:
        raise RopewalkError(
            f"--device {config.loading.device} names one device for {processes} processes; say cuda"
        )


def _check_effect(settings: Settings) -> None:
    """Raise for settings of suites that are not asked for."""
    values = dict(settings)
    for name, field, readers in unread(values, settings.suites):
        value = getattr(values[name], field)
        said = ",".join(map(str, value)) if isinstance(value, tuple | dict) else value
        raise RopewalkError(
            f"{option_name(OWN[name], field)} {said} has no effect without the suite {' or '.join(readers)}; add it "
            "to --suite"
        )


def option_name(kind: type[BaseModel], field: str) -> str:
    """The option of a setting: ``--short-context``, or the name that it says itself."""
    said = [each.name for each in kind.model_fields[field].metadata if isinstance(each, Option) and each.name]
    return said[0] if said else f"--{field.replace('_', '-')}"


def torchrun_line(processes: int, parallel: str) -> str:
    """The command that starts so many processes."""
    return f"torchrun --nproc-per-node {processes} -m ropewalk eval MODEL --parallel {parallel}"


def degrees_in(text: str) -> MeshShape:
    """The mesh of an option such as ``shard=2,sequence=4``; a degree that is not named is 1.

    Raises:
        RopewalkError: naming the part that is no KEY=DEGREE.
    """
    from ropewalk.parallel import MeshShape
    from ropewalk.parallel.mesh import DIMENSIONS

    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, degree = (each.strip() for each in part.partition("="))
        number = degree.isascii() and degree.isdigit() and int(degree) >= 1
        if name not in DIMENSIONS or name in degrees or not number:
            raise RopewalkError(
                f"--parallel {text!r} holds {part.strip()!r}; write KEY=DEGREE once each, with commas between, of "
                f"{', '.join(DIMENSIONS)} and degrees from 1: sequence=4"
            )
        degrees[name] = int(degree)
    return MeshShape(**degrees)


def shape_for(parallel: str | None, processes: int, num_heads: int) -> MeshShape:
    """The mesh that was asked for, or all processes as ``sequence``.

    Args:
        parallel: as :func:`degrees_in` reads it; None for none.
        processes: that torchrun started.
        num_heads: query heads of the model.

    Raises:
        RopewalkError: if there are more or fewer processes than degrees, or the heads cannot be divided.
    """
    from ropewalk.parallel import MeshShape

    shape = MeshShape(sequence=processes) if parallel is None else degrees_in(parallel)
    if shape.world_size != processes:
        raise RopewalkError(
            f"--parallel {parallel} makes {shape.world_size} processes and torchrun started {processes}; say "
            f"{torchrun_line(shape.world_size, parallel or '')}"
        )
    if num_heads % shape.sequence:
        sequence = math.gcd(num_heads, shape.sequence)
        rest = shape.world_size // sequence
        raise RopewalkError(
            f"the model's {num_heads} attention heads cannot be divided over sequence={shape.sequence}; say --parallel "
            f"ring={rest},sequence={sequence} or --parallel shard={rest},sequence={sequence}"
        )
    return shape


def _last_checkpoints(folder: Path, last: int, context: RunContext) -> list[Path]:
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
        context.told.note(f"{folder} holds {len(ordered)} checkpoints, fewer than {last}: all are measured")
    return ordered[-last:]


def _read_config(path: str) -> ModelConfig:
    """A checkpoint's config."""
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.models.config_file import read_model_config

    at = resolve_model(path)
    return read_model_config(path, None if at == path else at)


def _stated(path: str) -> int | None:
    """Tokens that the config beside a tokenizer states; None where there is no config."""
    if not (Path(path) / "config.json").is_file():
        return None
    return _read_config(path).max_position_embeddings


def _settings_for(config: EvaluationSettings, path: str, rope_of: RopeOf | None) -> Settings:
    return with_lengths(config.what, path, None if rope_of is None else rope_of(path))


def with_lengths(settings: Settings, path: str, rope: RopeOverride | None = None) -> Settings:
    """Settings with the length that the config or another RoPE states, where none was given and one is needed."""
    if settings.lengths or all(isinstance(suite, HarnessSuite) for suite in chosen_suites(settings)):
        return settings
    stated = rope.context if rope else _read_config(path).max_position_embeddings
    if stated is None:
        raise RopewalkError(f"the config of {path} states no max_position_embeddings; give --lengths")
    return settings.model_copy(update={"lengths": (int(stated),)})


@dataclass(frozen=True)
class _Ready:
    """What rank 0 finds out before a model is loaded; ``shape``, ``dtype`` and ``engine`` of a sharded one."""

    settings: Settings
    rope: RopeOverride | None
    documents: list[Any] | None
    shape: MeshShape | None = None
    dtype: torch.dtype | None = None
    engine: str = ""


@dataclass(frozen=True)
class _Run:
    """The measurement of one checkpoint."""

    config: EvaluationSettings
    context: RunContext
    path: str
    settings: Settings
    label: str
    rope_of: RopeOf | None

    def measured(self) -> tuple[list[TaskResult], dict[str, Any]]:
        """Its results, and what they depend on."""
        from ropewalk.data import load_tokenizer

        world = self.context.world
        ready = world.on_rank_0(self._ready)
        tokenizer = load_tokenizer(self.path)
        under_test, facts = self._loaded(ready, tokenizer)
        try:
            # Before a folder is made: what is refused leaves nothing behind.
            world.on_rank_0(partial(check_evaluation, under_test, ready.settings, ready.documents))
            with ExitStack() as stack:
                stores, identity = self._stores(ready, tokenizer, facts, stack)
                advance = stack.enter_context(self.context.told.bar(f"{self.label}evaluation", None))
                results = measured(
                    under_test,
                    ready.settings,
                    ready.documents,
                    stores,
                    lambda what, done, total: advance(done, f"{what} {done}/{total}"),
                )
        finally:
            # The next checkpoint needs the memory of this one.
            del under_test
            gc.collect()
        return results, {**identity, **facts}

    def _ready(self) -> _Ready:
        """All that can be refused without the model is refused here."""
        from ropewalk.data import load_tokenizer

        settings, sharded = self.settings, self.context.world.size > 1
        # Before any text is read, which may take long.
        chosen_tasks(settings, sharded)
        if self.config.serving is None:
            _read_config(self.path)
        rope = None if self.rope_of is None else self.rope_of(self.path)
        ready = self._ready_sharded(settings, rope) if sharded else _Ready(settings, rope, None)
        evaluator = settings.of(LongPplSettings).evaluator
        if evaluator is not None:
            _read_config(evaluator)
        if not (reads_text(settings) and self.config.serving is None):
            documents = None
        else:
            longest = max(
                max(settings.lengths_of(suite.name), default=0) for suite in chosen_suites(settings)
            )
            tokenizer = load_tokenizer(self.path)
            documents = documents_of(self.config.text, tokenizer, longest, settings.rows)
        ready = replace(ready, documents=documents)
        if sharded:
            self._check_sharded(ready)
        return ready

    def _ready_sharded(self, settings: Settings, rope: RopeOverride | None) -> _Ready:
        import torch

        from ropewalk.attention import check_engine
        from ropewalk.models.load import attention_spec, choose_device, read_config

        config, loading = read_config(self.path), self.config.loading
        assert config.num_heads is not None
        shape = shape_for(self.config.parallel, self.context.world.size, config.num_heads)
        dtype = getattr(torch, (config.dtype if loading.dtype == "auto" else loading.dtype) or "", None)
        if dtype is None:
            raise RopewalkError(
                f"the config of {self.path} states no dtype; give --dtype float32 or bfloat16"
            )
        device = choose_device(loading.device)
        spec = attention_spec(config, device, dtype, backward=False, ring=shape.ring > 1)
        return _Ready(settings, rope, None, shape, dtype, check_engine(loading.engine, spec))

    def _check_sharded(self, ready: _Ready) -> None:
        from ropewalk.data import load_tokenizer
        from ropewalk.evaluation.backends.sharded import ShardedBackend
        from ropewalk.models.load import read_config

        stated = ready.rope.context if ready.rope else read_config(self.path).max_position_embeddings
        absent = ModelUnderTest(load_tokenizer(self.path), ShardedBackend({}), None, stated, sharded=True)
        check_evaluation(absent, ready.settings, ready.documents)

    def _loaded(self, ready: _Ready, tokenizer: Any) -> tuple[ModelUnderTest, dict[str, Any]]:
        """The model to ask, and what of its set-up decides the results."""
        if self.config.serving is not None:
            return self._served(self.config.serving, tokenizer)
        if ready.shape is not None:
            return self._sharded(ready, tokenizer)
        from ropewalk.attention import check_engine
        from ropewalk.models.config import ModelConfig
        from ropewalk.models.load import attention_spec, choose_device, load_model

        loading = self.config.loading
        loaded = load_model(self.path, self._setup(ready), loading.dtype, choose_device(loading.device))
        under_test = ModelUnderTest.in_memory(loaded, tokenizer, loading.batch_size, loading.prefill_chunk)
        spec = attention_spec(ModelConfig.of(loaded.config), loaded.device, loaded.dtype, backward=False)
        engine = check_engine(loading.engine, spec)
        return under_test, self._facts(under_test, ready, engine, loaded.dtype, str(loaded.device))

    def _setup(self, ready: _Ready) -> ModelSetup:
        """How the model is to run: with another RoPE where one was given."""
        from ropewalk.models.load import ModelSetup

        rope, loading = ready.rope, self.config.loading
        return ModelSetup(
            rope.method if rope else None,
            rope.context if rope else None,
            loading.engine,
            loading.exact_rope,
        )

    def _facts(
        self, under_test: ModelUnderTest, ready: _Ready, engine: str, dtype: torch.dtype, device: str
    ) -> dict[str, Any]:
        return {
            "backend": under_test.backend.description,
            "engine": engine,
            "dtype": str(dtype).removeprefix("torch."),
            "device": device,
            "exact_rope": self.config.loading.exact_rope,
            **({"rope": ready.rope.record} if ready.rope else {}),
        }

    def _sharded(self, ready: _Ready, tokenizer: Any) -> tuple[ModelUnderTest, dict[str, Any]]:
        from ropewalk.models.load import choose_device
        from ropewalk.models.sharding import load_sharded
        from ropewalk.parallel import make_mesh

        world = self.context.world
        assert ready.shape is not None
        assert ready.dtype is not None
        device = choose_device(self.config.loading.device)
        mesh: Mesh = make_mesh(ready.shape, device.type)
        loaded = load_sharded(self.path, mesh, world, self._setup(ready), ready.dtype)
        under_test = ModelUnderTest.over_mesh(loaded, tokenizer, mesh, world)
        facts = self._facts(under_test, ready, ready.engine, ready.dtype, device.type)
        return under_test, {**facts, "parallel": str(mesh.shape)}

    def _served(self, serving: Serving, tokenizer: Any) -> tuple[ModelUnderTest, dict[str, Any]]:
        from ropewalk.evaluation.backends import ServerBackend

        backend = ServerBackend(serving, tokenizer)
        backend.check()
        for note in [*backend.notes, *_notes_on_factors(self.path)]:
            self.context.told.note(note)
        told = {"notes": backend.notes} if backend.notes else {}
        under_test = ModelUnderTest(tokenizer, backend, None, _stated(self.path))
        return under_test, {"backend": backend.description, **told}

    def _stores(
        self, ready: _Ready, tokenizer: Any, facts: dict[str, Any], stack: ExitStack
    ) -> tuple[Stores, dict[str, Any]]:
        """Where the run keeps what it has, and what its folder is known by.

        The folder is rank 0's; the others know what it knows, and keep what is new in memory.
        """
        kept: list[Stores] = []

        def opened() -> tuple[dict[str, Any], dict[Any, Any]]:
            stores, identity = self._opened(ready, tokenizer, facts, stack)
            kept.append(stores)
            return identity, stores.results.known

        identity, known = self.context.world.on_rank_0(opened)
        if kept:
            return kept[0], identity
        stores = Stores.in_memory()
        stores.results.known.update(known)
        return stores, identity

    def _opened(
        self, ready: _Ready, tokenizer: Any, facts: dict[str, Any], stack: ExitStack
    ) -> tuple[Stores, dict[str, Any]]:
        from ropewalk.data import SourceSpec
        from ropewalk.data.read.identity import inputs_identity
        from ropewalk.data.tokens.tokenise import tokenizer_identity
        from ropewalk.io.digests import digest

        settings, out = ready.settings, self.context.output
        identity: dict[str, Any] = {
            "model_sha256": None if self.config.serving is not None else model_digest(self.path),
            "tokenizer_sha256": tokenizer_identity(tokenizer)["sha256"],
        }
        told = ready.rope.notes(identity["model_sha256"]) if ready.rope else []
        for note in told:
            self.context.told.note(note)
        noted = {**identity, "notes": told} if told else identity
        samples = self.config.samples_dir or default_samples_folder()
        if out is None:
            return Stores(PredictionLog(), ResultCache(), samples), noted
        # A server may come back at another port, a run on another device or on more of them.
        where = ("address", "device", "parallel")
        decides = {k: v for k, v in facts.items() if k not in (*where, "backend", "notes")}
        decides["backend"] = {k: v for k, v in facts["backend"].items() if k not in where}
        known = {
            **identity,
            **decides,
            "settings": settings.identity(),
            "special_tokens": [tokenizer.bos_token_id, tokenizer.eos_token_id],
            "chat_template": digest(tokenizer.chat_template) if settings.chat else None,
            "haystack_sources": sources_identity(settings),
        }
        if reads_text(settings):
            known["text"] = inputs_identity([SourceSpec(path=self.config.text)])
        stack.enter_context(locked(out, "give another --out"))
        begin(out, known)
        return Stores(PredictionLog(out / PREDICTIONS), ResultCache(out / RESULT_CACHE), samples), noted


def _notes_on_factors(path: str) -> list[str]:
    """What servers make of longrope, which not all of them read, where the model's folder says longrope."""
    from ropewalk.rope import LongRope
    from ropewalk.rope.config import notes_on

    if not (Path(path) / "config.json").is_file():
        return []
    config = _read_config(path)
    if not any(isinstance(method, LongRope) for method in config.methods.values()):
        return []
    return [f"longrope behind a server: {note}" for note in notes_on(config.values)]


def sources_identity(settings: Settings) -> dict[str, Any]:
    """Digests of what the user's paths hold, and of what else decides results without being a setting."""
    from importlib.metadata import version

    asked = {name for suite in chosen_suites(settings) for name in suite.settings}
    paths: dict[str, Any] = {}
    for own in (value for name, value in settings if name in asked):
        for name, field in type(own).model_fields.items():
            if names_files(field):
                paths |= _by_name(name, getattr(own, name))
    found: dict[str, Any] = {
        name: path_digest(Path(path).expanduser())
        for name, path in paths.items()
        if path is not None and Path(path).expanduser().exists()
    }
    evaluator = settings.of(LongPplSettings).evaluator
    if evaluator is not None:
        found["evaluator"] = model_digest(evaluator)
    harness = any(isinstance(suite, HarnessSuite) for suite in chosen_suites(settings))
    if harness and harness_installed():
        found["lm_eval"] = version("lm_eval")
    return found


def _by_name(name: str, given: Any) -> Mapping[str, Any]:
    """The values of a setting: a mapping's by their own names, the other ones by the setting's."""
    if isinstance(given, Mapping):
        return given
    several = enumerate(given) if isinstance(given, list | tuple) else None
    return {name: given} if several is None else {f"{name}.{number}": each for number, each in several}


def default_samples_folder() -> Path:
    """Where prompts are kept between runs: below the user's cache folder."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "ropewalk" / "samples"


evaluate = run
"""The door by its name at the top of the package."""
