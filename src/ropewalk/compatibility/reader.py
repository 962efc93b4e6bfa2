"""A reader: how one program turns a config into the RoPE of each layer, and the tokens that it serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ropewalk.errors import RopewalkError
from ropewalk.models.config.layers import derived_kinds, layers_that_rotate, rope_name
from ropewalk.rope import RopeMethod, methods_from_config
from ropewalk.rope.methods.base import MAX_LENGTH

Config = Mapping[str, Any]
Methods = Mapping[str | None, RopeMethod]
"""RoPE methods by layer type; the key is None if all layers share one."""


class RefusedConfigError(RopewalkError):
    """The program stops at this config. The message says why."""


class UnreadConfigError(RopewalkError):
    """It is not known what the program makes of this config. The message says what was not read."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's config, as the readers need it.

    Attributes:
        stated: the decoder's part of ``config.json``, with the keys of the file and no others.
        completed: the same, with the defaults of transformers' config class.
    """

    stated: Config
    completed: Config

    @property
    def model_type(self) -> str:
        """Type of the decoder, such as ``llama``."""
        return str(self.completed.get("model_type", ""))

    @property
    def length(self) -> int:
        """``max_position_embeddings``, tokens."""
        return int(self.completed[MAX_LENGTH])

    def methods(self) -> Methods:
        """The methods that transformers 5 computes, which are the model's own."""
        return stated_methods(self.completed)

    @property
    def layers(self) -> tuple[tuple[str | None, bool], ...]:
        """For each layer, first to last, the key of its method, and whether the model's code applies RoPE in it."""
        kinds = self.completed.get("layer_types") or derived_kinds(self.completed)
        names = [rope_name(self.model_type, kind) for kind in kinds]
        methods = self.methods()
        keys = [name if name in methods else None for name in names]
        return tuple(zip(keys, layers_that_rotate(self.completed, kinds), strict=True))

    def method(self) -> RopeMethod:
        """The one method of all layers.

        Raises:
            UnreadConfigError: if layer types have methods of their own.
        """
        methods = self.methods()
        if None not in methods:
            raise UnreadConfigError(
                f"the program's code for models with {len(methods)} layer types was not examined"
            )
        return methods[None]


@dataclass(frozen=True)
class Reader:
    """One program, in the versions that read a config alike.

    Attributes:
        key: name for ``--for``.
        program: the program and its versions, for people.
        source: files from which the rules were read.
        methods: the methods that the program computes from a checkpoint's config. Raises :class:`RefusedConfigError` or
            :class:`UnreadConfigError`.
        served: tokens that it serves if no option sets the length; None if it has no such limit.
        launch: command that serves ``model`` with the whole context; None if the program is a library.
        option: command with which it computes the model's frequencies where it does not without; None if there is none.
        chooses: what decides between longrope's two lists of factors: the length of each ``input``, as in
            transformers; the longest input that the program is ``start``ed for; or, in each forward ``pass``, the
            largest position in it.
        launch_short: command that serves ``model`` with longrope's short factors, for inputs of up to so many tokens;
            None if there is none.
        every_fourth: model types in which the program rotates all layers but every fourth, whatever the config says;
            in others it rotates the layers that the model does.
    """

    key: str
    program: str
    source: str
    methods: Callable[[Checkpoint], Methods]
    served: Callable[[Checkpoint], int | None]
    launch: Callable[[str, Checkpoint], str | None]
    option: Callable[[str, Checkpoint], str | None] = lambda model, checkpoint: None
    chooses: Literal["input", "start", "pass"] = "input"
    launch_short: Callable[[str, int], str | None] = lambda model, tokens: None
    every_fourth: tuple[str, ...] = ()

    def rotates(self, checkpoint: Checkpoint) -> list[bool]:
        """Whether the program applies RoPE in a layer, for each, first to last."""
        fixed = checkpoint.model_type in self.every_fourth
        return [(number + 1) % 4 != 0 if fixed else own for number, (_, own) in enumerate(checkpoint.layers)]

    @property
    def fixed(self) -> bool:
        """Whether the frequencies are the same for every input."""
        return self.chooses == "start"


def stated_methods(config: Config) -> Methods:
    """The methods of a config as the types that it names: CoPE, or no RoPE, as longrope."""
    return {layer_type: method.as_written() for layer_type, method in methods_from_config(config).items()}


def refuse_unknown(methods: Methods, known: tuple[type[RopeMethod], ...]) -> None:
    """Raise for a method whose type the program does not know.

    Raises:
        RefusedConfigError: names the type.
    """
    for method in methods.values():
        if not isinstance(method, known):
            raise RefusedConfigError(f"it does not know the rope type {method.name!r}")


def transformed(checkpoint: Checkpoint, change: Callable[[RopeMethod], RopeMethod]) -> Methods:
    """The model's methods, each as a program changes it."""
    return {layer_type: change(method) for layer_type, method in checkpoint.methods().items()}
