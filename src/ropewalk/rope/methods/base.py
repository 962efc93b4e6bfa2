"""RopeMethod: the frequencies of a method, its form in configs, and how it extends a context; the table of methods.

Notation: ``d`` = ``rotary_dim``, ``b`` = ``rope_theta``, ``θ_i = b^(-2i/d)`` rad/token for the pair
``i = 0 … d/2 - 1``, ``T`` = ``original_max_position_embeddings`` (tokens of the original training),
``s`` = ``factor``. Frequencies are computed in float64 on the CPU, whatever the default device or dtype.

torch is imported only to compute frequencies, so that the table of methods loads in milliseconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_rotary_dim, check_theta, whole_number

if TYPE_CHECKING:
    from torch import Tensor

ORIGINAL = "original_max_position_embeddings"
MAX_LENGTH = "max_position_embeddings"
PARTIAL = "partial_rotary_factor"


class RopeFrequencies(NamedTuple):
    """Frequencies and attention factor of a method.

    Attributes:
        inv_freq: float64 ``[rotary_dim // 2]`` on the CPU, rad/token.
        attention_factor: factor on both cos and sin, so each q·k is multiplied by its square; dimensionless.
    """

    inv_freq: Tensor
    attention_factor: float


class Origin(NamedTuple):
    """Source of the number that a rule sets, and what the rule does not account for."""

    formula: str
    source: str
    caveat: str


def unscaled_inv_freq(rotary_dim: int, rope_theta: float) -> Tensor:
    """``θ_i = rope_theta^(-2i/rotary_dim)``, float64 ``[rotary_dim // 2]`` on the CPU, rad/token.

    Source: Su et al., RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    import torch

    # The device is explicit because models are built under torch.device("meta"), which would capture this tensor.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / -rotary_dim
    inv_freq: Tensor = float(rope_theta) ** exponents
    return inv_freq


@dataclass(frozen=True)
class ConfigEntry:
    """The RoPE parameters of one layer type, with the config that contains them.

    Attributes:
        rope_type: type that the parameters name.
        rotary_dim: rotated dimensions of a head, after partial rotation.
        rope_theta: RoPE base.
        values: the other parameters, without those that are null.
        config: the whole config, which states the lengths that the parameters refer to.
    """

    rope_type: str
    rotary_dim: int
    rope_theta: float
    values: Mapping[str, Any]
    config: Mapping[str, Any]

    def need(self, key: str) -> Any:
        """A required parameter of the type."""
        if key not in self.values:
            raise RopewalkError(f"rope type {self.rope_type!r} needs {key}, and the config has none")
        return self.values[key]

    def max_length(self) -> int:
        """``max_position_embeddings``, tokens."""
        length = whole_number(self.config, MAX_LENGTH)
        if length is None:
            raise RopewalkError(
                "the RoPE parameters of the config need max_position_embeddings, and the config has none"
            )
        return length

    def original_length(self) -> int:
        """The original length, inside the parameters or beside them; otherwise ``max_position_embeddings``."""
        outside, inside = self.config.get(ORIGINAL), self.values.get(ORIGINAL)
        if inside is not None and outside is not None and inside != outside:
            raise RopewalkError(
                f"{ORIGINAL} is {outside} outside the RoPE parameters of the config, but {inside} inside; "
                "remove the wrong one"
            )
        original = whole_number({ORIGINAL: outside if inside is None else inside}, ORIGINAL)
        return self.max_length() if original is None else original

    def length_before_extension(self) -> int:
        """The original length as the length before an extension, which cannot exceed the present length."""
        original, length = self.original_length(), whole_number(self.config, MAX_LENGTH)
        if length is not None and original > length:
            raise RopewalkError(
                f"{ORIGINAL} {original}, the length before the extension, is more than max_position_embeddings "
                f"{length}; correct the wrong one"
            )
        return original

    def factor(self, original: int) -> float:
        """The stated factor, otherwise ``max_position_embeddings`` over the original length."""
        stated = self.values.get("factor")
        return self.max_length() / original if stated is None else stated


@dataclass(frozen=True)
class TargetContext:
    """A request for a longer context: the lengths, and the parameters that the user sets instead of deriving them.

    Attributes:
        original_length, target_length: tokens; the second is at least the first.
        given: values by the names of the method's fields.
    """

    original_length: int
    target_length: int
    given: Mapping[str, Any]

    def factor(self, before: float = 1.0) -> float:
        """The given factor, which is final; otherwise the derived factor times that of the checkpoint."""
        given: float | None = self.given.get("factor")
        return before * self.target_length / self.original_length if given is None else given


@dataclass(frozen=True)
class RopeMethod(ABC):
    """Base class of all RoPE methods; its subclasses are final.

    To add a method, write a subclass as a frozen dataclass and decorate it with :func:`ropewalk.rope.register`.
    Recipes, configs, ``inspect``, ``rope plan`` and ``export`` then support the method. From the fields of the
    dataclass, the base class derives the form of the method in a config and its factor for a target length.

    Attributes:
        rotary_dim: number of rotated dimensions of a head, even.
        rope_theta: RoPE base as the checkpoint states it, > 1, dimensionless.
        name: name of the method in recipes and reports, and its ``rope_type`` in configs.
        other_names: further names of the method in recipes.
        rope_type_aliases: older values of ``rope_type`` in configs.
        parameters: the fields that a recipe may set, mapped to their descriptions in the documentation of recipe keys.
            A description may be empty.
        target_parameters: types of those parameters that are not fields, because :meth:`for_target` computes fields
            from them.
        config_keys: keys that the RoPE parameters of a config may have besides ``rope_type``, ``rope_theta`` and
            ``partial_rotary_factor``; None if configs have no ``rope_type`` for this method.
        origin: formula, source and caveat that ``inspect --target --explain`` shows when it compares RoPE settings for
            a target length; None if the comparison omits the method.
        trainable: whether a model may be trained with the method.
        length_dependent: whether the frequencies depend on the sequence length.

    Raises:
        RopewalkError: if a field is out of range; the message gives its value.
    """

    rotary_dim: int
    rope_theta: float

    name: ClassVar[str]
    other_names: ClassVar[tuple[str, ...]] = ()
    rope_type_aliases: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[Mapping[str, str]] = {}
    target_parameters: ClassVar[Mapping[str, type]] = {}
    config_keys: ClassVar[tuple[str, ...] | None] = (ORIGINAL,)
    origin: ClassVar[Origin | None] = None
    trainable: ClassVar[bool] = True
    length_dependent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_rotary_dim(self.rotary_dim)
        check_theta(self.rope_theta)

    @abstractmethod
    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        """The frequencies and the attention factor for a sequence.

        Args:
            sequence_length: total tokens of the sequence. Only methods that are ``length_dependent`` use it; for them,
                None means the original length.

        Returns:
            :class:`RopeFrequencies`.
        """

    def inv_freq_at(self, positions: Tensor, inv_freq: Tensor) -> Tensor:
        """The frequencies at single positions, for methods that treat some positions differently.

        Args:
            positions: float64 ``[..., 1]``, tokens.
            inv_freq: result of :meth:`frequencies`, on the positions' device.

        Returns:
            ``inv_freq``, or ``[..., rotary_dim // 2]``.
        """
        return inv_freq

    def length_class(self, sequence_length: int) -> int | None:
        """A length that stands for all that have the same frequencies as this one; None if all lengths have.

        Args:
            sequence_length: total tokens of a sequence.
        """
        return sequence_length if self.length_dependent else None

    @property
    def rotates(self) -> bool:
        """Whether it turns any pair in any layer."""
        return True

    @property
    def plain(self) -> RopeMethod:
        """The method that a checkpoint with this method counts as when it is extended; itself for most."""
        return self

    @property
    def switch_length(self) -> int | None:
        """Tokens beyond which cached keys and new queries would have different frequencies; None if nothing changes."""
        return None

    # From and to a config.

    @classmethod
    def from_entry(cls, entry: ConfigEntry) -> RopeMethod:
        """Read the method from a config. By default every field has the same name in the config.

        Raises:
            RopewalkError: if a parameter is missing or wrong; the message names it.
        """
        values: dict[str, Any] = {}
        # The first two fields, rotary_dim and rope_theta, are not parameters of a method: they come with the entry.
        for field in fields(cls)[2:]:
            if field.name == ORIGINAL:
                values[ORIGINAL] = entry.length_before_extension()
            elif field.name in entry.values:
                values[field.name] = entry.values[field.name]
            elif field.default is MISSING:
                values[field.name] = entry.need(field.name)
        return cls(entry.rotary_dim, entry.rope_theta, **values)

    def as_written(self) -> RopeMethod:
        """The method in a form that a config can express, with the same frequencies; itself for most.

        Raises:
            RopewalkError: if a config cannot express it.
        """
        return self

    def as_computed_by_transformers(self) -> RopeMethod:
        """The method without the parts that only ropewalk's rotary module computes."""
        return self

    def to_entry(self) -> dict[str, Any]:
        """The parameters for a config as JSON values, without fields that are None."""
        # Without rotary_dim, which a config states as partial_rotary_factor.
        stated = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in stated.items()
            if value is not None
        }

    def top_level(self) -> dict[str, int]:
        """Lengths that a config with this method must state at its top level."""
        return {}

    @staticmethod
    def for_all_readers(entry: Mapping[str, Any], max_length: int) -> dict[str, Any]:
        """A config's parameters, extended so that programs other than transformers compute the same.

        Args:
            entry: the parameters as :meth:`to_entry` returns them.
            max_length: the config's ``max_position_embeddings``, in tokens.
        """
        return dict(entry)

    def config_warnings(
        self, entry: Mapping[str, Any], original: int | None, length: int | None
    ) -> list[str]:
        """Settings in a config of this method that are suspicious without contradicting each other.

        Args:
            entry: parameters of the method in the config.
            original: ``original_max_position_embeddings``, wherever the config states it, in tokens.
            length: ``max_position_embeddings``, in tokens.
        """
        return []

    def extended_length(self) -> int | None:
        """Tokens to which the checkpoint is extended, if its parameters alone determine it; otherwise None."""
        return None

    def unscaled_length(self, length: int | None) -> int | None:
        """Tokens of the model before any scaling, if ``length`` is its ``max_position_embeddings``."""
        original: int | None = getattr(self, ORIGINAL, length)
        return original

    # To a longer context.

    @classmethod
    def for_target(cls, current: RopeMethod, wanted: TargetContext) -> RopeMethod:
        """The method that extends a checkpoint.

        By default a factor, if the method has one, is derived from the lengths and multiplied by the factor of a
        checkpoint that this method already scales; its other parameters are kept.

        Args:
            current: an unscaled method, or one of this class.
            wanted: lengths and given parameters.
        """
        own = {field.name: field for field in fields(cls)}
        changes = dict(wanted.given)
        # A factor counts from the original length, so that of a scaled checkpoint is part of the new one.
        if "factor" in own:
            changes["factor"] = wanted.factor(current.factor if isinstance(current, cls) else 1.0)  # type: ignore[attr-defined]
        if isinstance(current, cls):
            return replace(current, **changes)
        if ORIGINAL in own:
            changes.setdefault(ORIGINAL, wanted.original_length)
        # Again without rotary_dim and rope_theta, which the checkpoint provides.
        missing = [n for n, f in own.items() if f.default is MISSING and n not in changes][2:]
        if missing:
            raise RopewalkError(f"{cls.name} needs {missing[0]}")
        return cls(current.rotary_dim, current.rope_theta, **changes)

    def with_theta(self, rope_theta: float) -> Self:
        """The same scaling with another base."""
        return replace(self, rope_theta=rope_theta)


def ratio_warning(
    method: RopeMethod, entry: Mapping[str, Any], original: int | None, length: int | None
) -> list[str]:
    """A warning if factor times original length differs from the stated length, for methods where they must agree."""
    factor = entry.get("factor")
    # Rounded, because the ratio of two lengths may not be exact in floating point.
    if factor is None or original is None or length is None or round(factor * original) == length:
        return []
    return [
        f"{method.name} factor {factor:g} times {ORIGINAL} {original} is {factor * original:g} tokens, but "
        f"max_position_embeddings is {length}"
    ]


def assumed_original(method: RopeMethod, others: str = "transformers, vLLM and llama.cpp") -> str:
    """What programs take for an original length that a config of the method leaves out, as a clause.

    Args:
        method: as read from the config.
        others: the programs that take ``max_position_embeddings`` for it, as read from their sources.
    """
    return (
        f"{method.name}: the config does not state {ORIGINAL}, for which {others} take {MAX_LENGTH} "
        f"{getattr(method, ORIGINAL)}"
    )


FACTOR = {"factor": "the stage's context divided by the original length (before any extension)"}
"""The parameter of methods that scale by one factor, with its description in recipes."""

ATTENTION = (
    "multiplier of cos and sin; default: the method's published formula (yarn keeps a checkpoint's own value)"
)
"""Description of the parameter ``attention_factor`` in recipes."""

CRITICAL_PAIR = "critical_pair"
"""The parameter of methods that can be told which pair is the first that did not complete a turn in training."""

METHODS: dict[str, type[RopeMethod]] = {}
"""Every method by the names that recipes use."""

Method = TypeVar("Method", bound=type[RopeMethod])


def register(method: Method) -> Method:
    """Class decorator: register a method in :data:`METHODS`.

    Raises:
        RopewalkError: if another class already has one of its names.
    """
    for name in (method.name, *method.other_names):
        if METHODS.setdefault(name, method) is not method:
            raise RopewalkError(f"there are two RoPE methods named {name!r}")
    return method


def trainable_methods() -> dict[str, type[RopeMethod]]:
    """The methods that a recipe may name."""
    return {name: method for name, method in METHODS.items() if method.trainable}


def compared_methods() -> tuple[str, ...]:
    """Names of the methods that are compared for a target length, besides the rules that set a base."""
    return tuple(name for name, method in METHODS.items() if method.origin is not None)


def methods_by_type() -> dict[str, type[RopeMethod]]:
    """The methods by the type that a config names, with older names last."""
    methods = {method.name: method for method in METHODS.values() if method.config_keys is not None}
    aliases = {alias: method for method in methods.values() for alias in method.rope_type_aliases}
    return {**methods, **aliases}
