"""evaluate_sharded: perplexity and teacher-forced retrieval with a model and rows that no single device holds.

Answers are not generated here: an answer is right where each of its tokens is the likeliest one after the prompt and
the true tokens before it. Greedy generation says a token exactly where it is the likeliest after all before; as long
as it has said the true ones, the two read the same context, so it says the whole answer exactly where forcing finds
every token right. At the first that is not, generation goes another way, and both call the answer wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import Tensor, tensor

from ropewalk.errors import EngineError, RopewalkError
from ropewalk.evaluation.backends import Answer, Request
from ropewalk.evaluation.backends.decoding import check_ids, pinned, refuse_unpinned
from ropewalk.evaluation.fitting import LengthTooShort
from ropewalk.evaluation.model_under_test import Subject
from ropewalk.evaluation.predictions import prompt_digest
from ropewalk.evaluation.prompt import PromptEncoder
from ropewalk.evaluation.results import TaskResult
from ropewalk.evaluation.rows import EvaluationRows, Ids, evaluation_rows
from ropewalk.evaluation.run import Stores, SuiteProgress, check_stated
from ropewalk.evaluation.sample import Sample, Task
from ropewalk.evaluation.sample_store import stored_samples
from ropewalk.evaluation.settings import GENERATED_SUITES, Settings, check_names
from ropewalk.evaluation.sharded_rows import forced_row, sharded_likeliest, sharded_losses
from ropewalk.evaluation.tasks.needle import forced_ids, forced_task, next_group
from ropewalk.evaluation.tasks.passkey import PasskeyTask
from ropewalk.evaluation.tasks.perplexity import default_bins, perplexity_of, perplexity_task
from ropewalk.evaluation.tasks.registry import FORCED, known_tasks, needle_grid
from ropewalk.models.losses import LossModel
from ropewalk.parallel import Mesh, World

RUNS = {"perplexity": "perplexity", "passkey": FORCED, "needle": FORCED}
"""Suites that several processes measure together, and their one task there."""

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class ShardedBackend:
    """Stands where a backend is asked for; it answers nothing, since a sharded model does not generate."""

    description: dict[str, Any]

    @classmethod
    def of(cls, model: LossModel, mesh: Mesh) -> ShardedBackend:
        dtype = str(model.model.dtype).removeprefix("torch.")
        device = model.device.type
        return cls(
            {"kind": "sharded", "model": type(model.model).__name__, "dtype": dtype, "device": device}
            | {"parallel": str(mesh.shape)}
        )

    def answers(self, requests: Sequence[Request]) -> Iterator[Answer]:
        """Refused.

        Raises:
            EngineError: always.
        """
        raise EngineError(f"a model over several processes generates no answers; {elsewhere('passkey')}")


def evaluate_sharded(
    model: LossModel,
    tokenizer: Any,
    settings: Settings,
    documents: Sequence[Ids] | None,
    mesh: Mesh,
    progress: SuiteProgress | None = None,
    world: World | None = None,
    stores: Stores | None = None,
) -> list[TaskResult]:
    """Measure a model that is sharded over a mesh; every rank calls this with the same, and gets the same.

    Args:
        model: from ``load_sharded``.
        tokenizer: the model's own.
        settings: what to measure, as :func:`check_sharded` allows.
        documents: int ``[tokens]`` each, without special tokens, for perplexity; None leaves it out, and says so.
        mesh: of the model.
        progress: called after each row and each prompt, on the ranks that give one.
        world: rank 0 alone makes the prompts and tells them to the others; without it every rank makes them.
        stores: results that are known, the same on every rank, and where new ones go; and the folder of prompts.

    Returns:
        Of each suite, in order, one result a length: as ``evaluate`` gives them in one process, within rounding.
        Passkey is teacher-forced too, and its task is named so: ``forced``.

    Raises:
        RopewalkError: as :func:`check_sharded`.
        EngineError: if the model or its engine cannot take such rows.
        RunFailure: if a memory gives out, or logits are no numbers.
    """
    stated = getattr(model.model.config.get_text_config(), "max_position_embeddings", None)
    check_sharded(tokenizer, settings, documents, stated)
    refuse_unpinned(model.model)
    stores = stores or Stores.in_memory()
    encoder = PromptEncoder(tokenizer, settings.chat)
    run = _Run(model, encoder, settings, documents, mesh, progress, world, stores, stated)
    suites = chosen_suites(settings)
    return [run.result(suite, length) for suite in suites for length in settings.lengths_of(suite)]


def elsewhere(suite: str) -> str:
    """What to do with a suite that several processes cannot measure."""
    # A server gives answers, and neither losses nor the likelihoods that lm_eval asks for.
    server = ", or against a server with --server" if suite in GENERATED_SUITES else ""
    return f"run it in one process{server}"


def chosen_suites(settings: Settings) -> list[str]:
    """The suites to measure, in order, each of which has one task here.

    Raises:
        RopewalkError: for a suite or task that several processes do not measure together, or if nothing is left.
    """
    suites: list[str] = list(settings.suites)
    for suite in suites:
        if suite not in RUNS:
            raise RopewalkError(f"several processes do not measure the suite {suite}: {elsewhere(suite)}")
    known = {suite: [*names, *({RUNS[suite]} - {*names})] for suite, names in known_tasks(settings).items()}
    check_names(
        "task", [*settings.tasks, *settings.exclude], [name for names in known.values() for name in names]
    )
    for suite, names in known.items():
        for name in names:
            if name in settings.tasks and name != RUNS[suite]:
                raise RopewalkError(
                    f"several processes do not measure the task {name}, but {RUNS[suite]} of the suite {suite}: name "
                    f"that; for {name} {elsewhere(suite)}"
                )
    left = [suite for suite in suites if RUNS[suite] not in settings.exclude]
    if not left:
        raise RopewalkError(f"--exclude {','.join(settings.exclude)} leaves no task to run")
    return left


def check_sharded(
    tokenizer: Any, settings: Settings, documents: Sequence[Ids] | None, stated: int | None
) -> None:
    """Raise for all that :func:`evaluate_sharded` would refuse; no model is needed.

    Args:
        tokenizer, settings, documents: as there.
        stated: the config's max_position_embeddings; None where it states none.

    Raises:
        RopewalkError: for unknown names, tasks that need generation, lengths too short for a prompt or beyond the
            config, or too little text.
    """
    suites = chosen_suites(settings)
    encoder = PromptEncoder(tokenizer, settings.chat)
    if set(suites) - {"perplexity"}:
        encoder.check_alphabet()
    for suite in suites:
        lengths = settings.lengths_of(suite)
        if not lengths:
            raise RopewalkError(f"the suite {suite} needs lengths in tokens; none were given")
        check_stated(Subject(tokenizer, ShardedBackend({}), None, stated), max(lengths), settings)
        for length in lengths:
            if suite != "perplexity":
                _check_length(_task(suite, settings), encoder, length, settings)
            elif documents is not None:
                _rows(tokenizer, settings, documents, length)


def _check_length(task: Task, encoder: PromptEncoder, length: int, settings: Settings) -> None:
    if task.unavailable() is not None:
        return
    try:
        task.samples(encoder, length, settings.samples, settings.seed)
    except LengthTooShort as error:
        raise RopewalkError(
            f"prompts of the suite {task.suite} do not fit in {length} tokens with this tokenizer; the shortest length "
            f"is {error.shortest}"
        ) from error


def _task(suite: str, settings: Settings) -> Task:
    return PasskeyTask() if suite == "passkey" else needle_grid(settings)


def _rows(tokenizer: Any, settings: Settings, documents: Sequence[Ids], length: int) -> EvaluationRows:
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return evaluation_rows(documents, length, bos, eos if bos is None else None, settings.rows)


@dataclass(frozen=True, eq=False)
class _Prompt:
    """A sample that has lost its text, the digest of that, and prompt and answer as int64 ``[tokens]``."""

    sample: Sample
    digest: str
    input_ids: Tensor
    start: int


@dataclass(frozen=True, eq=False)
class _Run:
    model: LossModel
    encoder: PromptEncoder
    settings: Settings
    documents: Sequence[Ids] | None
    mesh: Mesh
    progress: SuiteProgress | None
    world: World | None
    stores: Stores
    stated: int | None

    def result(self, suite: str, length: int) -> TaskResult:
        """A result that is known, or measured and kept."""
        known = self.stores.finished.get(suite, RUNS[suite], length)
        if known is not None:
            return known
        found = self._perplexity(length) if suite == "perplexity" else self._forced(suite, length)
        over = self.stated is not None and length > self.stated
        beyond = {"max_position_embeddings": self.stated, "beyond_config": over}
        if found.status == "ok":
            found = replace(found, details={**found.details, **beyond})
            self.stores.finished.add(found)
        return found

    def _perplexity(self, length: int) -> TaskResult:
        if self.documents is None:
            return TaskResult.not_run("perplexity", "perplexity", length, "no text was given", "perplexity")
        text = _rows(self.encoder.tokenizer, self.settings, self.documents, length)
        losses = []
        for of_row in sharded_losses(self.model, text.rows, self.mesh):
            losses.append(of_row)
            self._say(f"perplexity at {length:,} tokens", len(losses), len(text.rows))
        edges = default_bins(length, self.settings.trained_length or self.stated)
        return perplexity_task(text, perplexity_of(losses, text.rows, edges))

    def _forced(self, suite: str, length: int) -> TaskResult:
        task = _task(suite, self.settings)
        reason = task.unavailable()
        if reason is not None:
            return TaskResult.not_run(suite, FORCED, length, reason)
        count, seed = self.settings.samples, self.settings.seed
        samples = stored_samples(task, self.encoder, length, count, seed, self.stores.samples)
        asked: list[Sample] = []
        digests: list[str] = []
        shares: list[float] = []
        # A RoPE that depends on the length is that of the whole length, as where an answer is generated.
        with pinned(self.model.model, length):
            while group := self._lead(lambda: self._prompts(samples)):
                rows = [forced_row(prompt.input_ids, prompt.start) for prompt in group]
                for prompt, likeliest in zip(
                    group, sharded_likeliest(self.model, rows, self.mesh), strict=True
                ):
                    right = likeliest[prompt.start - 1 : -1] == prompt.input_ids[prompt.start :]
                    shares.append(int(right.sum()) / len(right))
                    self._say(f"{suite} forced at {length:,} tokens", len(shares), len(asked) + len(group))
                asked += [prompt.sample for prompt in group]
                digests += [prompt.digest for prompt in group]
        found = forced_task(asked, digests, shares, suite, task.settings())
        return (
            found
            if suite == "needle"
            else replace(found, details={**found.details, "scored": "teacher-forced"})
        )

    def _prompts(self, samples: Iterator[Sample]) -> list[_Prompt]:
        """The next prompts, as many as are held at once; none at the end."""
        found = []
        for sample in next_group(samples):
            ids, start = forced_ids(self.encoder, sample)
            check_ids(self.model.model, ids)
            found.append(_Prompt(replace(sample, text=""), prompt_digest(sample), tensor(ids), start))
        return found

    def _lead(self, function: Callable[[], T]) -> T:
        return function() if self.world is None else self.world.lead(function)

    def _say(self, what: str, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(what, done, total)
