"""What a RoPE method is: frequencies, a form in configs, a way to longer contexts; and the table of all methods.

Notation: ``d`` = ``rotary_dim``, ``b`` = ``rope_theta``, ``θ_i = b^(-2i/d)`` rad/token for the pair
``i = 0 … d/2 - 1``, ``T`` = ``original_max_position_embeddings`` (tokens the model was first trained for),
``s`` = ``factor``. Frequencies are computed in float64 on the CPU, whatever the default device or dtype is.

torch is imported where frequencies are computed, so the table of methods is there in milliseconds.
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
LLAMA_LIKE = ("llama", "mistral", "mixtral")
"""Model types whose RoPE factors llama.cpp's converter writes for llama3 alone."""


class RopeFrequencies(NamedTuple):
    """What a method comes down to.

    Attributes:
        inv_freq: float64 ``[rotary_dim // 2]`` on the CPU, rad/token.
        attention_factor: factor on cos and sin alike, so on every q·k its square; dimensionless.
    """

    inv_freq: Tensor
    attention_factor: float


class Origin(NamedTuple):
    """Where the number that a rule sets comes from, and what it leaves out."""

    formula: str
    source: str
    caveat: str


def unscaled_inv_freq(rotary_dim: int, rope_theta: float) -> Tensor:
    """``θ_i = rope_theta^(-2i/rotary_dim)``, float64 ``[rotary_dim // 2]`` on the CPU, rad/token.

    Source: Su et al., RoFormer, arXiv:2104.09864, section 3.2.2.
    """
    import torch

    # The device is named because models are built under torch.device("meta"), which would catch this tensor.
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / -rotary_dim
    inv_freq: Tensor = float(rope_theta) ** exponents
    return inv_freq


@dataclass(frozen=True)
class ConfigEntry:
    """The RoPE parameters of one layer type, with the config that they stand in.

    Attributes:
        rope_type: the type that they name.
        rotary_dim: rotated dimensions of a head, partial rotation counted in.
        rope_theta: RoPE base.
        values: the other parameters, those that are null left out.
        config: the whole config, which says the lengths that the parameters refer to.
    """

    rope_type: str
    rotary_dim: int
    rope_theta: float
    values: Mapping[str, Any]
    config: Mapping[str, Any]

    def need(self, key: str) -> Any:
        """A parameter that the type cannot do without."""
        if key not in self.values:
            raise RopewalkError(f"rope type {self.rope_type!r} needs {key}, and the config has none")
        return self.values[key]

    def max_length(self) -> int:
        """``max_position_embeddings``, tokens."""
        length = whole_number(self.config, MAX_LENGTH)
        if length is None:
            raise RopewalkError(
                "the config has no max_position_embeddings, which its RoPE parameters refer to"
            )
        return length

    def original_length(self) -> int:
        """The original length, inside the parameters or beside them; ``max_position_embeddings`` where neither is."""
        outside, inside = self.config.get(ORIGINAL), self.values.get(ORIGINAL)
        if inside is not None and outside is not None and inside != outside:
            raise RopewalkError(f"{ORIGINAL} is {outside} in the config but {inside} in its RoPE parameters")
        original = whole_number({ORIGINAL: outside if inside is None else inside}, ORIGINAL)
        return self.max_length() if original is None else original

    def length_before_extension(self) -> int:
        """The same where it is what came before an extension, so that it cannot be more than the present length."""
        original, length = self.original_length(), whole_number(self.config, MAX_LENGTH)
        if length is not None and original > length:
            raise RopewalkError(
                f"{ORIGINAL} {original} is more than max_position_embeddings {length}, though it is the length "
                "before the extension; correct the wrong one"
            )
        return original

    def factor(self, original: int) -> float:
        """The stated factor, else ``max_position_embeddings`` over the original length."""
        stated = self.values.get("factor")
        return self.max_length() / original if stated is None else stated


@dataclass(frozen=True)
class TargetContext:
    """What a method is asked for: from which length to which, and what the user sets other than by derivation.

    Attributes:
        original_length, target_length: tokens, the second not shorter.
        given: values by the method's own field names.
    """

    original_length: int
    target_length: int
    given: Mapping[str, Any]

    def factor(self, before: float = 1.0) -> float:
        """A given factor is the final one; a derived one goes on from what the checkpoint has."""
        given: float | None = self.given.get("factor")
        return before * self.target_length / self.original_length if given is None else given


@dataclass(frozen=True)
class RopeMethod(ABC):
    """The base of all methods; subclasses are final and say everything of themselves.

    A new method is a frozen dataclass in a module of its own, decorated with :func:`register`, and one line in
    ``ropewalk.rope.methods`` that imports it. Recipes, configs, ``inspect``, ``rope plan`` and ``export`` know it then.
    What the base class derives from the fields (how a config says the method, how a factor follows from a target
    length) needs no method of its own.

    Attributes:
        rotary_dim: rotated dimensions of a head, even.
        rope_theta: RoPE base as the checkpoint states it, > 1, dimensionless.
        name: how recipes, reports and, as its type, configs call the method.
        other_names: further names in recipes.
        rope_type_aliases: older names of the type in configs.
        parameters: the fields that a user may set in a recipe, each with what the reference says of it; where that is
            empty, its default is all there is to say.
        config_keys: parameters that a config of this type may have besides type, base and partial rotation; None where
            no config says the method by its own name.
        origin: where the method's setting for a target length comes from; None where it is not among the settings that
            are compared for one.
        trainable: whether a model may be trained with it.
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
    config_keys: ClassVar[tuple[str, ...] | None] = (ORIGINAL,)
    origin: ClassVar[Origin | None] = None
    trainable: ClassVar[bool] = True
    length_dependent: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_rotary_dim(self.rotary_dim)
        check_theta(self.rope_theta)

    @abstractmethod
    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        """The frequencies for a sequence; pure.

        Args:
            sequence_length: total tokens of the sequence. Only methods whose ``length_dependent`` is true
                read it; for them None means the original length.

        Returns:
            :class:`RopeFrequencies`.
        """

    def inv_freq_at(self, positions: Tensor, inv_freq: Tensor) -> Tensor:
        """The frequencies at single positions, for methods that treat some positions otherwise.

        Args:
            positions: float64 ``[..., 1]``, tokens.
            inv_freq: of :meth:`frequencies`, on the positions' device.

        Returns:
            ``inv_freq``, or ``[..., rotary_dim // 2]``.
        """
        return inv_freq

    @property
    def plain(self) -> RopeMethod:
        """What a checkpoint with this method counts as when it is extended; itself for most."""
        return self

    @property
    def switch_length(self) -> int | None:
        """Tokens beyond which cached keys would carry other frequencies than queries; None where nothing switches."""
        return None

    # From and to a config.

    @classmethod
    def from_entry(cls, entry: ConfigEntry) -> RopeMethod:
        """Read the method from a config. By default every field stands under its own name.

        Raises:
            RopewalkError: if a parameter is missing or wrong; the message names it.
        """
        values: dict[str, Any] = {}
        for field in fields(cls)[2:]:
            if field.name == ORIGINAL:
                values[ORIGINAL] = entry.length_before_extension()
            elif field.name in entry.values:
                values[field.name] = entry.values[field.name]
            elif field.default is MISSING:
                values[field.name] = entry.need(field.name)
        return cls(entry.rotary_dim, entry.rope_theta, **values)

    def as_written(self) -> RopeMethod:
        """The method as a config can say it, with the same frequencies; itself for most.

        Raises:
            RopewalkError: if a config cannot say it.
        """
        return self

    def as_computed_by_transformers(self) -> RopeMethod:
        """The method without what only ropewalk's rotary module computes."""
        return self

    def to_entry(self) -> dict[str, Any]:
        """The parameters for a config, JSON values; fields that are None are left out."""
        said = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in said.items()
            if value is not None
        }

    def top_level(self) -> dict[str, int]:
        """Lengths that belong at the top level of a config that says this method."""
        return {}

    @staticmethod
    def for_all_readers(entry: Mapping[str, Any], max_length: int) -> dict[str, Any]:
        """A config's parameters with what programs beside transformers need to compute the same.

        Args:
            entry: as :meth:`to_entry` gives them.
            max_length: the config's ``max_position_embeddings``.
        """
        return dict(entry)

    def reader_notes(self, context: int, model_type: str | None) -> list[str]:
        """Which programs read the method from a config, and which compute something else with it, a sentence each.

        Args:
            context: ``max_position_embeddings`` of the config, tokens.
            model_type: of the config, such as ``llama``; None where it is unknown.
        """
        return []

    def config_warnings(
        self, entry: Mapping[str, Any], original: int | None, length: int | None
    ) -> list[str]:
        """What in a config of this method is suspicious, but no contradiction.

        Args:
            entry: its parameters there.
            original: ``original_max_position_embeddings`` of the config, wherever it stands.
            length: ``max_position_embeddings``.
        """
        return []

    def extended_length(self) -> int | None:
        """Tokens that the parameters alone say the checkpoint is extended to; None where they do not."""
        return None

    def unscaled_length(self, length: int | None) -> int | None:
        """Tokens of the model before any scaling, where ``length`` is its ``max_position_embeddings``."""
        original: int | None = getattr(self, ORIGINAL, length)
        return original

    # To a longer context.

    @classmethod
    def for_target(cls, current: RopeMethod, wanted: TargetContext) -> RopeMethod:
        """The method that extends a checkpoint.

        By default a factor, if there is one, is derived from the lengths, times that of a checkpoint which is scaled by
        this method already; its other parameters stay.

        Args:
            current: unscaled, or of this class.
            wanted: lengths, and what is given.
        """
        own = {field.name: field for field in fields(cls)}
        changes = dict(wanted.given)
        if "factor" in own:
            changes["factor"] = wanted.factor(current.factor if isinstance(current, cls) else 1.0)  # type: ignore[attr-defined]
        if isinstance(current, cls):
            return replace(current, **changes)
        if ORIGINAL in own:
            changes.setdefault(ORIGINAL, wanted.original_length)
        missing = [n for n, f in own.items() if f.default is MISSING and n not in changes][2:]
        if missing:
            raise RopewalkError(f"{cls.name} needs {missing[0]}")
        return cls(current.rotary_dim, current.rope_theta, **changes)

    def with_theta(self, rope_theta: float) -> Self:
        """The same scaling of another base."""
        return replace(self, rope_theta=rope_theta)


def ratio_warning(
    method: RopeMethod, entry: Mapping[str, Any], original: int | None, length: int | None
) -> list[str]:
    """That factor times original length is not the length that the config states, for methods where it should be."""
    factor = entry.get("factor")
    # Rounded, because a ratio of lengths need not be a float.
    if factor is None or original is None or length is None or round(factor * original) == length:
        return []
    return [
        f"{method.name} factor {factor:g} times {ORIGINAL} {original} is {factor * original:g} tokens, but "
        f"max_position_embeddings is {length}"
    ]


FACTOR = {"factor": "target over trained length"}
"""The parameter of methods that scale by one number, with what recipes say of it."""

METHODS: dict[str, type[RopeMethod]] = {}
"""Every method by the names that a recipe uses."""

Method = TypeVar("Method", bound=type[RopeMethod])


def register(method: Method) -> Method:
    """Class decorator: enter a method in :data:`METHODS`.

    Raises:
        RopewalkError: if another class has one of its names.
    """
    for name in (method.name, *method.other_names):
        if METHODS.setdefault(name, method) is not method:
            raise RopewalkError(f"there are two RoPE methods named {name!r}")
    return method


def trainable_methods() -> dict[str, type[RopeMethod]]:
    """The methods that a recipe can name."""
    return {name: method for name, method in METHODS.items() if method.trainable}


def compared_methods() -> tuple[str, ...]:
    """Names of the methods that are compared for a target length, beside the rules that set a base."""
    return tuple(name for name, method in METHODS.items() if method.origin is not None)


def methods_by_type() -> dict[str, type[RopeMethod]]:
    """The methods by the type that a config names, older names last."""
    methods = {method.name: method for method in METHODS.values() if method.config_keys is not None}
    aliases = {alias: method for method in methods.values() for alias in method.rope_type_aliases}
    return {**methods, **aliases}
