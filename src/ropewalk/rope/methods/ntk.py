"""NTK-aware scaling of the base: fixed, or dynamic by the current length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

from ropewalk.errors import RopewalkError
from ropewalk.rope._checks import check_factor, check_ntk_dim, check_original_length, check_sequence_length
from ropewalk.rope.methods.base import (
    CRITICAL_PAIR,
    MAX_LENGTH,
    ORIGINAL,
    ConfigEntry,
    RopeFrequencies,
    RopeMethod,
    TargetContext,
    register,
)
from ropewalk.rope.methods.default import Default
from ropewalk.rope.theory.scaling import ntk_theta


@register
@final
@dataclass(frozen=True)
class Ntk(RopeMethod):
    """NTK-aware scaling: the base becomes ``b·s^(d/(d-2))``, where ``rope_theta`` is the checkpoint's base ``b``.

    In a config, the result is unscaled RoPE with the new base; :meth:`as_default` returns it as a :class:`Default`.
    """

    factor: float

    name: ClassVar[str] = "ntk"
    # An extended checkpoint states a larger base and no factor, so a factor counts from its present length.
    parameters: ClassVar[Mapping[str, str]] = {
        "factor": "the stage's context divided by the context before the stage",
        CRITICAL_PAIR: "index of the pair whose frequency is divided by exactly the factor, counted from 0; default: "
        "the last pair",
    }
    target_parameters: ClassVar[Mapping[str, type]] = {CRITICAL_PAIR: int}
    config_keys: ClassVar[tuple[str, ...] | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)
        check_ntk_dim(self.rotary_dim)

    def as_default(self) -> Default:
        """The same frequencies, bit for bit, as a :class:`Default` with the new base."""
        return Default(self.rotary_dim, ntk_theta(self.rotary_dim, self.rope_theta, self.factor))

    @classmethod
    def for_target(cls, current: RopeMethod, wanted: TargetContext) -> RopeMethod:
        """The derived or given factor; with a given critical pair, the new base as a :class:`Default`."""
        given = dict(wanted.given)
        pair = given.pop(CRITICAL_PAIR, None)
        method = super().for_target(current, replace(wanted, given=given))
        if pair is None:
            return method
        assert isinstance(method, Ntk)
        return Default(
            method.rotary_dim, ntk_theta(method.rotary_dim, method.rope_theta, method.factor, pair)
        )

    @property
    def plain(self) -> RopeMethod:
        return self.as_default()

    def as_written(self) -> RopeMethod:
        return self.as_default()

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        return self.as_default().frequencies()


@register
@final
@dataclass(frozen=True)
class DynamicNtk(RopeMethod):
    """NTK-aware scaling by ``s·L/T - (s - 1)``, which grows with the current length ``L``; unscaled up to ``T``.

    For inference only: each length has its own base, so keys cached at one length do not fit queries at another, and
    training at several lengths would train several bases.

    Source: emozilla, "Dynamically Scaled RoPE" (2023).
    """

    factor: float
    original_max_position_embeddings: int

    name: ClassVar[str] = "dynamic"
    config_keys: ClassVar[tuple[str, ...] | None] = ("factor", ORIGINAL)
    trainable: ClassVar[bool] = False
    length_dependent: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_factor(self.factor)
        check_ntk_dim(self.rotary_dim)
        check_original_length(self.original_max_position_embeddings)

    @property
    def plain(self) -> RopeMethod:
        return Default(self.rotary_dim, self.rope_theta)

    def frequencies(self, sequence_length: int | None = None) -> RopeFrequencies:
        original = self.original_max_position_embeddings
        # Below T the formula would shrink the base, but dynamic NTK leaves short sequences unscaled.
        length = max(check_sequence_length(sequence_length) or original, original)
        scale = self.factor * length / original - (self.factor - 1)
        return Default(self.rotary_dim, ntk_theta(self.rotary_dim, self.rope_theta, scale)).frequencies()

    @classmethod
    def from_entry(cls, entry: ConfigEntry) -> RopeMethod:
        # transformers starts dynamic NTK from max_position_embeddings; a config that states another original length
        # would run differently from what its author meant.
        length = entry.max_length()
        if entry.values.get(ORIGINAL, length) != length:
            raise RopewalkError(
                f"rope type 'dynamic' starts from max_position_embeddings {length}, but the config also has "
                f"{ORIGINAL} {entry.values[ORIGINAL]}; make them equal"
            )
        return cls(entry.rotary_dim, entry.rope_theta, entry.need("factor"), length)

    def to_entry(self) -> dict[str, Any]:
        # top_level states it instead, as max_position_embeddings.
        return {key: value for key, value in super().to_entry().items() if key != ORIGINAL}

    def top_level(self) -> dict[str, int]:
        return {MAX_LENGTH: self.original_max_position_embeddings}

    def config_warnings(
        self, entry: Mapping[str, Any], original: int | None, length: int | None
    ) -> list[str]:
        return ["rope type dynamic is for inference only: every length has its own base, so none is trained"]
