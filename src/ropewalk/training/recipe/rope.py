"""RoPE section of a stage in a recipe: the method and its parameters, and settings of searches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    create_model,
    field_validator,
    model_serializer,
    model_validator,
)

from ropewalk.io.settings import FREE, TEXT, Count, Settings, written
from ropewalk.rope.methods import METHODS
from ropewalk.rope.methods.base import CRITICAL_PAIR, RopeMethod, compared_methods, trainable_methods
from ropewalk.rope.target import YARN_AT, check_candidate
from ropewalk.search.settings import LongFactorSearch, ShortFactorSearch, check_budget
from ropewalk.search.space import ALL_PAIRS
from ropewalk.training.recipe.softmax_scale import SoftmaxScale

LAYER_TYPES = ("full_attention", "sliding_attention")
"""Layer types that have their own RoPE in some checkpoints; layers of the first type limit the context."""
SEEDS = 3
"""Number of seeds of a search: PI, NTK and YaRN; a search of short factors has one less."""


class ShortContext(ShortFactorSearch):
    """Settings of the search for short factors after the last stage."""

    @model_validator(mode="after")
    def _check(self) -> ShortContext:
        check_budget(self.budget, SEEDS, self.rows)
        return self


class Search(LongFactorSearch):
    """Settings of the search for a stage's long factors; `search: {}` uses the defaults."""

    weights: Literal["current", "checkpoint"] = Field(
        default="current",
        description="weights to search on; current: those that the stage starts from; checkpoint: those of the "
        "recipe's model (as the LongRoPE paper does for its first two lengths)",
    )

    @model_validator(mode="after")
    def _check(self) -> Search:
        # How many initial candidates LongRoPE2's space has depends on the model; the stage's goal checks it.
        check_budget(self.budget, SEEDS if self.space == ALL_PAIRS else 1, self.rows)
        return self

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit later keys that have their defaults, so that runs of earlier versions can be resumed."""
        stated: dict[str, Any] = handler(self)
        later = {name: type(self).model_fields[name].default for name in ("space", "objective")}
        return {key: value for key, value in stated.items() if key not in later or value != later[key]}


def _describe(name: str, owners: Sequence[type[RopeMethod]]) -> str:
    """Description of a parameter in docs/recipes.md: its methods, and its meaning or default."""
    default = next((f.default for f in fields(owners[0]) if f.name == name), None)
    meanings: dict[str, list[str]] = {}
    for owner in owners:
        meanings.setdefault(owner.parameters[name], []).append(owner.name)
    described = "; ".join(
        ", ".join(names) + (f": {text}" if text else "") for text, names in meanings.items()
    )
    if isinstance(default, float):
        described += f"{';' if ': ' in described else ':'} default {default:g}"
    return described


def _parameters() -> dict[str, Any]:
    """One field per method parameter, with the parameter's type; None means the method's default."""
    owners: dict[str, list[type[RopeMethod]]] = {}
    for method in dict.fromkeys(trainable_methods().values()):
        for name in method.parameters:
            owners.setdefault(name, []).append(method)
    return {
        name: (
            # Methods with a parameter of the same name may give it different types.
            reduce(or_, ({**get_type_hints(owner), **owner.target_parameters}[name] for owner in each))
            | None,
            Field(default=None, description=_describe(name, each)),
        )
        for name, each in owners.items()
    }


class _Method(Settings):
    method: str = Field(default="theta", description="name of a method from the table under RoPE methods")
    rope_theta: float | Literal["auto"] = Field(
        default="auto",
        description="method theta: the new base, or auto for the base that `ropewalk inspect --target` recommends; "
        "method cope: the new base, or auto to keep the present one",
    )


# Type checkers cannot see the fields that create_model adds.
if TYPE_CHECKING:
    _Parameters = _Method
else:
    _Parameters = create_model("_Parameters", __base__=_Method, **_parameters())


class Rope(_Parameters):
    """RoPE of a stage. Parameters that are not given are derived from the context, or have their published values.

    In addition to the fields below, every parameter of every method of :data:`~ropewalk.rope.methods.METHODS` is a
    key. A plain string in a recipe is the method. For a checkpoint with separate RoPE per layer type, the keys may be
    the layer types instead, each with its own RoPE; otherwise the keys apply to the layers that limit the context.
    """

    factors: Annotated[str | None, FREE] = Field(
        default=None,
        description="longrope: file with a factor table (such as `ropewalk search` writes) for this context or a "
        "longer one",
    )
    search: Search | None = Field(
        default=None,
        description="longrope: search for the long factors right before the stage, instead of reading `factors`",
    )
    softmax_scale: SoftmaxScale | None = Field(
        default=None,
        description="none, in the last stage: measure a constant factor on attention's scores after training, and fold "
        "the best into the weights",
    )
    parameters: dict[str, Any] | None = Field(
        default=None,
        description="further parameters of the method by name, for methods that other packages register",
    )
    candidates: list[str] | None = Field(
        default=None,
        min_length=1,
        description="auto: bases to compare; each is a rule that computes a base, `theta=5.0e6`, `ntk-rcd=30`, or "
        "`current`; default `[critical-dimension, ntk, current]`",
    )
    probe_rows: Count | None = Field(
        default=None, ge=1, description="auto: number of rows to measure each candidate on; default 4"
    )
    full_attention: Rope | None = Field(
        default=None,
        description="for a checkpoint with separate RoPE per layer type: the keys above for full-attention layers, "
        "which limit the context; default: the checkpoint's RoPE",
    )
    sliding_attention: Rope | None = Field(
        default=None,
        description="the same keys for sliding-window layers; ropewalk derives no values for these layers, so set "
        "every key that the method needs",
    )

    @property
    def by_layer_type(self) -> dict[str, Rope]:
        """Settings by layer type; empty if the recipe names no layer types."""
        stated = {name: getattr(self, name) for name in LAYER_TYPES}
        return {name: rope for name, rope in stated.items() if rope is not None}

    @property
    def limiting(self) -> Rope:
        """Settings of the layers that limit the context."""
        by_layer = self.by_layer_type
        # Without settings of their own, layers with full attention keep their RoPE.
        return by_layer.get(LAYER_TYPES[0], Rope(method="default")) if by_layer else self

    @model_validator(mode="before")
    @classmethod
    @written(TEXT)
    def _from_name(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"method": value}
        if not isinstance(value, dict) or value.get("method") not in trainable_methods():
            return value
        # Parameters of methods that were registered after this class was created.
        brought = {
            key: value[key]
            for key in METHODS[value["method"]].parameters
            if key in value and key not in cls.model_fields
        }
        kept = {key: each for key, each in value.items() if key not in brought}
        return {**kept, "parameters": {**(value.get("parameters") or {}), **brought}} if brought else value

    @model_serializer(mode="wrap")
    def _written(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write only layer types if they are given; otherwise omit unset later keys, as earlier versions did."""
        stated: dict[str, Any] = handler(self)
        if by_layer := self.by_layer_type:
            return {name: stated[name] for name in by_layer}
        return {
            key: value
            for key, value in stated.items()
            if key not in ("parameters", CRITICAL_PAIR, "layers", "qk_norm", "softmax_scale", *LAYER_TYPES)
            or value is not None
        }

    @field_validator("method")
    @classmethod
    def _is_a_method(cls, name: str) -> str:
        *names, last = (repr(each) for each in (*trainable_methods(), "auto"))
        if repr(name) not in (*names, last):
            raise ValueError(f"must be {', '.join(names)} or {last}")
        return name

    @property
    def measured(self) -> bool:
        """Whether the run measures what the RoPE becomes: by a search, or by comparing bases."""
        return self.method == "auto" or self.search is not None

    def parameter(self, name: str) -> Any:
        """Value of one method parameter; None if it is not set."""
        return self.method_parameters().get(name)

    def method_parameters(self) -> dict[str, Any]:
        """Values of all method parameters by name; None for those that are not set."""
        named = {name for method in METHODS.values() for name in method.parameters}
        stated = {name: getattr(self, name) for name in type(self).model_fields if name in named}
        return stated | (self.parameters or {})

    @field_validator("candidates")
    @classmethod
    def _are_bases(cls, names: list[str] | None) -> list[str] | None:
        for name in names or ():
            if name in compared_methods() or name.startswith(YARN_AT):
                instead = f"method: {name}".replace(YARN_AT, "yarn, critical_pair: ")
                raise ValueError(
                    f"{name} does not set a base, so it cannot be a candidate; set {instead} for the stage instead"
                )
            check_candidate(name, bases_only=True)
        return names

    @model_validator(mode="after")
    def _layer_types_alone(self) -> Rope:
        by_layer = self.by_layer_type
        # Only what the recipe states: defaults of other keys contradict nothing.
        beside = sorted(self.model_fields_set - set(LAYER_TYPES))
        if by_layer and beside:
            raise ValueError(
                f"the key {beside[0]!r} is outside the layer types ({', '.join(by_layer)}); move it into a layer type"
            )
        nested = [name for name, rope in by_layer.items() if rope.by_layer_type]
        if nested:
            raise ValueError(
                f"{nested[0]} must not contain layer types itself; give it a method and parameters"
            )
        window = self.sliding_attention
        if window is not None:
            window._check_windows()
        return self

    def _check_windows(self) -> None:
        """Raise for settings that sliding-window layers cannot have: their distances do not grow with the context."""
        here = LAYER_TYPES[1]
        not_derived = (
            "because the window limits the distances in these layers, so ropewalk does not derive it from the "
            "context"
        )
        taken = METHODS.get(self.method)
        if self.method == "auto" or taken is None or taken.length_dependent:
            raise ValueError(f"{here} needs a method with fixed frequencies, got {self.method}; use theta")
        if self.method == "theta" and self.rope_theta == "auto":
            raise ValueError(f"{here} with method theta needs a rope_theta, {not_derived}")
        if "factor" in taken.parameters and self.parameter("factor") is None:
            raise ValueError(f"{here} with method {self.method} needs a factor, {not_derived}")

    @model_validator(mode="after")
    def _one_source_of_factors(self) -> Rope:
        if self.method not in ("longrope", "auto"):
            for key in ("factors", "search"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key!r} applies only to method 'longrope', got method {self.method!r}")
        numbers = next((key for key in ("long_factor", "short_factor") if self.parameter(key)), None)
        found = [key for key in ("factors", "search") if getattr(self, key) is not None]
        found = found if numbers is None else [numbers, *found]
        if len(found) > 1:
            raise ValueError(
                f"give only one of {' and '.join(map(repr, found))}: both set the stage's factors"
            )
        return self

    @model_validator(mode="after")
    def _scale_without_rope(self) -> Rope:
        if self.softmax_scale is not None and (self.method != "none" or self.parameter("layers") is not None):
            some = "" if self.method != "none" else " in some layers"
            raise ValueError(
                f"'softmax_scale' applies only to a model without RoPE in any layer (method 'none'), got method "
                f"{self.method!r}{some}"
            )
        return self

    @model_validator(mode="after")
    def _auto_or_not(self) -> Rope:
        own = ("candidates", "probe_rows")
        if self.method != "auto":
            given = [key for key in own if getattr(self, key) is not None]
            if given:
                raise ValueError(f"{given[0]!r} applies only to method 'auto', got method {self.method!r}")
            return self
        others = [key for key in type(self).model_fields if key not in ("method", *own)]
        # Keys that are not given have one of these values.
        given = [key for key in others if getattr(self, key) not in (None, "auto")]
        if given:
            raise ValueError(
                f"method 'auto' does not accept {given[0]!r}; it takes only {' and '.join(map(repr, own))}"
            )
        return self
