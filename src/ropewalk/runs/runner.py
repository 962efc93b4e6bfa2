"""Runs the steps of a job in one output folder: rank 0 decides, and every rank follows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from ropewalk.io.progress import Reporter, Silent
from ropewalk.runs.steps import Json, Record, State, Step, Work
from ropewalk.runs.store import Found, Store, Todo

if TYPE_CHECKING:
    from ropewalk.parallel.world import World


@dataclass(eq=False)
class Runner:
    """Runs steps, and skips those that are done. Every rank must call the same methods with the same steps.

    A list of steps keeps what their bodies hold, such as a model, alive until the list goes. Hold a model in a list of
    its own and empty that, or the next one is loaded beside it.

    Attributes:
        store: records of the folder, see :func:`~ropewalk.runs.store.opened`.
        world: the processes.
        reporter: takes a line for each step that is made again; rank 0 alone reports.
        values: values of the steps that are done, by name.
    """

    store: Store
    world: World
    reporter: Reporter = field(default_factory=Silent)
    values: dict[str, Json] = field(default_factory=dict)

    def survey(self, steps: Sequence[Step], again: str | None = None, deep: bool = False) -> Todo:
        """See :meth:`~ropewalk.runs.store.Store.survey`; every rank gets the same answer."""
        return self.world.on_rank_0(lambda: self.store.survey(steps, again, deep=deep))

    def set_aside(self, todo: Todo, steps: Sequence[Step] | None = None) -> None:
        """Move what is to be made again to ``earlier/``; without this call it moves when its step's turn comes.

        Steps that were asked for again go with all that use their results. Otherwise a step moves whose identity or
        input has changed; what uses its result stays, and moves only if the new result is another one.

        Args:
            todo: what a survey found.
            steps: the steps that may move; None for all of them.
        """
        names = todo.found if steps is None else [step.name for step in steps]

        def move() -> None:
            moves = [
                name
                for name in names
                if name in todo.again or todo.found[name].state in (State.OTHER, State.OUTDATED)
            ]
            # The last first: whoever goes on after a kill must not take up what was made of something that has gone.
            for name in reversed(moves):
                self.store.mark(name)
            for name in moves:
                self._moved(name, todo.found[name])

        self.world.on_rank_0(move)

    def run(
        self, steps: Iterable[Step], todo: Todo | None = None, until: str | None = None
    ) -> dict[str, Json]:
        """Run the steps that are not done, in order.

        Args:
            steps: steps; those that they use must be done or stand before them.
            todo: a survey of these and perhaps more steps; None makes one.
            until: name of the last step to run; None for all.

        Returns:
            The values of all steps that are done, by name.

        Raises:
            RopewalkError: if a precious step would have to be thrown away; with ``todo``, that was found out before.
                What a body raises leaves its step begun.
        """
        steps = list(steps)
        todo = self.survey(steps) if todo is None else todo
        for step in steps:
            self._turn(step, todo)
            if step.name == until:
                break
        return self.values

    def _turn(self, step: Step, todo: Todo) -> None:
        records: list[Record] = []
        # Only names and JSON cross: whether to run, whether it goes on, and the value if it is done.
        runs, resumed, value = self.world.on_rank_0(partial(self._begun, step, todo, records))
        if runs:
            inputs = {name: self.values[name] for name in step.inputs}
            register = partial(self._register, step.name, records)
            before = records[0].before if records else None
            work = Work(self.store.folder, self.world, inputs, resumed, register, before)
            clock = time.perf_counter()
            made = step.run(work)
            seconds = time.perf_counter() - clock
            value = self.world.on_rank_0(
                lambda: self.store.finish(step.name, records[0], made, work.unable, seconds, step.decides)
            )
        self.values[step.name] = value

    def _begun(self, step: Step, todo: Todo, records: list[Record]) -> tuple[bool, bool, Json]:
        """Decide what becomes of a step, and begin it; on rank 0 alone."""
        found = self.store.judged(step, todo)
        record = self.store.record(step.name)
        if found.state is State.DONE:
            assert record is not None
            assert record.done is not None
            return False, False, record.done.value
        if found.state in (State.OTHER, State.OUTDATED):
            assert record is not None
            # What is on its way was decided before, and so was what the caller wants again.
            if step.precious and record.aside is None and step.name not in todo.again:
                self.store.refuse(step, found, step.name)
            self._moved(step.name, found)
            found = Found(State.MISSING)
        elif found.state is State.DAMAGED:
            self.reporter.note(f"{found.why}; {step.name} is made again")
        records.append(self.store.begin(step, found))
        return True, found.state is not State.MISSING, None

    def _moved(self, name: str, found: Found) -> None:
        if (place := self.store.set_aside(name)) is not None:
            self.reporter.note(f"{name} is made again, because {found.why}; what it was is in {place}")

    def _register(self, name: str, records: list[Record], file: str, kept: bool) -> None:
        self.store.register(name, records[0], file, kept)
