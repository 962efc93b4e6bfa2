"""One owner of every output folder: whether it may go on, and whether it is still the same thing.

A job is a list of steps. It opens its folder, runs the list, and knows nothing of resuming::

    def measure(config, context):
        steps = [
            Step("rows", rows_identity, (), pack),
            Step("scores", scores_identity, ("rows",), score, precious=True),
        ]
        with opened(context.output, "evaluation", context.world) as store:
            return Runner(store, context.world, context.reporter).run(steps)["scores"]

A body, here ``score(work)``, runs on every rank. It writes files to ``work.file(name)``, logs and restart points to
``work.kept(name)``, reads the values of its inputs in ``work.inputs``, and returns a small JSON value. A hook, here
``scores_identity()``, runs on rank 0 alone. A job that has something to refuse between finding out what there is to do
and doing it calls :meth:`Runner.survey`, :meth:`Runner.set_aside` and then :meth:`Runner.run`.

On disk, ``run.json`` says what the folder holds, and ``steps/NAME.json`` how far each step got. Nothing else says that
something is done; how far a step with a goal got is what its files on disk show. What a change replaces is moved to
``earlier/``.

- ``steps.py``: what a job is made of: :class:`Step`, and :class:`Work`, which its body gets.
- ``store.py``: the records of a folder, and the state of each step.
- ``runner.py``: runs what is not done. Rank 0 decides, and every rank follows.
- ``log.py``: logs of JSON lines; with a step, or alone (:func:`opened_log`).
- ``identity.py``: which keys of two identities differ.
- ``tasks.py``: independent tasks that leave files, in this process or several.
- ``executors.py``: tasks on Ray.
"""

from typing import TYPE_CHECKING

from ropewalk.lazy import on_first_use

if TYPE_CHECKING:
    from ropewalk.runs.identity import Difference as Difference, refuse_other as refuse_other
    from ropewalk.runs.log import Lines as Lines, Log as Log, opened_log as opened_log
    from ropewalk.runs.runner import Runner as Runner
    from ropewalk.runs.steps import Record as Record, State as State, Step as Step, Work as Work
    from ropewalk.runs.store import (
        Found as Found,
        Store as Store,
        Todo as Todo,
        alone as alone,
        held as held,
        opened as opened,
    )
else:
    __getattr__, __dir__ = on_first_use(__name__)
