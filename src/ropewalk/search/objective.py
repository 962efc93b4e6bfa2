"""Evaluate candidates on a model: the loss of rows of text, with several candidates in one forward pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import Any

from ropewalk.attention.layout import IGNORED, Row
from ropewalk.errors import RopewalkError, RunFailure
from ropewalk.evaluation.backends.in_memory import unless_out_of_memory
from ropewalk.evaluation.backends.likelihoods import causal_losses, check_prefill_chunk, check_rows
from ropewalk.evaluation.backends.protocol import evaluating
from ropewalk.models.compute.losses import OutputHead
from ropewalk.models.rope.rotary import rope_of_rows
from ropewalk.parallel import World
from ropewalk.rope import RopeMethod
from ropewalk.search.algorithms import Job
from ropewalk.search.goal import Goal


@dataclass(frozen=True, eq=False)
class ShortPenalty:
    """Penalty for a candidate whose loss at the trained length exceeds that of the checkpoint's own RoPE.

    Attributes:
        rows: rows of at most the trained length; each counts as one more document.
        weight: objective per nat of loss increase over the checkpoint's own RoPE on these rows; above 0.

    Raises:
        RopewalkError: if the weight is not a finite number above 0.
    """

    rows: Sequence[Row]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise RopewalkError(
                f"the weight of a short penalty must be a finite number above 0, got {self.weight}"
            )


@dataclass(frozen=True)
class Forwards:
    """Settings of the forward passes of a search. Losses depend on them only through rounding.

    Attributes:
        batch: number of candidates per forward pass.
        prefill_chunk: tokens per forward call, see :func:`~ropewalk.evaluation.backends.likelihoods.causal_losses`;
            None for a whole row.
        world: processes that share the forward passes, each with the whole model. Batches are formed before they are
            distributed, so the losses do not depend on the number of processes.
    """

    batch: int = 1
    prefill_chunk: int | None = None
    world: World = field(default_factory=World)


ONE_BY_ONE = Forwards()


class ModelEvaluator:
    """Measures candidates on a model in memory; see :class:`~ropewalk.search.algorithms.Evaluator`.

    Args:
        model: result of ``load_model`` with the exact rotary module; it is not modified.
        goal: turns a candidate into a RoPE method.
        rows: rows with the pattern ``full``; the objective is the mean loss of all their targets.
        penalty: penalty at the trained length; None for no penalty.
        forwards: how to run the forward passes.

    Raises:
        RopewalkError: if there are no rows, a row has another pattern or no target, or a row of the penalty is longer
            than the trained length.
        EngineError: if the model cannot process a row in chunks.
        RunFailure: if the checkpoint's own method gives the penalty's rows no finite loss, or, here and later, if the
            memory gives out.
    """

    def __init__(
        self,
        model: Any,
        goal: Goal,
        rows: Sequence[Row],
        penalty: ShortPenalty | None = None,
        forwards: Forwards = ONE_BY_ONE,
    ) -> None:
        check_rows(rows)
        check_prefill_chunk(model, forwards.prefill_chunk)
        if forwards.batch < 1:
            raise RopewalkError(f"batch must be 1 or more candidates per forward pass, got {forwards.batch}")
        self.model, self.goal, self.forwards = model, goal, forwards
        # OutputHead.of compares the logits of two tokens, which dropout would change.
        with evaluating(model):
            self.head = OutputHead.of(model)
        self.weight = penalty.weight if penalty else 0.0
        short = list(penalty.rows) if penalty else []
        if penalty:
            check_rows(short)
            longest = max(row.layout.total_length for row in short)
            if longest > goal.trained_length:
                raise RopewalkError(
                    f"rows of the short penalty must not be longer than the trained length of {goal.trained_length} "
                    f"tokens, got a row of {longest} tokens"
                )
        # Interleave both lengths, so that racing compares candidates on both from the start.
        order = sorted(
            [(index / len(rows), 0, row) for index, row in enumerate(rows)]
            + [(index / len(short), 1, row) for index, row in enumerate(short)],
            key=lambda each: each[:2],
        )
        self.rows = [row for _, _, row in order]
        self.is_short = [bool(kind) for _, kind, _ in order]
        self.targets = [int((row.labels != IGNORED).sum()) for row in self.rows]
        if not all(self.targets):
            raise RopewalkError(
                "every row of a search needs at least one labelled token, got a row without labels"
            )
        # The penalty counts only the loss that a candidate adds to the checkpoint's own, which is measured once, here.
        indices = [index for index, kind in enumerate(self.is_short) if kind]
        own = self._shared(([goal.current], index) for index in indices)
        self.reference = {index: loss for index, (loss,) in zip(indices, own, strict=True)}
        if not all(map(math.isfinite, self.reference.values())):
            # All ranks have the same losses here, so each raises the error itself and none waits for another.
            raise forwards.world.known_to_all(
                RunFailure(
                    "with the checkpoint's own RoPE, the loss of a row of the short penalty is NaN or infinite; "
                    "check the model and the documents"
                )
            )

    @property
    def n_documents(self) -> int:
        return len(self.rows)

    def losses(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, float]]:
        """See :class:`~ropewalk.search.algorithms.Evaluator`."""
        batches = list(self._batches(jobs))
        forwards = (
            ([self.goal.method(job.candidate) for job in batch], batch[0].document) for batch in batches
        )
        for batch, found in zip(batches, self._shared(forwards), strict=True):
            yield from zip(batch, found, strict=True)

    def objective(self, losses: Sequence[float]) -> float:
        """Mean loss of the target-length rows in nats per token, plus the penalty."""
        long = self._mean(losses, short=False)
        if not any(self.is_short[: len(losses)]):
            return long
        own = [self.reference.get(index, 0.0) for index in range(len(losses))]
        return long + self.weight * max(0.0, self._mean(losses, short=True) - self._mean(own, short=True))

    def baseline(self, method: RopeMethod) -> float:
        """Objective of a RoPE method, measured like a candidate's; it costs one forward per document."""
        found = self._shared(([method], index) for index in range(self.n_documents))
        return self.objective([loss for (loss,) in found])

    def _mean(self, losses: Sequence[float], short: bool) -> float:
        chosen = [index for index in range(len(losses)) if self.is_short[index] == short]
        total = sum(self.targets[index] for index in chosen)
        # In an early round of racing, all measured rows may have the other length.
        return math.fsum(losses[i] * self.targets[i] for i in chosen) / total if total else 0.0

    def _batches(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Group consecutive jobs on the same document into forward passes."""
        # Neighbours only, not sorted: losses must come back in the order of the jobs.
        for _, group in groupby(jobs, key=lambda job: job.document):
            rest, size = list(group), self.forwards.batch
            yield from (rest[start : start + size] for start in range(0, len(rest), size))

    def _shared(self, forwards: Iterable[tuple[Sequence[RopeMethod], int]]) -> Iterator[list[float]]:
        """Losses of each forward pass; each pass runs on one rank, which sends its losses to all."""
        # Rounds of one forward per rank: all ranks get the losses in the same order, so their algorithms stay in step.
        left, world = iter(forwards), self.forwards.world
        while together := list(islice(left, world.size)):
            # In the last round some ranks have nothing to do, but must join the gather all the same.
            mine = together[world.rank : world.rank + 1]
            found = world.gather_from(partial(self._each, mine))
            yield from (losses for (losses,) in found[: len(together)])

    def _each(self, forwards: Sequence[tuple[Sequence[RopeMethod], int]]) -> list[list[float]]:
        return [self._losses(methods, document) for methods, document in forwards]

    def _losses(self, methods: Sequence[RopeMethod], document: int) -> list[float]:
        """Mean loss of a document under each method, in nats per token; infinite if NaN."""
        # The same row once per method, in one batch; expand makes no copies.
        row = self.rows[document]
        length = row.layout.total_length
        ids = row.input_ids.to(self.model.device).expand(len(methods), -1)
        labels = row.labels.to(self.model.device).expand(len(methods), -1)
        with evaluating(self.model), rope_of_rows(self.model, methods, length):
            losses = unless_out_of_memory(
                lambda: causal_losses(self.model, self.head, ids, labels, self.forwards.prefill_chunk)
            )
        if losses is None:
            raise RunFailure(
                f"out of memory on {self.model.device} in a forward pass of {len(methods)} candidates with {length} "
                "tokens each; lower batch (--batch), set prefill_chunk (--prefill-chunk), or choose a shorter "
                "target length"
            )
        means = (losses.sum(1) / self.targets[document]).tolist()
        # A candidate that overflows is a bad candidate, not the end of the search; infinity ranks it last.
        return [mean if math.isfinite(mean) else math.inf for mean in means]
