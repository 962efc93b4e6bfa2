"""run: measure a checkpoint, the mean of several checkpoints, or a model behind a server.

This is the entry point of the evaluation package. It works in one process or under torchrun: only rank 0 reads text,
generates prompts, writes files and reports progress; every rank gets the same result. With an output folder, each
answer and result is saved as it arrives, and a run with the same settings resumes.
"""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ropewalk.errors import RopewalkError
from ropewalk.evaluation.aggregate import mean_over_checkpoints, summarise
from ropewalk.evaluation.backends.served_tokenizer import ServedTokenizer, served_tokenizer
from ropewalk.evaluation.backends.text_counters import TextCounter
from ropewalk.evaluation.model_under_test import ModelUnderTest
from ropewalk.evaluation.option_checks import check_together, shape_for
from ropewalk.evaluation.predictions import PredictionLog
from ropewalk.evaluation.record import EVALUATION, PREDICTIONS, RESULT_LOG, SCORES, EvaluationResult
from ropewalk.evaluation.results import TaskResult, result_log
from ropewalk.evaluation.rows import DrawnDocuments, documents_of
from ropewalk.evaluation.settings import EvaluationSettings, Settings
from ropewalk.evaluation.suite_loop import Stores, check_evaluation, check_served, not_running, run_suites
from ropewalk.evaluation.tasks.lm_eval.suites import harness_installed
from ropewalk.evaluation.tasks.longppl import LongPplSettings
from ropewalk.evaluation.tasks.registry import chosen_suites, chosen_tasks, reads_text
from ropewalk.evaluation.tasks.suite import HarnessSuite
from ropewalk.io.digests import path_digest
from ropewalk.io.files import cache_folder
from ropewalk.io.settings import names_files
from ropewalk.models.checkpoint.digest import model_digest
from ropewalk.runs import Runner, Step, Store, Todo, Work, opened
from ropewalk.versions import is_installed

if TYPE_CHECKING:
    import torch

    from ropewalk.evaluation.backends.server_pool import ServerPool
    from ropewalk.evaluation.backends.serving import Serving
    from ropewalk.models.config.model import ModelConfig
    from ropewalk.models.load import ModelSetup
    from ropewalk.parallel import Mesh, MeshShape, World
    from ropewalk.parallel.context import RunContext
    from ropewalk.rope import RopeMethod


class RopeOverride(Protocol):
    """RoPE that replaces a checkpoint's own, such as a table of rescale factors.

    Attributes:
        method: RoPE method that the model runs with.
        context: longest input in tokens that the model then states.
        record: JSON values that identify this RoPE in results.
    """

    @property
    def method(self) -> RopeMethod: ...

    @property
    def context(self) -> int: ...

    @property
    def record(self) -> dict[str, Any]: ...

    def notes(self, digest: str | None) -> list[str]:
        """Return notes for the user about running weights with this digest under this RoPE."""


RopeOf = Callable[[str], RopeOverride | None]
"""Maps a checkpoint's path to the RoPE that replaces its own, or to None."""


def evaluate(
    config: EvaluationSettings,
    context: RunContext,
    rope_of: RopeOf | None = None,
    present: Callable[[EvaluationResult], None] | None = None,
) -> EvaluationResult:
    """Run an evaluation, and write its results if the context has an output folder.

    Args:
        config: the model and what to measure.
        context: processes, output folder and reporter.
        rope_of: function that takes the path of a checkpoint and returns the RoPE to evaluate it with; if the function
            returns None, the checkpoint keeps its own RoPE.
        present: function that rank 0 calls with the result, for example to draw figures. ``results.json`` is written
            only afterwards, so the figures are complete if this file exists.

    Returns:
        ``results`` has one entry for each task and length. ``score`` is in percent or is a perplexity (``unit`` says
            which), ``ci95`` is the 95 % interval of the score, and ``n`` is the number of samples. ``record`` is the
            content of ``results.json``.

    Raises:
        RopewalkError: before any measurement, if settings contradict each other or do not fit the model.
        EngineError: if the model or its attention engine cannot run the requested evaluation.
        RunFailure: if a server fails or memory runs out. The output folder keeps what was measured before.

    Example:
        >>> from ropewalk import RunContext
        >>> from ropewalk.evaluation import EvaluationSettings, Settings, evaluate
        >>> what = Settings(suites=("passkey",), lengths=(128,), samples=1)
        >>> evaluate(EvaluationSettings(model="embedded", what=what), RunContext()).results[0].task
        'passkey'
    """
    from ropewalk.data.read.embedded import resolve_model

    # Every process has the same settings, so rank 0 checks them and the user sees each error once.
    context.world.on_rank_0(lambda: _check(config, context.world))
    # A wrong address or name should cost a second, so nothing heavy is loaded before the server has answered.
    servers = None if config.serving is None else _found_servers(config.serving, config.model, context)
    what = config.what
    if servers is not None and "suites" not in what.model_fields_set:
        # The other default suite needs losses, which no server gives.
        what = what.model_copy(update={"suites": ("passkey",)})
    if servers is not None:
        servers.require_length(max((n for each in what.suites for n in what.lengths_of(each)), default=0))
    if context.world.size == 1:
        for sentence in not_running(what, servers is not None):
            context.rank_0_reporter.note(sentence)
    counted = None
    if config.serving is not None and servers is not None:
        counted = served_tokenizer(config.model, config.serving.tokenizer, servers)
        context.rank_0_reporter.note(counted.source)
    path = resolve_model(config.model or str(servers and servers.backends[0].model))
    average = config.last if config.average else None
    paths = [Path(path)] if average is None else _last_checkpoints(Path(path), average, context)
    first = path if average is None else str(paths[0])
    settings = context.world.on_rank_0(
        lambda: (
            with_lengths(what, first, None if rope_of is None else rope_of(first))
            if counted is None or servers is None
            else _served_lengths(what, counted.path, servers)
        )
    )
    # A list, so that the one that is measured can be freed before the next is loaded.
    runs = [
        _Run(
            config,
            context,
            str(each) if average else path,
            settings,
            each.name if average else None,
            rope_of,
            servers,
            counted,
        )
        for each in paths
    ]
    with opened(context.output, EVALUATION, context.world) as store:
        runner = Runner(store, context.world, context.rank_0_reporter)
        steps = [each.step() for each in runs]
        # Before a model is loaded: what is done needs none, and other settings are refused at once.
        todo = runner.survey(steps)
        over = all(todo.is_done(step.name) for step in steps)
        if servers is not None and config.serving is not None:
            same, pool = config.serving.same_model, servers
            context.world.on_rank_0(lambda: _refuse_other_servers(store, pool, same, over))
        if over:
            context.rank_0_reporter.note(
                f"the evaluation in {context.output} is already finished; nothing was evaluated"
            )
        for one, step in zip(runs, steps, strict=True):
            one.run(runner, step, todo)
        found = {each.step_name: each.results(runner) for each in runs}
        identities = [runner.values[each.step_name]["identity"] for each in runs]
        if average is not None:
            identities = [{"name": each.name, **known} for each, known in zip(paths, identities, strict=True)]
        results = found[runs[0].step_name] if average is None else mean_over_checkpoints(found)
        several = () if average is None else zip(identities, map(tuple, found.values()), strict=True)
        identity = identities[0] if average is None else {"checkpoints": identities}
        named: dict[str, Any] = {"model": config.model}
        if servers is not None:
            # MODEL may be only its tokenizer.
            named = {"model": str(servers.backends[0].model)}
        record = _record(config, settings, {**named, **identity}, results)
        result = EvaluationResult(record, tuple(results), tuple(several))
        # Results are written once, by rank 0; the other ranks have the same values.
        if context.is_rank_0:
            if present is not None:
                present(result)
            if context.output is not None:
                result.write(context.output)
    return result


def _check(config: EvaluationSettings, world: World) -> None:
    check_together(config, world.size)
    if config.serving is not None:
        check_served(config.what)
    if config.serving is None and not is_installed("torch"):
        raise RopewalkError(
            "a model in memory needs torch, which is not installed; run pip install ropewalk, or give --server"
        )
    if world.size > 1:
        from ropewalk.models.load import choose_device
        from ropewalk.parallel import require_devices

        require_devices(world, choose_device(config.loading.device))


def _record(
    config: EvaluationSettings, settings: Settings, identity: Mapping[str, Any], results: Sequence[TaskResult]
) -> dict[str, Any]:
    from ropewalk.versions import software_versions

    return {
        **identity,
        "suites": list(settings.suites),
        # Lengths given for each suite are not listed here, but in the settings.
        "lengths": settings.lengths_of(""),
        "text": config.text if reads_text(settings) else None,
        "settings": {**settings.to_json(), "samples": settings.sample_counts()},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "results": [result.to_json() for result in results],
        "summary": summarise(results, settings.threshold),
        "versions": software_versions(),
    }


def _last_checkpoints(folder: Path, last: int, context: RunContext) -> list[Path]:
    """Return the last checkpoints of a folder, earliest first, ordered by the numbers in their names.

    Raises:
        RopewalkError: if the folder has no checkpoints.
    """
    if not folder.is_dir():
        raise RopewalkError(f"--average needs a folder of checkpoints, but {folder} is not a folder")
    found = [
        each
        for each in folder.iterdir()
        if each.is_dir() and not each.name.startswith(".") and (each / "config.json").is_file()
    ]
    if not found:
        raise RopewalkError(f"{folder} has no checkpoints: none of its subfolders has a config.json")
    # Numbers compare as numbers: step-900 comes before step-1000.
    ordered = sorted(found, key=lambda each: ([int(n) for n in re.findall(r"\d+", each.name)], each.name))
    if len(ordered) < last:
        context.rank_0_reporter.note(
            f"{folder} has {len(ordered)} checkpoints, fewer than --last {last}; all are measured"
        )
    return ordered[-last:]


def _read_config(path: str) -> ModelConfig:
    """Read a checkpoint's config."""
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.models.config.file import read_model_config

    # The demo model lies in the package; messages keep the name that was given.
    at = resolve_model(path)
    return read_model_config(path, None if at == path else at)


def _stated(path: str) -> int | None:
    """Return the max_position_embeddings of the config beside a tokenizer; None if there is no config."""
    if not (Path(path) / "config.json").is_file():
        return None
    return _stated_length(path)


def _stated_length(path: str) -> int | None:
    """Return a config's max_position_embeddings; without transformers, only one that the file states."""
    if is_installed("transformers"):
        return _read_config(path).max_position_embeddings
    from ropewalk.data.read.embedded import resolve_model
    from ropewalk.models.config.file import read_config_file

    raw = read_config_file(path, resolve_model(path))
    decoder = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    stated = decoder.get("max_position_embeddings")
    return stated if isinstance(stated, int) else None


def with_lengths(settings: Settings, path: str, rope: RopeOverride | None = None) -> Settings:
    """Fill in the longest length that the config or the replacing RoPE states, if lengths are needed and missing."""
    # lm_eval's suites need no length, so they alone do not read the config for one.
    if settings.lengths or all(isinstance(suite, HarnessSuite) for suite in chosen_suites(settings)):
        return settings
    stated = rope.context if rope else _stated_length(path)
    if stated is None:
        raise RopewalkError(f"the config of {path} states no max_position_embeddings; give --lengths")
    return settings.model_copy(update={"lengths": (int(stated),)})


@dataclass(frozen=True)
class _Ready:
    """Values that rank 0 determines before loading.

    Attributes:
        rope: RoPE that replaces the checkpoint's own, if any.
        documents: documents for the suites that read text.
        decided: how the model is loaded; None behind a server.
    """

    rope: RopeOverride | None
    documents: DrawnDocuments | None
    decided: _Decided | None


@dataclass(frozen=True)
class _Decided:
    """What loading makes of the settings: the mesh of a sharded model, the dtype (``auto`` if only the weights state
    it) and the attention engine.
    """

    shape: MeshShape | None
    dtype: str
    engine: str


@dataclass(eq=False)
class _Run:
    """Measures one checkpoint, as one step; ``name`` is that of a checkpoint among several."""

    config: EvaluationSettings
    context: RunContext
    path: str
    settings: Settings
    name: str | None
    rope_of: RopeOf | None
    servers: ServerPool | None = None
    counted: ServedTokenizer | None = None

    loaded: list[tuple[_Ready, ModelUnderTest, Mapping[str, Any]]] = field(default_factory=list)
    """The model while it is measured, with the facts of its setup that results record; emptied afterwards, because the
    next checkpoint needs the memory."""
    measured: list[TaskResult] | None = None
    """Results of this process; None if they were measured before."""
    addresses: list[str] = field(default_factory=list)
    """Addresses of all servers whose answers the folder has."""

    @property
    def step_name(self) -> str:
        return self.name or SCORES

    def step(self) -> Step:
        """The measurement as a step of the run."""
        return Step(self.step_name, lambda: self._identity, (), self._measure, precious=True)

    def run(self, runner: Runner, step: Step, todo: Todo) -> None:
        """Load the model and measure it, unless that is done."""
        try:
            if not todo.is_done(step.name):
                world = self.context.world
                # Rank 0 reads the text for all ranks, so that none of them has other documents.
                ready = world.on_rank_0(self._ready)
                tokenizer = self._tokenizer()
                under_test, facts = self._load(ready, tokenizer)
                self.loaded.append((ready, under_test, facts))
                # Before the step begins, so that rejected settings leave nothing behind.
                world.on_rank_0(partial(check_evaluation, under_test, self.settings, ready.documents))
                del under_test
                if self.servers is not None:
                    # Before the first answer is kept, so that no folder has answers of a server that it does not name.
                    world.on_rank_0(partial(_note_servers, runner.store, self.servers))
                    self.addresses = world.on_rank_0(partial(_noted_servers, runner.store))
            runner.run([step], todo)
        finally:
            self.loaded.clear()
            gc.collect()

    def results(self, runner: Runner) -> list[TaskResult]:
        """The results, of this process or of an earlier one."""
        if self.measured is not None:
            return self.measured
        return [TaskResult.from_json(each) for each in runner.values[self.step_name]["results"]]

    def _measure(self, work: Work) -> dict[str, Any]:
        ((ready, under_test, facts),) = self.loaded
        identity = self.context.world.on_rank_0(partial(self._known, ready))
        stores = self._stores(work)
        label = f"{self.name}: " if self.name else ""
        with self.context.rank_0_reporter.bar(f"{label}evaluation", None) as advance:
            results = run_suites(
                under_test,
                self.settings,
                ready.documents,
                stores,
                lambda what, done, total: advance(done, f"{what} {done}/{total}"),
            )
        self.measured = results
        lacking = [each for each in results if each.status != "ok"]
        if lacking:
            work.cannot(f"{lacking[0].task} was not run: {lacking[0].reason}")
        elif stores.predictions.rejected:
            work.cannot(f"the server rejected {len(stores.predictions.rejected)} prompts")
        if len(self.addresses) > 1:
            facts = {**facts, "backend": {**facts["backend"], "addresses": self.addresses}}
        value = {"results": [each.to_json() for each in results], "identity": {**identity, **facts}}
        # dumps writes NaN and Infinity, which are not JSON; reading them back makes them None.
        plain: dict[str, Any] = json.loads(json.dumps(value), parse_constant=lambda name: None)
        return plain

    def _tokenizer(self) -> Any:
        """The model's tokenizer; of a model on a server, what counts its tokens."""
        from ropewalk.data import load_tokenizer

        if self.counted is not None:
            return self.counted.tokenizer
        return load_tokenizer(self.path, _read_config(self.path).vocab_size)

    def _ready(self) -> _Ready:
        """Check everything that needs no model, and read the documents."""
        from ropewalk.data import SourceSpec

        settings, sharded, served = (
            self.settings,
            self.context.world.size > 1,
            self.config.serving is not None,
        )
        # Check the names first: reading the text may take long.
        chosen_tasks(settings, sharded)
        if not served:
            _read_config(self.path)
        rope = None if self.rope_of is None else self.rope_of(self.path)
        evaluator = settings.of(LongPplSettings).evaluator
        # Read now, so that a wrong --evaluator fails before the text is read and the model is loaded.
        if evaluator is not None:
            _read_config(evaluator)
        documents = None
        if reads_text(settings) and not served:
            # Documents are read once for all suites, so the longest length decides how many.
            longest = max(
                max(settings.lengths_of(suite.name), default=0) for suite in chosen_suites(settings)
            )
            tokenizer = self._tokenizer()
            source = SourceSpec(path=self.config.text)
            documents = documents_of([source], tokenizer, longest, settings.rows, settings.seed)
        ready = _Ready(rope, documents, None if served else self._decided)
        if sharded:
            self._check_sharded(ready)
        return ready

    @cached_property
    def _decided(self) -> _Decided:
        """What loading makes of the settings."""
        import torch

        from ropewalk.attention import check_engine
        from ropewalk.models.config.read import read_config
        from ropewalk.models.load import attention_spec, choose_device

        config, loading, size = read_config(self.path), self.config.loading, self.context.world.size
        dtype = config.dtype if loading.dtype == "auto" else loading.dtype
        shape = None if size == 1 else shape_for(self.config.parallel, size, config.common_heads or 1)
        # In one process, a config without a dtype leaves it to the weights, whose digest is known.
        if shape is not None and getattr(torch, dtype or "", None) is None:
            raise RopewalkError(
                f"the config of {self.path} states no dtype; give --dtype float32 or --dtype bfloat16"
            )
        spec = attention_spec(
            config,
            choose_device(loading.device),
            getattr(torch, dtype or "", torch.float32),
            backward=False,
            ring=shape is not None and shape.ring > 1,
        )
        return _Decided(shape, dtype or "auto", check_engine(loading.engine, spec))

    def _check_sharded(self, ready: _Ready) -> None:
        from ropewalk.data import load_tokenizer
        from ropewalk.evaluation.backends.sharded import ShardedBackend
        from ropewalk.models.config.read import read_config

        # The checks need no weights: an empty backend stands in for the sharded model until it is loaded.
        stated = ready.rope.context if ready.rope else read_config(self.path).max_position_embeddings
        absent = ModelUnderTest(load_tokenizer(self.path), ShardedBackend({}), None, stated, sharded=True)
        check_evaluation(absent, self.settings, ready.documents)

    def _load(self, ready: _Ready, tokenizer: Any) -> tuple[ModelUnderTest, dict[str, Any]]:
        """Load the model, and return it with the facts of its setup that affect the results."""
        if self.config.serving is not None:
            return self._served(tokenizer)
        if ready.decided is not None and ready.decided.shape is not None:
            return self._sharded(ready, ready.decided, ready.decided.shape, tokenizer)
        from ropewalk.attention import check_engine
        from ropewalk.models.config.model import ModelConfig
        from ropewalk.models.load import attention_spec, choose_device, load_model

        loading = self.config.loading
        loaded = load_model(self.path, self._setup(ready), loading.dtype, choose_device(loading.device))
        under_test = ModelUnderTest.in_memory(loaded, tokenizer, loading.batch_size, loading.prefill_chunk)
        spec = attention_spec(ModelConfig.of(loaded.config), loaded.device, loaded.dtype, backward=False)
        # Asked again for the record: this is what `auto` has become.
        engine = check_engine(loading.engine, spec)
        return under_test, self._facts(under_test, ready, engine, loaded.dtype, str(loaded.device))

    def _setup(self, ready: _Ready) -> ModelSetup:
        """Return the model's setup, with the replacing RoPE if there is one."""
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

    def _sharded(
        self, ready: _Ready, decided: _Decided, shape: MeshShape, tokenizer: Any
    ) -> tuple[ModelUnderTest, dict[str, Any]]:
        import torch

        from ropewalk.models.load import choose_device
        from ropewalk.models.sharding import load_sharded
        from ropewalk.parallel import make_mesh

        world = self.context.world
        device, dtype = choose_device(self.config.loading.device), getattr(torch, decided.dtype)
        mesh: Mesh = make_mesh(shape, device.type)
        loaded = load_sharded(self.path, mesh, world, self._setup(ready), dtype)
        under_test = ModelUnderTest.over_mesh(loaded, tokenizer, mesh, world)
        facts = self._facts(under_test, ready, decided.engine, dtype, device.type)
        return under_test, {**facts, "parallel": str(mesh.shape)}

    def _served(self, tokenizer: Any) -> tuple[ModelUnderTest, dict[str, Any]]:
        from ropewalk.evaluation.backends.served import Served

        assert self.counted is not None
        backend, path = self._server(tokenizer), self.counted.path
        known = () if path is None else (*_other_models(backend, path), *_notes_on_servers(path))
        for note in [*backend.notes, *known]:
            self.context.rank_0_reporter.note(note)
        unchecked = [] if path is None else _unchecked(path)
        notes = {"notes": kept} if (kept := [*backend.notes, *unchecked]) else {}
        under_test = ModelUnderTest(tokenizer, backend, None, None if path is None else _stated(path))
        said = [each.served.to_json() for each in backend.backends if each.served != Served()]
        served = {"served": said} if said else {}
        # The last, because the tokens of a word are known only now.
        counted = {"tokenizer": path, "tokens": self.counted.record}
        return under_test, {"backend": backend.description, **counted, **served, **notes}

    def _stores(self, work: Work) -> Stores:
        """Open the stores of the run.

        Only rank 0 uses the folder. The other ranks get a copy of its results and keep new ones in memory.
        """
        samples: Path | None = self.config.samples_dir or default_samples_folder()
        if self.counted is not None and isinstance(self.counted.tokenizer, TextCounter):
            # Without a digest of the tokenizer, nobody knows for whom else the prompts have this length.
            samples = None
        kept: list[Stores] = []

        def logs() -> dict[Any, TaskResult]:
            names = [f"{self.name}/{each}" if self.name else each for each in (PREDICTIONS, RESULT_LOG)]
            # As files: lines that are removed after the end are measured again.
            paths = [None if work.folder is None else work.file(each) for each in names]
            kept.append(Stores(PredictionLog(paths[0]), result_log(paths[1]), samples))
            return kept[0].results.known

        known = self.context.world.on_rank_0(logs)
        if kept:
            return kept[0]
        stores = Stores.in_memory()
        stores.results.known.update(known)
        return stores

    def _known(self, ready: _Ready) -> dict[str, Any]:
        """Digests of what was measured, and notes on it for the user."""
        identity = {name: self._identity[name] for name in ("model_sha256", "tokenizer_sha256")}
        notes = ready.rope.notes(identity["model_sha256"]) if ready.rope else []
        for note in notes:
            self.context.rank_0_reporter.note(note)
        return {**identity, "notes": notes} if notes else identity

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What decides the results, in the order in which a refusal names it; no model is loaded for it."""
        from ropewalk.data import SourceSpec
        from ropewalk.data.read.identity import inputs_identity
        from ropewalk.data.tokens.tokenise import tokenizer_identity
        from ropewalk.io.digests import digest

        settings, served = self.settings, self.config.serving is not None
        tokenizer = self._tokenizer()
        counter = isinstance(tokenizer, TextCounter)
        known: dict[str, Any] = {
            **settings.identity(),
            # Digests of weights take long, and a server has them.
            "model_sha256": None if served else model_digest(self.path),
            "tokenizer_sha256": None if counter else tokenizer_identity(tokenizer)["sha256"],
            **(self._decided_by_server(tokenizer) if served else self._decided_by_loading()),
            **({"tokens": tokenizer.record} if counter else {}),
            # The digest of the tokenizer covers its backend, which does not name BOS and EOS.
            "special_tokens": [tokenizer.bos_token_id, tokenizer.eos_token_id],
            "chat_template": digest(tokenizer.chat_template) if settings.chat else None,
            "haystack_sources": sources_identity(settings),
        }
        if reads_text(settings):
            known["text"] = inputs_identity([SourceSpec(path=self.config.text)])
        return known

    def _decided_by_server(self, tokenizer: Any) -> dict[str, Any]:
        """What a server does that affects results; not its address or the context it was started with."""
        pool = self._server(tokenizer)
        backend = {k: v for k, v in pool.description.items() if k not in ("address", "addresses", "served")}
        # Its name alone does not identify a model: another may be served under the same one.
        roots = {each.served.root for each in pool.backends if each.served.root is not None}
        return {"backend": backend, "the checkpoint on the server": " and ".join(sorted(roots)) or "unknown"}

    def _decided_by_loading(self) -> dict[str, Any]:
        """What loading makes of the settings; not the devices and the mesh, on which an evaluation may change."""
        rope = None if self.rope_of is None else self.rope_of(self.path)
        return {
            "backend": "in memory" if self._decided.shape is None else "sharded",
            "engine": self._decided.engine,
            "dtype": self._decided.dtype,
            "exact_rope": self.config.loading.exact_rope,
            **({"rope": rope.record} if rope else {}),
        }

    def _server(self, tokenizer: Any) -> ServerPool:
        """The servers, checked once with this tokenizer."""
        assert self.servers is not None
        # Before the samples are generated, so that a server that takes no request costs no time.
        if not self.servers.checked:
            self.servers.use(tokenizer)
            self.servers.check()
        return self.servers


def _served_lengths(settings: Settings, path: str | None, servers: ServerPool) -> Settings:
    """Fill in the longest length that the servers and the config, if there is one, state, if lengths are missing."""
    if settings.lengths or all(isinstance(suite, HarnessSuite) for suite in chosen_suites(settings)):
        return settings
    contexts = [each.served.context for each in servers.backends if each.served.context is not None]
    try:
        stated = None if path is None else _read_config(path).max_position_embeddings
    except RopewalkError:
        # A tokenizer needs no config beside it.
        stated = None
    known = [*contexts, *([] if stated is None else [stated])]
    if not known:
        raise RopewalkError("neither the server nor a config says how long a prompt can be; give --lengths")
    return settings.model_copy(update={"lengths": (min(known),)})


def _found_servers(serving: Serving, model: str | None, context: RunContext) -> ServerPool:
    """The servers, each of which says that it serves the model."""
    from ropewalk.evaluation.backends.server_pool import server_pool

    pool = server_pool(serving, report=context.rank_0_reporter.note)
    pool.find(model)
    return pool


SERVERS = "servers"
"""Lines of the folder's history under this name have the addresses of servers, in the order of their addition."""


def _noted_servers(store: Store) -> list[str]:
    """The addresses of all servers that answered prompts of the evaluation in a folder."""
    return [address for line in store.about.history for address in line.get(SERVERS, ())]


def _note_servers(store: Store, pool: ServerPool) -> None:
    known = _noted_servers(store)
    if new := [each.address for each in pool.backends if each.address not in known]:
        store.note_changes([{SERVERS: new}])


def _refuse_other_servers(store: Store, pool: ServerPool, same_model: bool, over: bool) -> None:
    """Raise if an evaluation has answers of servers, and a server at another address is given for it.

    Only the user can know whether the same model runs there: most servers say no more than a name.

    Args:
        store: records of the folder.
        pool: the servers that are given.
        same_model: whether the user says so.
        over: whether the evaluation is finished.
    """
    known = _noted_servers(store)
    new = [each.address for each in pool.backends if each.address not in known]
    if not known or not new or same_model:
        return
    was, now = ", ".join(known), ", ".join(new)
    has = f"{store.folder} has {'the finished evaluation' if over else 'answers'} of the server at {was}"
    raise RopewalkError(
        f"{has}, but --server names {now}; give another --out, or add --same-model if the same model runs at both "
        "addresses"
    )


def _other_models(pool: ServerPool, path: str) -> list[str]:
    """A sentence on each server that says that it loaded a checkpoint of another name."""
    roots = [(each.address, each.served.root) for each in pool.backends]
    # A GGUF file never has the name of the folder that it was made from.
    return [
        f"the server at {address} says that it serves {root}, but the tokenizer is that of {path}; check that they are "
        "the same model"
        for address, root in roots
        if root is not None and not root.endswith(".gguf") and Path(root).name != Path(path).name
    ]


def _unchecked(path: str) -> list[str]:
    """What is not checked in this installation: a line in each run's output would say nothing new of the run."""
    if is_installed("transformers"):
        return []
    more = "" if _stated(path) else ", and no length with the context of its config"
    return [f"transformers is not installed, so no server's RoPE is compared with that of {path}{more}"]


def _notes_on_servers(path: str) -> list[str]:
    """What servers make of the model where that is not what the model is, one sentence each."""
    length = _stated(path)
    if length is None or not is_installed("transformers"):
        return []
    from ropewalk.compatibility import readings, wrong_servers

    return wrong_servers(readings(path), length)


def sources_identity(settings: Settings) -> dict[str, Any]:
    """Return digests of the user's files, and of other inputs that affect results without being settings."""
    from importlib.metadata import version

    read_settings = {name for suite in chosen_suites(settings) for name in suite.settings}
    paths: dict[str, Any] = {}
    for own in (value for name, value in settings if name in read_settings):
        for name, declared in type(own).model_fields.items():
            if names_files(declared):
                paths |= _by_name(name, getattr(own, name))
    found: dict[str, Any] = {
        name: path_digest(Path(path).expanduser())
        for name, path in paths.items()
        # Some settings may be a name instead of a file, such as `hub` for SQuAD.
        if path is not None and Path(path).expanduser().exists()
    }
    evaluator = settings.of(LongPplSettings).evaluator
    if evaluator is not None:
        found["evaluator"] = model_digest(evaluator)
    harness = any(isinstance(suite, HarnessSuite) for suite in chosen_suites(settings))
    # The prompts of its tasks may change from version to version.
    if harness and harness_installed():
        found["lm_eval"] = version("lm_eval")
    return found


def _by_name(name: str, given: Any) -> Mapping[str, Any]:
    """Return the values of a setting by name: a mapping as it is, list items numbered, other values by ``name``."""
    if isinstance(given, Mapping):
        return given
    several = enumerate(given) if isinstance(given, list | tuple) else None
    return {name: given} if several is None else {f"{name}.{number}": each for number, each in several}


def default_samples_folder() -> Path:
    """Return the folder that caches prompts between runs, in the user's cache folder."""
    return cache_folder("samples")
