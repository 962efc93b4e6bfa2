"""Evaluation section of a recipe, composed from the settings of ``ropewalk eval``.

A suite that is added to ``evaluation.tasks.registry`` is available here automatically, with its settings as keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

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
from ropewalk.io.settings import ONWARD, Count, Length, Settings, explain

ROWS = ("perplexity", "perplexity")
"""The suite and task that are computed on rows packed from documents."""
SHARED = ("rows", "samples", "tasks", "exclude", "chat")
"""Settings of ``ropewalk eval`` that a recipe takes over."""
SAMPLES = Field(
    default=10,
    ge=1,
    description="Number of prompts per task and length; in the suite needle, per depth and length.",
)
"""Fewer than in ``ropewalk eval``: a recipe measures several times, to compare, and rarely to confirm a length."""


class During(Settings):
    """A smaller measurement for the evaluations during training; a key that is not set is as before and after."""

    suites: list[SuiteName] | None = Field(
        default=None, min_length=1, description="some of evaluation.suites; default: all of them"
    )
    samples: Count | None = Field(
        default=None, ge=1, description="number of prompts per task and length; default: evaluation.samples"
    )
    rows: Count | None = Field(
        default=None,
        ge=1,
        description="maximum number of texts per length, in the suites perplexity and longppl; default: "
        "evaluation.rows",
    )
    lengths: list[Length] | None = Field(
        default=None,
        description="prompt lengths in tokens, in every stage; default: evaluation.lengths, or the model's context "
        "before the run and the stage's context",
    )


class _Measured(Settings):
    suites: list[SuiteName] = Field(
        default=["perplexity", "passkey"], description="benchmark suites to run; an empty list runs none"
    )
    lengths: list[Length] | None = Field(
        default=None,
        description="prompt lengths in tokens; default: the model's context before the run and the context of the last "
        "stage. If the result has no RoPE, also lengths for perplexity, of which the largest becomes the context that "
        "its config states",
    )
    every: Annotated[Count | None, ONWARD] = Field(
        default=None,
        ge=1,
        description="optimizer steps between evaluations during training, which use the stage's RoPE and context; the "
        "end of a stage always has one; default: no evaluations during training",
    )
    during: During = Field(
        default=During(),
        description="smaller settings for the evaluations during training; needs evaluation.every",
    )


def _composed() -> dict[str, Any]:
    """Fields shared with ``ropewalk eval``, and the settings of each suite under the same name as there."""
    shared = evaluation.Settings.model_fields
    fields: dict[str, Any] = {}
    for name in SHARED:
        field = shared[name]
        fields[name] = (Count, SAMPLES) if name == "samples" else (field.annotation, field)
    return fields | {
        name: (kind, Field(default=kind(), description=kind.__doc__)) for name, kind in OWN.items()
    }


if TYPE_CHECKING:

    class _Suites(_Measured):
        """Fields that the training package reads, declared for type checkers."""

        rows: int = 0
        samples: int = 0
        tasks: tuple[str, ...] = ()
        exclude: tuple[str, ...] = ()
else:
    _Suites = create_model("_Suites", __base__=_Measured, **_composed())


class Evaluation(_Suites):
    """Settings of the evaluations before, during and after training."""

    @model_validator(mode="after")
    def _check(self) -> Evaluation:
        for name, field, readers in unread(dict(self), self.suites):
            raise ValueError(
                f"{name}.{field} has no effect without the suite {' or '.join(readers)}; add "
                f"{'one of these suites' if len(readers) > 1 else 'the suite'} to evaluation.suites"
            )
        if self.suites:
            # For its error alone: an unknown task is refused when the recipe is read.
            chosen_tasks(self.settings(lengths=self.lengths or ()))
        self._check_during()
        return self

    def _check_during(self) -> None:
        during = self.during
        if self.every is None:
            if during != During():
                key = next(key for key, value in during if value is not None)
                raise ValueError(
                    f"during.{key} has no effect without evaluation.every; set evaluation.every to a number of steps"
                )
            return
        if not self.suites:
            raise ValueError(
                f"evaluation.every is {self.every}, but evaluation.suites is empty; add a suite, or omit "
                "evaluation.every"
            )
        for name in during.suites or ():
            if name not in self.suites:
                raise ValueError(
                    f"during.suites has {name}, but evaluation.suites has only {', '.join(self.suites)}; add {name} to "
                    "evaluation.suites"
                )
        if during.rows is not None and during.rows > self.rows:
            raise ValueError(
                f"during.rows is {during.rows}, more than evaluation.rows {self.rows}; raise evaluation.rows as well"
            )

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit later keys that have their default, so that recipes look as written by earlier versions."""
        fields = type(self).model_fields
        later = (*(name for name in SHARED if name not in ("rows", "samples")), *OWN, "every", "during")
        silent = {name for name in later if getattr(self, name) == fields[name].get_default()}
        stated: dict[str, Any] = handler(self)
        return {key: value for key, value in stated.items() if key not in silent}

    @property
    def chosen(self) -> list[Suite]:
        """The requested suites, in order."""
        return [BY_NAME[name] for name in self.suites]

    @property
    def reads_text(self) -> bool:
        """Whether a suite measures losses on documents."""
        return any(isinstance(suite, LikelihoodSuite) for suite in self.chosen)

    @property
    def reads_documents(self) -> bool:
        """Whether a task reads whole documents one by one instead of rows packed from them."""
        texts = [suite.name for suite in self.chosen if isinstance(suite, LikelihoodSuite)]
        if not texts:
            return False
        chosen = chosen_tasks(self.settings(texts))
        return any((suite, name) != ROWS for suite, names in chosen.items() for name in names)

    def in_training(self) -> Evaluation:
        """The evaluation that is made during training."""
        during = self.during
        values = {name: value for name, value in during if value is not None}
        suites = values.get("suites", self.suites)
        # Tasks of the other suites would be unknown to these.
        chosen = self.settings(suites)
        values |= {"tasks": chosen.tasks, "exclude": chosen.exclude, "every": None, "during": During()}
        return self.model_copy(update=values)

    def settings(
        self,
        suites: Sequence[str] | None = None,
        lengths: Sequence[int] | Mapping[str, Sequence[int]] = (),
        seed: int = 0,
        trained_length: int | None = None,
    ) -> evaluation.Settings:
        """Equivalent settings for ``ropewalk eval``.

        Args:
            suites: suites to run; all requested ones if None. Tasks of other suites are left out.
            lengths: prompt lengths in tokens, for all suites or by suite.
            seed: random seed of the run.
            trained_length: edge of the position bins, tokens.

        Raises:
            RopewalkError: if the settings contradict each other.
        """
        stated = {name: getattr(self, name) for name in (*SHARED, *OWN)}
        found = {
            **stated,
            "suites": tuple(self.suites if suites is None else suites),
            "lengths": lengths,
            "seed": seed,
            "trained_length": trained_length,
            # The model is also evaluated before the extension, at lengths beyond its config.
            "beyond_config": True,
        }
        try:
            settings = evaluation.Settings.model_validate(found)
        except ValidationError as error:
            raise RopewalkError(explain(error, evaluation.Settings)) from error
        if suites is None:
            return settings
        known = {task for name in suites for task in BY_NAME[name].known(settings)}
        # Evaluation during training has fewer suites, and a task of an absent suite would be refused as unknown.
        left = {
            name: tuple(task for task in getattr(settings, name) if task in known)
            for name in ("tasks", "exclude")
        }
        return settings.model_copy(update=left)
