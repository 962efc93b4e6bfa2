"""The recipe's part on evaluation: suites that are run before and after, composed of the evaluation's own settings.

A suite that is new in ``evaluation.tasks.registry`` can be named here at once, and its settings are keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    create_model,
    model_serializer,
    model_validator,
)

from ropewalk.errors import RopewalkError
from ropewalk.evaluation import settings as evaluation
from ropewalk.evaluation.settings import OWN, SuiteName, unread
from ropewalk.evaluation.tasks.registry import BY_NAME, chosen_tasks
from ropewalk.evaluation.tasks.suite import LikelihoodSuite, Suite
from ropewalk.io.settings import Length, OnResume, Settings, explain

DECIDES_RESULTS = OnResume(
    "fixed",
    "the model was measured with it before training; `ropewalk eval` measures both in any other way",
)
ROWS = ("perplexity", "perplexity")
"""The suite and its task that read rows of documents."""
SHARED = ("rows", "samples", "tasks", "exclude", "chat")
"""Settings of every evaluation that mean the same in a recipe."""
DEFAULTS = {"samples": 10}
"""Of these what a recipe has by default where that is not what ``ropewalk eval`` has."""


class _Measured(Settings):
    on_resume = DECIDES_RESULTS

    suites: list[SuiteName] = Field(
        ["perplexity", "passkey"], description="benchmark suites to run; an empty list runs none"
    )
    lengths: list[Length] | None = Field(
        None, description="prompt lengths in tokens; default: the trained length and the target"
    )


def _composed() -> dict[str, Any]:
    """The fields that an evaluation's settings have too, and each suite's own settings under the name that they have
    there."""
    shared = evaluation.Settings.model_fields
    fields: dict[str, Any] = {}
    for name in SHARED:
        field = copy(shared[name])
        field.default = DEFAULTS.get(name, field.default)
        fields[name] = (field.annotation, field)
    return fields | {name: (kind, Field(kind(), description=kind.__doc__)) for name, kind in OWN.items()}


if TYPE_CHECKING:

    class _Suites(_Measured):
        """The names that this room reads, for type checkers."""

        rows: int = 0
        samples: int = 0
else:
    _Suites = create_model("_Suites", __base__=_Measured, **_composed())


class Evaluation(_Suites):
    """What is measured before and after."""

    @model_validator(mode="after")
    def _check(self) -> Evaluation:
        for name, field, readers in unread(dict(self), self.suites):
            raise ValueError(
                f"{name}.{field} has no effect without the suite {' or '.join(readers)}; add it to suites"
            )
        if self.suites:
            chosen_tasks(self.settings(lengths=self.lengths or ()))
        return self

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As recipes were written before there were these keys, where they are as they are by default."""
        fields = type(self).model_fields
        later = (*(name for name in SHARED if name not in ("rows", "samples")), *OWN)
        silent = {name for name in later if getattr(self, name) == fields[name].get_default()}
        said: dict[str, Any] = handler(self)
        return {key: value for key, value in said.items() if key not in silent}

    @property
    def chosen(self) -> list[Suite]:
        """The suites that are asked for, in order."""
        return [BY_NAME[name] for name in self.suites]

    @property
    def reads_text(self) -> bool:
        """Whether a suite reads the losses of documents."""
        return any(isinstance(suite, LikelihoodSuite) for suite in self.chosen)

    @property
    def reads_documents(self) -> bool:
        """Whether a task reads documents one by one, the first ones whole, instead of rows that are made of them."""
        texts = [suite.name for suite in self.chosen if isinstance(suite, LikelihoodSuite)]
        if not texts:
            return False
        chosen = chosen_tasks(self.settings(texts))
        return any((suite, name) != ROWS for suite, names in chosen.items() for name in names)

    def settings(
        self,
        suites: Sequence[str] | None = None,
        lengths: Sequence[int] | Mapping[str, Sequence[int]] = (),
        seed: int = 0,
        trained_length: int | None = None,
    ) -> evaluation.Settings:
        """The same as ``ropewalk eval`` is told it.

        Args:
            suites: those that are run; all that are asked for if None. Tasks of others are left out.
            lengths: in tokens, of all suites or of each.
            seed: of the run.
            trained_length: edge of the position bins, tokens.

        Raises:
            RopewalkError: if the settings do not go together.
        """
        said = {name: getattr(self, name) for name in (*SHARED, *OWN)}
        found = {
            **said,
            "suites": tuple(self.suites if suites is None else suites),
            "lengths": lengths,
            "seed": seed,
            "trained_length": trained_length,
            # Before its extension the model is measured beyond what it was made for.
            "beyond_config": True,
        }
        try:
            settings = evaluation.Settings.model_validate(found)
        except ValidationError as error:
            raise RopewalkError(explain(error, evaluation.Settings)) from error
        if suites is None:
            return settings
        known = {task for name in suites for task in BY_NAME[name].known(settings)}
        left = {
            name: tuple(task for task in getattr(settings, name) if task in known)
            for name in ("tasks", "exclude")
        }
        return settings.model_copy(update=left)
